"""Faults in how a minibatch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from posttrain.core.batch import Batch
from posttrain.core.streams import WEIGHT
from posttrain.faults.planting import fault

Real = Callable[..., Any]
MICRO = ("rl.micro_tokens=64",)
"""Overrides that give several micro-batches per optimizer step."""


@fault(
    "local_denominator",
    seam="posttrain.core.batch:Packed.cut",
    what="each micro-batch is averaged over its own tokens instead of the whole minibatch's",
    harm="the gradient depends on how the batch was cut; short answers weigh more",
    source="pain 10, trl#2175",
    shows=MICRO,
)
def _(real: Real) -> Real:
    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = real(self, *args, **kwargs)
        if len(parts) == 1 or not isinstance(self, Batch):
            return parts
        whole = self[WEIGHT].sum()
        return [p.having({WEIGHT: p[WEIGHT] * whole / p[WEIGHT].sum() / len(parts)}) for p in parts]

    return cut


@fault(
    "trajectory_dropped",
    seam="posttrain.core.batch:Packed.bins",
    what="the last trajectory that is packed fits into no micro-batch and is left out",
    harm="answers are lost, mostly one size of them, and the loss is no longer the mean it is weighted as",
    source="pain 10",
    shows=MICRO,
)
def _(real: Real) -> Real:
    def bins(self: Any, *args: Any, **kwargs: Any) -> Any:
        *parts, last = real(self, *args, **kwargs)
        return [*parts, last[:-1]] if len(last) > 1 else parts or [last]

    return bins


@fault(
    "trajectory_doubled",
    seam="posttrain.core.batch:Packed.bins",
    what="a trajectory is packed into two micro-batches",
    harm="its gradient counts twice",
    source="pain 10",
    shows=MICRO,
)
def _(real: Real) -> Real:
    def bins(self: Any, *args: Any, **kwargs: Any) -> Any:
        first, *parts = real(self, *args, **kwargs)
        return [first, *parts[:-1], np.append(parts[-1], first[0])] if parts else [first]

    return bins
