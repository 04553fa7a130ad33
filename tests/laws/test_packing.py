"""Packing into micro-batches: every sequence once, no bin too full, families together, and no other gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.stages.stage import Optimizer
from posttrain.core.batch import Batch
from posttrain.core.exchange.micro_batches import PACKED, WORTH, Room, alike, bins, families
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.core.types import Segment
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers.prefix_tree_attention import SharedTree
from posttrain.engine.layers.shared_prefixes import _until_read  # pyright: ignore[reportPrivateUsage]
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.role.trainer import Trainer
from posttrain.system.errors import InvariantError
from tests.engine.engine_parts import ALPHABET, tiny
from tests.mutants import planted

PROMPT = 20


def groups(prompts: int, siblings: int, longest: int, seed: int, vocabulary: int = 24) -> list[np.ndarray]:
    """Siblings of each prompt, whose answers differ in their first token, in any order."""
    rng = np.random.default_rng(seed)
    out = list[np.ndarray]()
    for p in range(prompts):
        prompt = np.concatenate([[p % vocabulary, p // vocabulary], rng.integers(0, vocabulary, PROMPT - 2)])
        for s in range(siblings):
            out.append(np.concatenate([prompt, [s], rng.integers(0, vocabulary, rng.integers(1, longest))]))
    return [out[i].astype(np.int32) for i in rng.permutation(len(out))]


def batch(parts: list[np.ndarray], unit: int = 1) -> Batch:
    """Demonstrations: all behind the prompt is spoken."""
    segments = list[Segment]()
    for ids in parts:
        mask = np.arange(len(ids)) >= PROMPT
        blank = np.where(mask, -1.0, np.nan).astype(np.float32)
        segments.append(Segment(ids, mask, blank, np.where(mask, 0, -1).astype(np.int32), Sampling()))
    spoken = sum(s.spoken for s in segments)
    made = Batch.of(segments, streams={WEIGHT: np.random.default_rng(0).random(spoken) / spoken})
    return made if unit == 1 else replace(made, unit_E=(np.arange(made.episodes) // unit).astype(np.int32))


def unique(packed: Batch) -> int:
    return len(SharedTree.of(packed.ids_N, packed.lengths_S).first_U)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 100), st.integers(0, 5))
def test_every_item_once_and_no_bin_too_full(sizes: list[int], room: int, kinds: int) -> None:
    """Without families no packing needs less than half of the bins."""
    keys = [np.full(min(n, 20), i % kinds if kinds else i, np.int32) for i, n in enumerate(sizes)]
    found = bins(keys, sizes, Room(room), sizes)
    assert sorted(i for b in found for i in b) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in b) <= room or len(b) == 1 for b in found)
    if not kinds:
        least = max(sum(sizes) / room, sum(n > room / 2 for n in sizes))
        assert len(found) <= max(2 * least, 1) + sum(n > room for n in sizes)
    for family in families(keys, sizes, Room(room), sizes)[0]:
        assert any(set(family) <= set(b) for b in found)


def test_first_fit_decreasing_by_hand() -> None:
    keys = [np.array([i]) for i in range(6)]
    sizes = [4, 8, 1, 4, 2, 1]
    for once in (False, True):
        assert bins(keys, sizes, Room(10, once), sizes) == [[1, 4], [0, 2, 3, 5]]


def test_what_is_computed_once_takes_room_once_by_hand() -> None:
    """Sequences of 20 tokens in room for 40. Two that begin with the same 15 take 20 + 20 - 8 positions, since the tree
    may round what they share down by 7; four take 56. Two families of two make 80 tokens, twice the room."""
    keys = [np.concatenate([np.full(15, i // 4), [100 + i] * 5]) for i in range(8)]
    assert bins(keys, [20] * 8, Room(40), [20] * 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert bins(keys, [20] * 8, Room(60, True), [20] * 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert bins(keys, [20] * 8, Room(56, True), [20] * 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert bins(keys, [20] * 8, Room(55, True), [20] * 8) != [[0, 1, 2, 3], [4, 5, 6, 7]]
    same = [np.arange(50)] * 3  # three take 50 + 7 + 7 positions, and are 150 tokens: never more than twice the room
    assert bins(same, [50] * 3, Room(74, True), [50] * 3) == [[0, 1], [2]]
    assert bins(same, [50] * 3, Room(75, True), [50] * 3) == [[0, 1, 2]]
    little = [np.append(np.arange(8), np.full(42, i)) for i in (50, 60)]  # 99 of 100: all 100 would be computed
    assert bins(little, [50] * 2, Room(99, True), [50] * 2) == [[0], [1]]
    for alone in ([0], [0, 4]):  # nothing shared: tokens count
        assert bins([keys[i] for i in alone], [20] * len(alone), Room(39, True), [20] * len(alone)) == [
            [i] for i in range(len(alone))
        ]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    prompts=st.integers(1, 8),
    siblings=st.integers(1, 8),
    longest=st.integers(2, 30),
    unit=st.sampled_from([1, 2]),
    room=st.integers(20, 400),
)
def test_no_pass_computes_more_positions_than_it_may(
    seed: int, prompts: int, siblings: int, longest: int, unit: int, room: int
) -> None:
    """What a learner makes of each micro-batch: the tree of what is read of it, or all tokens where that saves too
    little. All of the minibatch, each episode once."""
    parts = groups(prompts, siblings, longest, seed)
    data = batch(parts[: len(parts) // unit * unit] or parts[:1] * unit, unit)
    found = data.bins(room, once=True)
    assert sorted(e for b in found for e in b) == list(range(data.episodes))
    for micro in data.cut(found):
        ids, lengths, _ = _until_read(micro.ids_N, micro.lengths_S, micro.source_M)
        tree = SharedTree.of(ids, lengths)
        computed = len(tree.first_U) if tree.saving >= WORTH else len(ids)
        assert (computed <= room and len(micro.ids_N) <= PACKED * room) or micro.units == 1


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), prompts=st.integers(2, 12), siblings=st.integers(1, 6), unit=st.sampled_from([1, 2]))
def test_the_token_saving_is_that_of_the_whole_minibatch(seed: int, prompts: int, siblings: int, unit: int) -> None:
    """Where each family fits into a micro-batch, cutting the minibatch loses nothing of what sharing saves."""
    parts = groups(prompts, siblings, 12, seed)
    if unit == 2:  # the two sides of a pair belong to one prompt
        parts = sorted(parts, key=lambda x: x.tolist())[: len(parts) // 2 * 2]
    data = batch(parts, unit if siblings % 2 == 0 else 1)
    room = siblings * (PROMPT + 13)
    cut = data.cut(data.bins(room))
    assert all(len(m.ids_N) <= room for m in cut)
    assert sum(unique(m) for m in cut) == unique(data)


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_the_token_saving_equals_the_packing_ratio(arch: str) -> None:
    """What the layers really compute is the packed tokens divided by the packing ratio, packed / unique, without each
    answer's last token, which predicts nothing."""
    data = batch(groups(6, 4, 12, 0))
    learner = HFLearner(load_policy(tiny(arch, context=192), ALPHABET, 0))
    seen = list[int]()
    layer: nn.Module = read_out(learner.policy.module).decoder.get_submodule("h.0" if arch == "gpt2" else "layers.0")
    trainer = Trainer(learner, StageOptimizer(learner.parameters(), Optimizer(lr=1e-3)), micro_tokens=140)
    learner.score(data)  # the first use proves itself, which computes too
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    gauges = trainer.step(data, Likelihood())
    handle.remove()
    ratio = len(data.ids_N) / unique(data)
    assert len(seen) == gauges["learner/micro_batches"].sum > 2 and ratio > 1.5
    assert sum(seen) == unique(data) - data.episodes
    assert gauges["learner/shared"].mean == pytest.approx(1 - 1 / ratio, abs=1e-12)
    assert max(seen) <= 140
    sizes = [len(m.ids_N) for m in data.cut(data.bins(140, once=True))]
    room = sum(max(140, n) for n in sizes)
    assert sum(sizes) == len(data.ids_N) and max(sizes) > 140
    assert gauges["learner/bin_waste"].mean == pytest.approx(1 - len(data.ids_N) / room, abs=1e-12)


@pytest.mark.parametrize(("arch", "share"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", True)])
def test_room_counts_once_only_what_is_computed_once(arch: str, share: bool) -> None:
    """Not without `share_prefixes`, nor of a mixture of experts, whose routers may have chosen otherwise."""
    data = batch(groups(6, 4, 12, 0))
    learner = HFLearner(replace(load_policy(tiny(arch, context=192), ALPHABET, 0), share_prefixes=share))
    assert learner.computes_once == (share and arch == "qwen3")
    trainer = Trainer(learner, StageOptimizer(learner.parameters(), Optimizer(lr=1e-3)), micro_tokens=140)
    assert trainer.step(data, Likelihood())["learner/micro_batches"].sum == len(data.bins(140, learner.computes_once))
    assert len(data.bins(140, once=True)) < len(data.bins(140))


def gradient(data: Batch, micro_tokens: int) -> list[torch.Tensor]:
    learner = HFLearner(load_policy(tiny("gpt2", context=192), ALPHABET, 0).clone())
    learner.policy.module.double()
    found = list[torch.Tensor]()
    optimizer = StageOptimizer(learner.parameters(), Optimizer(lr=1e-3, warmup=0, clip=1e9))
    step = optimizer.step

    def noted() -> float:
        found.extend(p.grad.clone() for p in learner.parameters().values() if p.grad is not None)
        return step()

    optimizer.step = noted  # type: ignore[method-assign]
    Trainer(learner, optimizer, micro_tokens).step(data, Likelihood())
    return found


def test_the_gradient_is_that_of_the_minibatch() -> None:
    data = batch(groups(5, 3, 12, 1))
    whole = gradient(data, 10_000)
    for room in (40, 100, 300):
        for one, two in zip(gradient(data, room), whole, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_one_micro_batch_is_the_minibatch_itself() -> None:
    data = batch(groups(3, 3, 12, 2))
    assert data.cut(data.bins(10_000)) == [data]


def test_alike() -> None:
    assert [alike(np.array([1, 2, 3]), np.array(x)) for x in ([1, 2, 4], [1, 2], [2], [])] == [2, 2, 0, 0]


@pytest.mark.parametrize("fault", ["trajectory_dropped", "trajectory_doubled"])
def test_a_dropped_or_doubled_trajectory_is_caught(fault: str) -> None:
    data = batch(groups(5, 3, 12, 1))
    with planted(fault), pytest.raises(InvariantError, match="dropped or doubled a trajectory"):
        gradient(data, 100)
