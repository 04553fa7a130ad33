"""Faults of runs over ranks, planted in every process of the run: in the test's own, which is rank 0, and in those that
it starts, whose program is this module instead of `posttrain.controller.rank_worker`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.distributed.fsdp import FSDPModule

from posttrain.controller import rank_worker
from posttrain.core.batch import Batch
from posttrain.core.streams import WEIGHT
from posttrain.engine import optimizer as optimizers
from posttrain.engine.optimizer import StageOptimizer

PLANTED = "POSTTRAIN_RANK_FAULT"


def _one_rank_in_the_norm(rank: int) -> Any:
    return patch.object(optimizers, "joint_norm", lambda norms: norms[0])


def _own_norm(rank: int) -> Any:
    return patch.object(optimizers, "joint_norm", lambda norms: norms[rank])


def _factor(factor: float | None) -> Callable[[int], Any]:
    """Gradients divided by this after they are summed; None: by the number of ranks, as torch does unasked."""
    real = FSDPModule.set_gradient_divide_factor

    def setting(module: Any, _: float) -> None:
        if factor is not None:
            real(module, factor)

    return lambda rank: patch.object(FSDPModule, "set_gradient_divide_factor", setting)


def _local_denominator(rank: int) -> Any:
    real = Batch.shard

    def shard(self: Batch, at: int, world: int) -> Batch:
        share = real(self, at, world)
        if share is self or WEIGHT not in share or not share.episodes:
            return share
        weights = share[WEIGHT]
        return share.having({WEIGHT: weights * (np.abs(self[WEIGHT]).sum() / np.abs(weights).sum())})

    return patch.object(Batch, "shard", shard)


def _stale_rows(rank: int) -> Any:
    """The last rank books a step and leaves its rows as they were."""
    real = StageOptimizer._step

    def step(self: StageOptimizer, rule: Any, lr: float) -> None:
        if self.ranks.rank < self.ranks.world - 1:
            real(self, rule, lr)

    return patch.object(StageOptimizer, "_step", step)


def _skips_an_update(rank: int) -> Any:
    """The last rank leaves out the second update and does not count it."""
    real = StageOptimizer.step

    def step(self: StageOptimizer, share: float = 1.0) -> float:
        size = real(self, share)
        if self.ranks.rank == self.ranks.world - 1 and self.steps == 2:
            self.steps = 1
        return size

    return patch.object(StageOptimizer, "step", step)


def _rate_of_its_own(rank: int) -> Any:
    """The last rank steps with half of the learning rate that it says."""
    real = StageOptimizer._step

    def step(self: StageOptimizer, rule: Any, lr: float) -> None:
        real(self, rule, lr / 2 if self.ranks.rank == self.ranks.world - 1 else lr)

    return patch.object(StageOptimizer, "_step", step)


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a rank is left out of the norm": (_one_rank_in_the_norm, "the first optimizer step is not the configured one"),
    "each rank clips by its own norm": (_own_norm, "the first optimizer step is not the configured one"),
    "gradients are averaged over ranks": (_factor(None), "lacks a rank's part"),
    "gradients are reduced twice": (_factor(0.5), "summed twice"),
    "a rank's rows are never updated": (_stale_rows, "did not move in an optimizer step"),
    "a rank has a learning rate of its own": (_rate_of_its_own, "the first optimizer step is not the configured one"),
    "a rank leaves out an update": (_skips_an_update, "left out an update"),
    "each rank has its own denominator": (_local_denominator, "normalised by its own tokens"),
}
"""Each fault, and words of what the run says when it stops."""


@contextmanager
def planted(name: str, rank: int) -> Iterator[None]:
    """Inside, the fault of that name acts in this process; '': none."""
    if not name:
        yield
        return
    with FAULTS[name][0](rank):
        yield


def serve(rank: int, world: int, port: int, **told: Any) -> None:
    with planted(os.environ.get(PLANTED, ""), rank):
        rank_worker.serve(rank, world, port, **told)
