"""Faults of runs over ranks. Each is planted in every process of the run, and acts only where there are several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import WEIGHT
from posttrain.faults.planting import fault

Real = Callable[..., Any]
OPTIMIZER = "posttrain.engine.optimizer.optimizer:StageOptimizer"
TRAINER = "posttrain.role.trainer:Trainer"
WRONG_STEP = "ranks hold rows of different steps, so the weights are those of no step at all"


def _last(ranks: Any) -> bool:
    """Returns whether this is the last of several ranks."""
    return ranks.world > 1 and ranks.rank == ranks.world - 1


@fault(
    "rank_left_out_of_norm",
    seam="posttrain.engine.optimizer.optimizer:joint_norm",
    what="the norm of the gradient is that of one rank's rows",
    harm="the clip acts later than it is configured to, the more ranks the later",
    source="exact global clip",
    needs="ranks",
)
def _(real: Real) -> Real:
    return lambda norms: norms[0]


@fault(
    "rank_clips_by_own_norm",
    seam=f"{OPTIMIZER}._norm",
    what="each rank clips by the norm of its own rows",
    harm="ranks scale their gradients differently, so the update points elsewhere",
    source="exact global clip",
    needs="ranks",
)
def _(real: Real) -> Real:
    def norm(self: Any, tensors: list[Any]) -> Any:
        found = real(self, tensors)
        if self.ranks.world == 1:
            return found
        own = sum(float(t.grad.double().square().sum()) for t in tensors if t.grad is not None)
        return found.new_tensor(own**0.5)

    return norm


def _divided(real: Real, factor: Callable[[int], float]) -> Real:
    """Layers whose summed gradients are divided by `factor(ranks)`."""

    def cut(module: Any, heads: Any, ranks: Any, **how: Any) -> Any:
        found = real(module, heads, ranks, **how)
        for part in found.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_gradient_divide_factor(factor(ranks.world))
        return found

    return cut


@fault(
    "gradients_averaged_over_ranks",
    seam="posttrain.engine.parallel.sharded_learner:cut",
    what="gradients are averaged over ranks, and the loss is normalised over the whole minibatch already",
    harm="the learning rate of plain SGD shrinks with the number of ranks, and the clip never acts",
    source="local denominators",
    needs="ranks",
)
def _(real: Real) -> Real:
    return _divided(real, float)


@fault(
    "gradients_reduced_twice",
    seam="posttrain.engine.parallel.sharded_learner:cut",
    what="gradients are summed over ranks twice",
    harm="every gradient is twice as large, and the clip acts where it should not",
    source="double reduction",
    needs="ranks",
)
def _(real: Real) -> Real:
    return _divided(real, lambda world: 1.0 if world == 1 else 0.5)


@fault(
    "rank_not_in_the_sum",
    seam="posttrain.engine.parallel.sharded_learner:ShardedLearner.forward",
    what="the gradient of one rank's share does not reach the sum",
    harm="a part of every minibatch is sampled, judged and never learned from",
    source="a rank that is skipped",
    needs="ranks",
)
def _(real: Real) -> Real:
    def forward(self: Any, packed: Any, *asked: Any) -> Any:
        scores = real(self, packed, *asked)
        if not _last(self.ranks) or scores.logp is None:
            return scores
        return replace(scores, logp=scores.logp.detach() + 0 * scores.logp)

    return forward


@fault(
    "rank_rows_never_updated",
    seam=f"{OPTIMIZER}._step",
    what="one rank counts an update and leaves its rows as they are",
    harm=WRONG_STEP,
    source="stale shard",
    needs="ranks",
)
def _(real: Real) -> Real:
    return lambda self, rule, lr: None if _last(self.ranks) else real(self, rule, lr)


@fault(
    "rank_has_own_learning_rate",
    seam=f"{OPTIMIZER}._step",
    what="one rank steps with half of the learning rate that it says",
    harm="the rows of one rank learn at another speed than the rest of the same matrix",
    source="stale shard",
    needs="ranks",
)
def _(real: Real) -> Real:
    return lambda self, rule, lr: real(self, rule, lr / 2 if _last(self.ranks) else lr)


@fault(
    "rank_leaves_out_update",
    seam=f"{OPTIMIZER}.step",
    what="one rank leaves out an update and does not count it",
    harm=WRONG_STEP,
    source="stale shard",
    needs="ranks",
)
def _(real: Real) -> Real:
    def step(self: Any, share: float = 1.0) -> float:
        size = real(self, share)
        if _last(self.ranks) and self.steps == 2:
            self.steps = 1
        return size

    return step


@fault(
    "rank_has_own_denominator",
    seam="posttrain.core.batch:Batch.shard",
    what="each rank normalises the loss by its own share",
    harm="a token weighs more where its rank has fewer, so the loss depends on how many ranks there are",
    source="local denominator across ranks",
    needs="ranks",
)
def _(real: Real) -> Real:
    def shard(self: Any, at: int, world: int) -> Any:
        share = real(self, at, world)
        if share is self or WEIGHT not in share or not share.episodes:
            return share
        weights = share[WEIGHT]
        return share.having({WEIGHT: weights * (np.abs(self[WEIGHT]).sum() / np.abs(weights).sum())})

    return shard


@fault(
    "uneven_units_dropped",
    seam="posttrain.core.batch:Batch.shares",
    what="units that do not divide evenly over ranks are dropped",
    harm="episodes are sampled and judged and never learned from, and which ones depends on the number of ranks",
    source="uneven tokens dropped",
    needs="ranks",
)
def _(real: Real) -> Real:
    def shares(self: Any, world: int) -> Any:
        found = real(self, world)
        return tuple(x[: min(map(len, found))] for x in found)

    return shares


@fault(
    "rank_has_another_minibatch",
    seam=f"{TRAINER}.step",
    what="one rank weighs the same minibatch otherwise",
    harm="ranks add gradients of different losses",
    source="ranks that go different ways",
    needs="ranks",
)
def _(real: Real) -> Real:
    def step(self: Any, batch: Any, *given: Any, **named: Any) -> Any:
        if _last(self.ranks) and WEIGHT in batch:
            batch = batch.having({WEIGHT: batch[WEIGHT] * 1.001})
        return real(self, batch, *given, **named)

    return step


@fault(
    "rank_sends_old_version",
    seam=f"{TRAINER}._update",
    what="one rank does not count its updates, and sends its rows under an older version",
    harm="the engine would serve a matrix of rows from different steps",
    source="pain 4",
    needs="ranks",
)
def _(real: Real) -> Real:
    def update(self: Any, *given: Any) -> Any:
        found = real(self, *given)
        self.version -= _last(self.ranks)
        return found

    return update
