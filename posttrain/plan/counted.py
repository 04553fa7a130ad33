"""Bytes a parameter of training, counted in two ways side by side."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.plan.memory import places
from posttrain.plan.work import Work

QUOTED = {"weights": 2, "gradients": 4, "float32 copies": 4, "mean of gradients": 4, "mean of their squares": 4}
"""Mixed precision as usually quoted: 18 bytes, with gradients in float32 (ZeRO has 16, with gradients of 2 bytes)."""
OF_WEIGHTS = ("weights", "float32 copies", "gradients", "gradients before they are summed")
OF_TRAINING, OF_COPIES = (*OF_WEIGHTS, "optimizer state", "average of the weights"), ("engine's weights", "reference")
"""Terms of `plan.memory` that belong to training, and those of further copies of the weights."""


def quoted(parameters: float) -> float:
    """Bytes of weights, gradients and optimizer state as usually quoted.

    >>> f"{quoted(7e9):.3g} {quoted(70e9):.3g} {quoted(405e9):.3g}"
    '1.26e+11 1.26e+12 7.29e+12'
    """
    return parameters * sum(QUOTED.values())


def ours(work: Work) -> tuple[float, float]:
    """Bytes a parameter by this package's plan: of what trains, and of the copies that sample and compare."""
    by_name = {t.name: t.bytes for p in places(work) for t in p.terms}
    trains, copies = (sum(by_name.get(n, 0.0) for n in names) for names in (OF_TRAINING, OF_COPIES))
    return trains / work.shape.parameters, copies / work.shape.parameters


def counted(work: Work) -> Iterator[str]:
    """Lines with the bytes a parameter in both ways: as usually quoted, and by this package's plan."""
    trains, copies = ours(work)
    parts = ", ".join(f"{name} {each}" for name, each in QUOTED.items())
    yield f"bytes a parameter: {sum(QUOTED.values())} as usually quoted ({parts})"
    if work.lora is not None:
        reason = "the base is frozen and has neither gradients nor moments"
    elif work.width == 4:
        reason = "weights and gradients are float32 and have no copy"
    else:
        reason = "gradients are summed in float32 beside those of a pass"
    of_ranks = f", each of {work.ranks} ranks" if work.ranks > 1 else ""
    yield f"  here {trains + copies:.3g}{of_ranks}: {trains:.3g} of what trains ({reason})"
    yield f"  and {copies:.3g} of copies that sample and compare"
