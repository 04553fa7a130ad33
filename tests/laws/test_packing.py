"""Packing into micro-batches: every sequence once, no bin too full, families together, and no other gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posttrain.algorithm.losses import Likelihood
from posttrain.core.batch import Batch
from posttrain.core.bins import alike, bins, families
from posttrain.core.errors import InvariantError
from posttrain.core.sampling import Sampling
from posttrain.core.stage import Optimizer
from posttrain.core.streams import WEIGHT
from posttrain.core.types import Segment
from posttrain.engine.learner import HFLearner
from posttrain.engine.models import load_policy
from posttrain.engine.optimizer import StageOptimizer
from posttrain.engine.readout import read_out
from posttrain.engine.tree import SharedTree
from posttrain.faults.registry import planted
from posttrain.role.trainer import Trainer
from tests.rooms.engine_parts import ALPHABET, tiny

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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 100), st.integers(0, 5))
def test_every_item_once_and_no_bin_too_full(sizes: list[int], room: int, kinds: int) -> None:
    """Without families no packing needs less than half of the bins."""
    keys = [np.full(min(n, 20), i % kinds if kinds else i, np.int32) for i, n in enumerate(sizes)]
    found = bins(keys, sizes, room)
    assert sorted(i for b in found for i in b) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in b) <= room or len(b) == 1 for b in found)
    if not kinds:
        least = max(sum(sizes) / room, sum(n > room / 2 for n in sizes))
        assert len(found) <= max(2 * least, 1) + sum(n > room for n in sizes)
    for family in families(keys, sizes, room):
        assert any(set(family) <= set(b) for b in found)


def test_first_fit_decreasing_by_hand() -> None:
    keys = [np.array([i]) for i in range(6)]
    assert bins(keys, [4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 2, 3, 5]]


@settings(max_examples=30, deadline=None)
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
    room = 140 * len(seen)
    assert gauges["learner/bin_waste"].mean == pytest.approx(1 - len(data.ids_N) / room, abs=1e-12)


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
