"""What to make faster first: optimisations by role, and how much shorter each makes a step.

An optimisation multiplies the time of one role. The factors are the usually quoted ones; none was measured here. How
much a whole step gains depends on the share of the role in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from posttrain.plan.throughput import ROLES, Times
from posttrain.system.errors import ConfigError, nearest


@dataclass(frozen=True)
class Optimisation:
    """Something that makes one role faster."""

    name: str
    role: str
    factor: float
    """The share of the role's time that is left."""
    says: str
    """The optimisation in a few words."""


OPTIMISATIONS: Mapping[str, Optimisation] = {
    o.name: o
    for o in (
        Optimisation("prefix", "rollout", 0.4, "share the prompt's cache among siblings"),
        Optimisation("batching", "rollout", 0.6, "take new answers as soon as others end"),
        Optimisation("speculation", "rollout", 0.7, "draft several tokens a pass"),
        Optimisation("fp8", "rollout", 0.7, "weights and products of the engine in 8 bits"),
        Optimisation("head", "learn", 0.8, "log-probs in tiles, without a matrix of scores"),
        Optimisation("packing", "learn", 0.7, "sequences back to back, without padding"),
        Optimisation("sharding", "learn", 0.85, "weights over ranks, and activations computed again: larger passes"),
        Optimisation("every 5", "sync", 0.2, "send weights every fifth step; samples are older then"),
        Optimisation("reference pool", "reference", 0.0, "score on devices of its own, beside the rollout"),
    )
}
"""Overlap is no factor: `faster(..., overlap=True)` runs roles at once."""


def faster(times: Times, chosen: Collection[str], overlap: bool = False) -> float:
    """Seconds of a step with these optimisations.

    >>> faster(Times(60, 10, 5, 20, 5), ["prefix"])
    64.0

    Raises:
        ConfigError: there is no such optimisation.
    """
    shares: dict[str, float] = dict.fromkeys(ROLES, 1.0)
    for name in chosen:
        if name not in OPTIMISATIONS:
            raise ConfigError(f"no optimisation {name!r} is known; {nearest(name, OPTIMISATIONS)}")
        # Factors of one role multiply: each is of the time that the others leave.
        shares[OPTIMISATIONS[name].role] *= OPTIMISATIONS[name].factor
    changed = replace(times, **{role: getattr(times, role) * share for role, share in shares.items()})
    return changed.step("asynchronous" if overlap else "colocated")


def order(times: Times) -> list[tuple[str, float]]:
    """The optimisations in the order in which to make them, with the seconds of a step after each.

    Each one is the one that saves most after those before it.
    """
    chosen, out = list[str](), list[tuple[str, float]]()
    while len(chosen) < len(OPTIMISATIONS):
        # What is worth doing next depends on what was done: a role that became short is no longer the bottleneck.
        best = min((n for n in OPTIMISATIONS if n not in chosen), key=lambda n: faster(times, [*chosen, n]))
        chosen.append(best)
        out.append((best, faster(times, chosen)))
    return out
