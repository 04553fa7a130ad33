"""Laws 2, 3 and 6: splitting changes nothing, an unmoved policy is not restrained, and what was not said is not taught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_toys import SAMPLING, Answer, batch_of, gradient, scored_group
from test_gradients import CASES, World
from torch import Tensor

from posttrain.algorithm.credit import credit_step
from posttrain.algorithm.objective import objective
from posttrain.algorithm.streams import streams
from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.batch import Batch
from posttrain.core.ladder import PPO
from posttrain.core.pieces.baseline import Value
from posttrain.core.ports import TokenScores
from posttrain.core.types import Gauges, merge

ALL = [a for a, _ in CASES]
NAMES = [a.name for a in ALL]
L_MAX = SAMPLING.max_tokens


def places(batch: Batch, order: list[int] | None = None) -> np.ndarray:
    """Where each token of a batch lies in the flat order of `World`; `order` lists the world's episodes in the batch."""
    lengths = [len(e) for e in WORLD.eps]
    starts = np.cumsum([0, *lengths])
    order = list(range(len(lengths))) if order is None else order
    at = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    assert len(at) == batch.spoken
    return at


WORLD = World(3)


def whole(a: Algorithm) -> tuple[Batch, tuple[Tensor, ...]]:
    batch = batch_of(a, credit_step(a, WORLD.groups, max_tokens=L_MAX, ema=0.0))
    return batch, gradient(a, streams(batch, dtype=torch.float64), WORLD.lp, WORLD.H, WORLD.v)


def summed(a: Algorithm, parts: list[tuple[Batch, np.ndarray]]) -> tuple[list[Tensor], Gauges]:
    """Loss, gradients in the world's flat order, and gauges, added up over micro-batches."""
    total = [torch.zeros((), dtype=torch.float64), *(torch.zeros_like(WORLD.lp) for _ in range(3))]
    gauges: list[Gauges] = []
    for batch, at in parts:
        s = streams(batch, dtype=torch.float64)
        scores = TokenScores(WORLD.lp[at], WORLD.H[at], WORLD.v[at])
        terms = objective(a, s, scores)
        gauges.append(terms.gauges)
        grads = torch.autograd.grad(terms.loss, (WORLD.lp, WORLD.H, WORLD.v), allow_unused=True)
        total[0] = total[0] + terms.loss.detach()
        for k, g in enumerate(grads):
            total[k + 1] = total[k + 1] + (0 if g is None else g)
    return total, merge(*gauges)


def close(found: list[Tensor], right: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(f, r, rtol=0, atol=1e-10) for f, r in zip(found, right, strict=True))


@pytest.mark.parametrize("a", ALL, ids=NAMES)
def test_any_partition_into_micro_batches_adds_up(a: Algorithm) -> None:
    """Law 2: any assignment of episodes to micro-batches or ranks sums to the same loss, gradient and gauges (1e-10, float64)."""
    batch, right = whole(a)
    everything = objective(a, streams(batch, dtype=torch.float64), TokenScores(WORLD.lp, WORLD.H, WORLD.v)).gauges
    rng = np.random.default_rng(0)
    for ranks in (2, 3, batch.episodes):
        owner = np.arange(batch.episodes) if ranks == batch.episodes else rng.integers(0, ranks, batch.episodes)
        chosen = [[int(i) for i in np.flatnonzero(owner == r)] for r in range(ranks)]
        found, gauges = summed(a, [(part := batch.select(c), places(part, c)) for c in chosen if c])
        assert close(found, right)
        assert {n: g.count for n, g in gauges.items()} == {n: g.count for n, g in everything.items()}
        assert all(gauges[n].sum == pytest.approx(g.sum, abs=1e-9) for n, g in everything.items())


@pytest.mark.parametrize("a", ALL, ids=NAMES)
@pytest.mark.parametrize("room", [1, 12, 30])
def test_splitting_by_size_adds_up(a: Algorithm, room: int) -> None:
    """Law 2: the packer's own split, from one episode at a time to nearly everything."""
    batch, right = whole(a)
    parts: list[tuple[Batch, np.ndarray]] = []
    at = 0
    for micro in batch.split(room):
        parts.append((micro, np.arange(at, at + micro.spoken)))
        at += micro.spoken
    assert len(parts) > 1 and close(summed(a, parts)[0], right)


@pytest.mark.parametrize("a", ALL, ids=NAMES)
def test_order_of_episodes_does_not_matter(a: Algorithm) -> None:
    """Law 2: packing the same episodes in another order gives the same loss and gradient."""
    _, right = whole(a)
    order = [int(i) for i in np.random.default_rng(1).permutation(len(WORLD.eps))]
    batch = batch_of(a, credit_step(a, WORLD.groups, max_tokens=L_MAX, ema=0.0), order=order)
    assert close(summed(a, [(batch, places(batch, order))])[0], right)


@pytest.mark.parametrize("a", ALL, ids=NAMES)
def test_segments_of_an_episode_are_one_sequence(a: Algorithm) -> None:
    """Laws 2, 6: an episode cut into segments, interrupted by observations, or in one piece is the same episode."""
    _, right = whole(a)
    for cut in (lambda n: [[n]], lambda n: [[1] * n], lambda n: [[1]] * n):
        groups = [
            scored_group(str(i), [Answer(b.reward, cut(b.spoken), b.mu, b.start, b.reference, b.values) for b in g])
            for i, g in enumerate(WORLD.answers)
        ]
        batch = batch_of(a, credit_step(a, groups, max_tokens=L_MAX, ema=0.0))
        assert close(summed(a, [(batch, places(batch))])[0], right)


@pytest.mark.parametrize("a", [a for a in ALL if a.clip is not None], ids=[a.name for a in ALL if a.clip is not None])
def test_on_policy_every_trust_region_is_silent(a: Algorithm) -> None:
    """Law 3: before the first update every push is exactly 1, with the start known as this policy or left out."""
    batch = batch_of(a, credit_step(a, WORLD.groups, max_tokens=L_MAX, ema=0.0), with_start=a.anchor == "behaviour")
    lp = WORLD.lp if a.anchor == "start" else torch.tensor(batch.logp_mu_M.astype(np.float64), requires_grad=True)
    seen = objective(a, streams(batch, dtype=torch.float64), TokenScores(lp, WORLD.H, WORLD.v)).gauges
    n = float(batch.spoken)
    assert (seen["policy/ratio"].sum, seen["policy/ratio_square"].sum) == (n, n)
    assert seen["policy/clip_low"].sum == seen["policy/clip_high"].sum == seen["policy/kl_anchor"].sum == 0
    free = gradient(a, streams(batch, dtype=torch.float64), lp, WORLD.H, WORLD.v)[1]
    loose = patch(a, "loose", "-", clip=None)
    assert torch.equal(free, gradient(loose, streams(batch, dtype=torch.float64), lp, WORLD.H, WORLD.v)[1])


@pytest.mark.parametrize("a", ALL, ids=NAMES)
def test_start_left_out_is_the_policy_itself(a: Algorithm) -> None:
    """Law 3: on the first optimizer step the start may be left out; that is the same as scoring it, for every term."""
    batch = batch_of(a, credit_step(a, WORLD.groups, max_tokens=L_MAX, ema=0.0), with_start=False)
    bare = streams(batch, dtype=torch.float64)
    known = replace(bare, logp_start_M=WORLD.lp.detach())
    for found, right in zip(*(gradient(a, s, WORLD.lp, WORLD.H, WORLD.v) for s in (bare, known)), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("a", ALL, ids=NAMES)
def test_what_was_not_said_is_not_taught(a: Algorithm) -> None:
    """Law 6: over all packed positions, prompts and observations have exactly zero cotangent on their own log-prob."""
    batch, right = whole(a)
    packed = torch.zeros(len(batch.ids_N), dtype=torch.float64)
    packed[batch.source_M + 1] = WORLD.lp.detach()
    packed.requires_grad_()
    loss = objective(a, streams(batch, dtype=torch.float64), TokenScores(packed[batch.source_M + 1], WORLD.H, WORLD.v)).loss
    (grad,) = torch.autograd.grad(loss, packed)
    silent = np.setdiff1d(np.arange(len(batch.ids_N)), batch.source_M + 1)
    assert len(silent) > 20 and torch.all(grad[silent] == 0)
    assert torch.allclose(grad[batch.source_M + 1], right[1], rtol=0, atol=1e-12)


turns = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(turns, st.integers(0, 5), st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 1))
def test_deleting_observations_changes_no_return(shape: list[list[int]], observation: int, seed: int, lam: float, gamma: float) -> None:
    """Law 6: advantages and returns depend on the spoken tokens alone, wherever observations of any length lie between them."""
    n = sum(map(sum, shape))
    rng = np.random.default_rng(seed)
    mu, values = -rng.random(n).astype(np.float32), rng.normal(size=n).astype(np.float32)
    a = patch(PPO, "p", "-", whiten=None, baseline=Value(gae_lambda=lam, gamma=gamma, clip=None))

    def credit(cut: list[list[int]], seen: int) -> tuple[np.ndarray, np.ndarray]:
        answer = Answer(1.0, cut, mu, mu, values=values, observation=seen)
        (e,) = credit_step(a, [scored_group("t", [answer])], max_tokens=20, ema=0.0).groups[0].episodes
        assert e.returns is not None
        return np.concatenate(e.advantage), np.concatenate(e.returns)

    for found, right in zip(credit(shape, observation), credit([[n]], 0), strict=True):
        assert np.array_equal(found, right)
