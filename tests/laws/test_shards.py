"""Law 2, shards: a minibatch cut over ranks is the same minibatch, and what a rank cannot do alone is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.run import Optimizer
from posttrain.core.batch import Batch
from posttrain.core.exchange.micro_batches import balanced
from posttrain.core.exchange.ranks import ALONE, check_same, joint_norm
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.engine.adapters.quantise import quantise
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.optimizer.optimizer import ELEMENTWISE, StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.role.learning.rank_share import check_shares, digest, smallest_unit
from posttrain.role.trainer import Trainer
from posttrain.system.errors import ConfigError, InvariantError
from tests.engine.engine_parts import ALPHABET, policy, segments, tiny


def batch(units: list[int], seed: int = 0, sampling: Sampling = Sampling()) -> Batch:
    """Units of so many episodes; some episodes have two segments."""
    rng = np.random.default_rng(seed)
    episodes = sum(units)
    sequence = np.repeat(np.arange(episodes, dtype=np.int32), rng.integers(1, 3, episodes))
    parts = segments(len(sequence), seed, sampling=sampling)
    weights = rng.random(sum(s.spoken for s in parts))
    unit_E = np.repeat(np.arange(len(units), dtype=np.int32), units)
    return Batch.of(parts, sequence.tolist(), unit_E=unit_E, streams={WEIGHT: weights / weights.sum()})


class OneOf:
    """A rank that is told what all ranks say."""

    def __init__(self, rank: int, world: int, said: list[Any]) -> None:
        self.rank, self.world, self._said = rank, world, said

    def every(self, value: Any) -> list[Any]:
        return self._said.pop(0) if self._said else [value] * self.world


@settings(max_examples=150)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_every_unit_is_on_one_rank_as_it_was(units: list[int], world: int, seed: int, cut: bool) -> None:
    """Whole units, each on exactly one rank, in their order, with their tokens, weights and kept sets; ranks may be
    empty; and sharding over one rank is the minibatch itself."""
    whole = batch(units, seed, Sampling(top_k=6) if cut else Sampling())
    shares = whole.shares(world)
    assert sorted(e for share in shares for e in share) == list(range(whole.episodes))
    unit_E = whole.unit_E
    assert unit_E is not None
    owners = [{r for r in range(world) if u in unit_E[shares[r]]} for u in range(whole.units)]
    assert all(len(ranks) == 1 for ranks in owners)
    for rank, share in enumerate(shares):
        mine = whole.shard(rank, world)
        assert np.all(np.diff(share) > 0) and mine.episodes == len(share)
        assert mine.units == len({*unit_E[share].tolist()})
        at = np.isin(whole.sequence_M, share)
        assert np.array_equal(mine.target_M, whole.target_M[at]) and np.array_equal(mine[WEIGHT], whole[WEIGHT][at])
        for place, episode in enumerate(share.tolist()):
            assert np.array_equal(mine.ids_of(place), whole.ids_of(episode))
        if whole.kept is not None and mine.kept is not None:
            sets = [k.tolist() for k, yes in zip(whole.kept.sets(), at, strict=True) if yes]
            assert [k.tolist() for k in mine.kept.sets()] == sets
    assert whole.shard(0, 1) is whole


@settings(max_examples=200)
@given(st.lists(st.integers(1, 100), min_size=0, max_size=40), st.integers(1, 8))
def test_ranks_are_balanced(sizes: list[int], parts: int) -> None:
    """Longest first into the lightest: no rank is ahead of another by more than the smallest item that it has."""
    found = balanced(sizes, parts)
    assert len(found) == parts and sorted(i for part in found for i in part) == list(range(len(sizes)))
    total = [sum(sizes[i] for i in part) for part in found]
    for part, own in zip(found, total, strict=True):
        assert not part or own - min(sizes[i] for i in part) <= min(total)
    assert balanced([2, 5, 3, 4], 2) == [[0, 1], [2, 3]]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InvariantError, match="give a rank"):
            batch([1, 1]).shard(rank, world)


def test_all_ranks_must_have_the_minibatch_and_only_it() -> None:
    """Dropped tokens, units on two ranks, weights of a rank's own, and another minibatch are named on every rank."""
    whole = batch([1, 2, 1, 1])
    shares, same = whole.shares(2), digest(whole)
    rows = [(s.tolist(), whole.select(s).spoken, float(whole.select(s)[WEIGHT].sum())) for s in shares]
    mine = [whole.shard(0, 2)]

    def told(first: tuple[Any, ...], second: tuple[Any, ...], digests: tuple[str, str] = (same, same)) -> None:
        check_shares(OneOf(0, 2, [[*digests], [first, second]]), whole, shares[0], mine)

    told(rows[0], rows[1])
    with pytest.raises(InvariantError, match="on no rank"):
        told(rows[0], (rows[1][0][:-1], *rows[1][1:]))
    with pytest.raises(InvariantError, match="dropped or doubled"):
        told(rows[0], (rows[1][0], rows[1][1] - 1, rows[1][2]))
    with pytest.raises(InvariantError, match="on several"):
        told(rows[0], (rows[1][0] + rows[0][0][:1], *rows[1][1:]))
    with pytest.raises(InvariantError, match="normalised by its own tokens"):
        told(rows[0], (*rows[1][:2], 1.0))
    with pytest.raises(InvariantError, match="rank 1 has"):
        told(rows[0], rows[1], (same, digest(batch([1, 2, 1, 1], 1))))
    check_shares(ALONE, whole, np.arange(whole.episodes), [])


def test_a_digest_sees_everything_that_a_loss_reads() -> None:
    whole = batch([1, 2])
    changed = [
        whole.having({WEIGHT: whole[WEIGHT] * (1 + 1e-15)}),
        whole.having({WEIGHT: None}),
        replace(whole, unit_E=np.array([0, 1, 1], np.int32)[: whole.episodes] * 0),
        whole.select([0]),
        batch([1, 2], sampling=Sampling(top_k=6)),
    ]
    assert len({digest(whole), *map(digest, changed)}) == len(changed) + 1 and digest(whole) == digest(batch([1, 2]))


def test_the_smallest_unit_is_what_a_waiting_rank_computes() -> None:
    whole = batch([2, 1, 3])
    sizes = [len(whole.select(whole.members(u)).ids_N) for u in range(3)]
    assert len(smallest_unit(whole).ids_N) == min(sizes) and smallest_unit(whole).units == 1


def test_norms_of_parts_are_one_norm() -> None:
    assert joint_norm([3.0, 4.0]) == 5.0 and joint_norm([7.5]) == 7.5
    for wrong in (float("nan"), float("inf"), 1e200):
        assert not joint_norm([1.0, wrong]) < 1e300


def test_ranks_that_disagree_are_named() -> None:
    check_same(OneOf(0, 3, []), 4, "number of steps", "")
    with pytest.raises(InvariantError, match=r"number of steps: rank 0 has 4, rank 2 has 3\. Go back"):
        check_same(OneOf(0, 3, [[4, 4, 3]]), 4, "number of steps", "Go back.")


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_an_optimizer_that_needs_whole_weights_is_refused(kind: Any) -> None:
    weights = {"w": torch.nn.Parameter(torch.ones(4, 4))}
    assert kind not in ELEMENTWISE
    with pytest.raises(ConfigError, match=f"optimizer.kind={kind}.*adamw or sgd"):
        StageOptimizer(weights, Optimizer(kind=kind), ranks=OneOf(0, 2, []))


def test_the_clip_reads_the_norm_of_all_ranks() -> None:
    """This rank's gradient is 3, another's 4: clipped to a norm of 1 as 3 / 5."""
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    config = Optimizer(kind="sgd", lr=1.0, warmup=0, clip=1.0, weight_decay=0.0, momentum=None)
    own = OneOf(0, 2, [[(0, 1.0), (0, 1.0)], [3.0, 4.0]])
    optimizer = StageOptimizer({"w": w}, config, ranks=own)
    w.grad = torch.tensor([3.0], dtype=torch.float64)
    assert optimizer.step() == 5.0
    assert float(w.detach()) == pytest.approx(-0.6, rel=1e-6)


def test_what_is_not_built_for_ranks_is_refused_by_name() -> None:
    """Before anything is cut. What the page lists and a policy can be."""
    mixed = load_policy(tiny("qwen3"), ALPHABET, 0)
    mixed.module.config.num_local_experts = 4
    in_few_bits = policy()
    quantise(in_few_bits.module, "int8")
    for one, words in ((in_few_bits, "model.quantize is not built"), (mixed, "mixture of 4 experts")):
        with pytest.raises(ConfigError, match=words):
            ShardedLearner(one, OneOf(0, 2, []))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="joined"):
        ProcessRanks()


@pytest.mark.parametrize("left_out", ["learner", "optimizer", "trainer"])
def test_learner_optimizer_and_trainer_have_the_same_ranks(left_out: str) -> None:
    """Who forgets `ranks=` once is told, before gradients are counted twice."""
    two: Any = OneOf(0, 2, [])
    parts: Any = {w: SimpleNamespace(ranks=two) for w in ("learner", "optimizer") if w != left_out}
    parts = {"learner": SimpleNamespace(), "optimizer": SimpleNamespace()} | parts
    with pytest.raises(ConfigError, match="Give all three the same ranks="):
        Trainer(**parts, micro_tokens=8, ranks=ALONE if left_out == "trainer" else two)
    Trainer(SimpleNamespace(ranks=two), SimpleNamespace(ranks=two), 8, ranks=two)  # pyright: ignore[reportArgumentType]
