"""Further tasks of the processes of `test_ranks`: planted faults, weights on one rank, checkpoints, wrong gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from law_ranks import LOSSES, Case, Distance, Groups, distance, minibatch, one_process, results, trained, trainer

from posttrain.core.batch import Batch, Packed
from posttrain.core.streams import ADVANTAGE, WEIGHT
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.optimizer import optimizer as optimizers
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel import shard_modules, sharded_learner
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.role import trainer as trainers
from posttrain.role.events import DifferentiatedEvent, Observer, Observers
from posttrain.role.learner_passes import Needs
from posttrain.role.sync import whole_tensors
from posttrain.role.trainer import NonFiniteGradient, Trainer
from posttrain.system.errors import InvariantError, PosttrainError

CASE = Case("likelihood", 24)

# --- planted faults ---------------------------------------------------------------------------------------------------


def _one_rank_in_the_norm(rank: int) -> Any:
    return patch.object(optimizers, "joint_norm", lambda norms: norms[0])


def _own_norm(rank: int) -> Any:
    return patch.object(optimizers, "joint_norm", lambda norms: norms[rank])


def _factor(factor: float | None) -> Callable[[int], Any]:
    """Gradients divided by this after they are summed; None: by the number of ranks, as torch does unasked."""
    return lambda rank: patch.object(shard_modules.FSDPModule, "set_gradient_divide_factor", _setting(factor))


def _setting(factor: float | None) -> Callable[[Any, float], None]:
    real = shard_modules.FSDPModule.set_gradient_divide_factor
    return lambda module, _: None if factor is None else real(module, factor)


def _local_denominator(rank: int) -> Any:
    real = Batch.shard

    def shard(self: Batch, rank: int, world: int) -> Batch:
        own = real(self, rank, world)
        return own.having({WEIGHT: own[WEIGHT] / own[WEIGHT].sum()})

    return patch.object(Batch, "shard", shard)


def _uneven_dropped(rank: int) -> Any:
    real = Packed.shares

    def shares(self: Packed, world: int) -> list[np.ndarray]:
        found = real(self, world)
        return [x[: min(map(len, found))] for x in found]

    return patch.object(Packed, "shares", shares)


def _on_two_ranks(rank: int) -> Any:
    real = Packed.shares
    return patch.object(Packed, "shares", lambda self, world: [np.union1d(x, [0]) for x in real(self, world)])


def _skips_an_update(rank: int) -> Any:
    real, taken = StageOptimizer._step, list[int]()

    def step(self: Any, *rest: Any) -> None:
        if rank != 1:
            real(self, *rest)
            return
        self.steps -= not taken  # the first one is neither taken nor counted
        if taken:
            real(self, *rest)
        taken.append(1)

    return patch.object(StageOptimizer, "_step", step)


def _stale_rows(rank: int) -> Any:
    real = StageOptimizer._step
    return patch.object(StageOptimizer, "_step", real if rank != 1 else lambda self, *rest: None)


def _waiting_counts(rank: int) -> Any:
    """The pass with which a rank waits for others adds to the gradient."""

    def keep_step(self: Trainer, batch: Batch, loss: Any, passes: int) -> None:
        for _ in range(passes):
            one = trainers.smallest_unit(batch)
            loss.terms(one, self._forward(one, loss)).loss.backward()

    return patch.object(Trainer, "_keep_step", keep_step)


def _another_minibatch(rank: int) -> Any:
    real = Batch.shard
    other = minibatch(replace(CASE, turned=True))
    return patch.object(trainers, "check_shares", _given(other)) if rank == 1 else patch.object(Batch, "shard", real)


def _given(other: Batch) -> Callable[..., None]:
    real = trainers.check_shares
    return lambda ranks, batch, mine, micros: real(ranks, other, mine, micros)


def _other_weights(rank: int) -> Any:
    real = sharded_learner.fingerprint
    return patch.object(sharded_learner, "fingerprint", lambda tensors: f"{real(tensors)} {rank}")


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a rank is left out of the norm": (_one_rank_in_the_norm, "law"),
    "each rank clips by its own norm": (_own_norm, "law"),
    "gradients are averaged over ranks": (_factor(None), "law"),
    "gradients are reduced twice": (_factor(0.5), "law"),
    "the pass of a waiting rank counts": (_waiting_counts, "law"),
    "a rank's rows are never updated": (_stale_rows, "law"),
    "a rank leaves out an update": (_skips_an_update, "left out an update"),
    "each rank has its own denominator": (_local_denominator, "normalised by its own tokens"),
    "uneven units are dropped": (_uneven_dropped, "on no rank"),
    "a unit is on two ranks": (_on_two_ranks, "on several"),
    "a rank has another minibatch": (_another_minibatch, "do not have the same minibatch"),
    "a rank starts with other weights": (_other_weights, "do not have the same weights at the start"),
}
"""Each fault, and what catches it: the law, or a check with these words."""


@dataclass(frozen=True)
class Plant:
    """Every fault over four ranks: how far the run ends from the right one, or the error of this rank."""

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Distance | str]:
        out: dict[str, Distance | str] = {}
        ranks = groups[4]
        for name, (plant, _) in FAULTS.items() if ranks is not None else ():
            assert ranks is not None
            try:
                with plant(ranks.rank):
                    found = trained(CASE, ranks, 2)
                out[name] = distance(results(found), one_process(replace(CASE, micro_tokens=4096)))
            except PosttrainError as error:
                out[name] = str(error)
        return out


# --- weights, scores, wrong gradients ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Together:
    """What a rank's learner says of the whole: scores, fingerprints, passes; and weights gathered on one rank."""

    def __call__(self, groups: Groups, folder: Path) -> dict[int, dict[str, Any]]:
        right = one_process(replace(CASE, micro_tokens=4096))
        return {world: _together(ranks, right.fingerprint) for world, ranks in groups.items() if ranks is not None}


class Listener(Observer):
    """Wants every log-prob and its gradient."""

    def __init__(self) -> None:
        self.logp, self.gradient = np.zeros(0), np.zeros(0)

    def needs(self, roles: Any, event: Any) -> Needs:
        return Needs(logp=True, gradients=True)

    def on_event(self, roles: Any, event: Any) -> None:
        if not isinstance(event, DifferentiatedEvent):
            return
        batch, passes = event.packed.batch, event.passes
        self.logp, self.gradient = passes.joined(batch, passes.logp), passes.joined(batch, passes.logp_grad)


def listened(t: Trainer) -> tuple[np.ndarray, np.ndarray]:
    heard = Listener()
    t.step(minibatch(CASE), LOSSES[CASE.loss], Observers([heard]))
    return heard.logp, heard.gradient


def _together(ranks: ProcessRanks, fingerprint: str) -> dict[str, Any]:
    t, _ = trained(CASE, ranks, 2)
    learner, plain = t.learner, trained(CASE, None, 2)[0].learner
    assert isinstance(learner, ShardedLearner) and isinstance(plain, HFLearner)
    batch = minibatch(CASE)
    out: dict[str, Any] = {
        "scores": float(np.abs(learner.score(batch) - plain.score(batch)).max()),
        "entropy": float(np.abs(learner.entropy(batch) - plain.entropy(batch)).max()),
        "own": sum(p.numel() for p in learner.parameters().values()),
        "all": sum(p.numel() for p in plain.parameters().values()),
    }
    heard, wanted = listened(trainer(CASE, ranks)), listened(trainer(CASE, None))
    out["passes"] = max(float(np.abs(a - b).max()) for a, b in zip(heard, wanted, strict=True))
    mine = learner.fingerprint()
    for bucket in (1 << 12, 1 << 26):
        with sent_bytes() as sent:
            got = dict(whole_tensors(gathered(learner.shards(), ranks, t.version, bucket=bucket)))
        out[f"sent {bucket}"] = max(sent)
        out[f"tensors {bucket}"] = len(got)
        if ranks.rank == 0:
            fresh = trainer(CASE, None).learner
            assert isinstance(fresh, HFLearner)
            fresh.policy.module.load_state_dict(got, strict=False)
            out[f"arrived {bucket}"] = fresh.fingerprint() == mine and len(got) > 0
    try:
        list(gathered(learner.shards(), ranks, t.version - (ranks.rank == 1)))
        out["stale"] = ""
    except InvariantError as error:
        out["stale"] = str(error)
    return out


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Bytes of each bucket that this rank sends."""
    real, sent = dist.gather, list[int]()

    def gather(tensor: Any, *rest: Any, **more: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *rest, **more)

    with patch.object(dist, "gather", gather):
        yield sent


@dataclass(frozen=True)
class Wrong:
    """Two episodes with an infinite advantage: which each rank names."""

    def __call__(self, groups: Groups, folder: Path) -> dict[int, list[int]]:
        case = Case("policy", 24)
        batch = minibatch(case)
        advantage = batch[ADVANTAGE].copy()
        advantage[np.isin(batch.sequence_M, [1, 4])] = np.inf
        broken, out = batch.having({ADVANTAGE: advantage}), dict[int, list[int]]()
        for world, ranks in {0: None, **groups}.items():
            if world and ranks is None:
                continue
            t = trainer(case, ranks)
            before = {n: p.detach().clone() for n, p in t.trained().items()}
            try:
                t.step(broken, LOSSES["policy"])
            except NonFiniteGradient as error:
                out[world] = list(error.culprits)
            assert all(torch.equal(before[n], p) for n, p in t.trained().items())
            assert all(p.grad is None for p in t.learner.parameters().values())
        return out
