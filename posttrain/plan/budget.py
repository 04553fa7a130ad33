"""Optimisations by role. Each multiplies the time of one role by a usually quoted factor; none was measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
