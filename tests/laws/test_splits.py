"""Laws 2, 3 and 6: splitting changes nothing, an unmoved policy is not restrained, and what was not said is not
taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_cases import ALL, NAMES
from law_toys import batch_of
from law_world import L_MAX, World, world
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauges, merge
from posttrain.core.streams import ADVANTAGE, START, TOP_LOGP, WEIGHT
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import AnchorMean, TurnMean, Value
from posttrain.ladder.policy_rows import LADDER, PPO
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import PlainEpisode, scored_group

SEED = 3
every = pytest.mark.parametrize("a", ALL, ids=NAMES)


def summed(here: World, parts: Sequence[Batch]) -> tuple[list[Tensor], Gauges]:
    """Loss, gradients in the world's flat order, and gauges, added up over micro-batches."""
    terms = here.terms(*parts)
    each = [(t.loss.detach(), *here.gradient(t.loss)) for t in terms]
    return [torch.stack(list(x)).sum(0) for x in zip(*each, strict=True)], merge(*(t.gauges for t in terms))


@cache
def whole(a: Algorithm) -> tuple[list[Tensor], Gauges]:
    """The step as one batch."""
    return summed(world(a, SEED), [world(a, SEED).batch])


def close(found: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.allclose(f, r, rtol=0, atol=1e-10) for f, r in zip(found, right, strict=True))


def test_every_algorithm_of_the_ladder_is_split_here() -> None:
    assert set(LADDER.values()) <= set(ALL)


@every
def test_any_partition_into_micro_batches_adds_up(a: Algorithm) -> None:
    """Law 2: any assignment of episodes to micro-batches or ranks sums to the same loss, gradient and gauges (1e-10,
    float64)."""
    here = world(a, SEED)
    batch = here.batch
    right, everything = whole(a)
    rng = np.random.default_rng(0)
    for ranks in (2, 3, batch.episodes):
        owner = np.arange(batch.episodes) if ranks == batch.episodes else rng.integers(0, ranks, batch.episodes)
        chosen = [np.flatnonzero(owner == r) for r in range(ranks)]
        found, gauges = summed(here, [batch.select(c) for c in chosen if len(c)])
        assert close(found, right)
        assert {n: g.count for n, g in gauges.items()} == {n: g.count for n, g in everything.items()}
        assert all(gauges[n].sum == pytest.approx(g.sum, abs=1e-9) for n, g in everything.items())


@every
def test_splitting_by_size_adds_up(a: Algorithm) -> None:
    """Law 2: the packer's own split, from one episode at a time to nearly everything."""
    here = world(a, SEED)
    batch = here.batch
    right = whole(a)[0]
    for room in (1, 12, 30):
        parts = batch.split(room)
        assert len(parts) > (1 if batch.episodes > 1 and len(batch.ids_N) > room else 0) and close(
            summed(here, parts)[0], right
        )


sizes = st.lists(st.integers(1, 4), min_size=14, max_size=14)


@settings(max_examples=40)
@given(sizes, st.integers(1, 200))
def test_units_are_never_parted(sizes: list[int], room: int) -> None:
    """Law 2: episodes that a loss reads together (pairs, lists) stay in one micro-batch, and the loss of any split is
    that of the whole."""
    here = world(LADDER["grpo"], SEED)
    unit_E = np.repeat(np.arange(14), sizes)[: here.batch.episodes].astype(np.int32)
    batch = replace(here.batch, unit_E=unit_E)
    parts = batch.split(room)
    assert [x for p in parts for x in p.target_M.tolist()] == batch.target_M.tolist()
    assert sum(p.units for p in parts) == batch.units == int(unit_E[-1]) + 1
    assert all(len(p.ids_N) <= room or p.units == 1 for p in parts)

    def compared(part: Batch) -> Tensor:
        """A loss of each unit as a whole: the spread of its answers' log-probs."""
        said = here.scores(part).logp
        answers = torch.stack([said[torch.as_tensor(part.sequence_M == e)].sum() for e in range(part.episodes)])
        return torch.stack([answers[torch.as_tensor(part.members(u))].logsumexp(0) for u in range(part.units)]).sum()

    assert torch.allclose(torch.stack([compared(p) for p in parts]).sum(), compared(batch), rtol=0, atol=1e-10)
    assert close(summed(here, parts)[0], whole(LADDER["grpo"])[0])


def test_a_part_of_a_unit_is_refused() -> None:
    """A pair cannot be selected by halves, and units number the episodes in order."""
    batch = world(LADDER["grpo"], SEED).batch
    pairs = replace(batch, unit_E=(np.arange(batch.episodes) // 2).astype(np.int32))
    second = pairs.select(pairs.members(1))
    assert second.unit_E is not None and second.unit_E.tolist() == [0, 0] and second.units == 1
    assert [batch.members(e).tolist() for e in range(batch.units)] == [[e] for e in range(batch.episodes)]
    with pytest.raises(InvariantError, match="part of a unit"):
        pairs.select([0])
    for wrong in (
        np.zeros(3, np.int32),
        np.ones(batch.episodes, np.int32),
        np.arange(batch.episodes, dtype=np.int32)[::-1],
    ):
        with pytest.raises(InvariantError, match="units number"):
            replace(batch, unit_E=wrong)


@every
def test_order_of_episodes_does_not_matter(a: Algorithm) -> None:
    """Law 2: packing the same groups and siblings in another order gives the same loss and gradient."""
    here = world(a, SEED)
    mixed = batch_of(a, here.credit, turned=True)
    assert not np.array_equal(mixed.target_M, here.batch.target_M) or mixed.episodes == 1
    assert close(summed(here, [mixed])[0], whole(a)[0])


TURNLESS = [a for a in ALL if not isinstance(a.baseline, TurnMean | AnchorMean) and not a.hears]
"""What is heard depends on where turns and segments begin (`tests/ladder/test_foreseen_words.py`)."""


@pytest.mark.parametrize("a", TURNLESS, ids=[a.name for a in TURNLESS])
def test_segments_of_an_episode_are_one_sequence(a: Algorithm) -> None:
    """Laws 2, 6: an episode cut into segments, interrupted by observations, or in one piece is the same episode."""
    here = world(a, SEED)
    right = whole(a)[0]
    for cut in (lambda n: [[n]], lambda n: [[1] * n], lambda n: [[1]] * n):
        groups = [
            scored_group(str(i), [replace(b, turns=cut(b.spoken)) for b in g], greedy=here.greedy[i])
            for i, g in enumerate(here.answers)
        ]
        batch = batch_of(a, credit_step(a, groups, max_tokens=L_MAX, ema=0.0))
        assert close(summed(here, [batch])[0], right)


def on_policy(a: Algorithm) -> tuple[World, Batch, Tensor]:
    """A world whose policy is the anchor: its log-probs of the said tokens, [M] in the world's order."""
    here = world(a, SEED)
    batch = batch_of(a, here.credit, with_start=a.anchor == "behaviour")
    anchor = here.lp if a.anchor == "start" else torch.as_tensor(here.mu.astype(np.float64))
    return here, batch, anchor.detach().clone().requires_grad_()


RESTRAINED = [a for a in ALL if a.clip is not None and a.shown is None]


@pytest.mark.parametrize("a", RESTRAINED, ids=[a.name for a in RESTRAINED])
def test_on_policy_every_trust_region_is_silent(a: Algorithm) -> None:
    """Law 3: before the first update every push is exactly 1, and the gradient that of REINFORCE with the same
    credit."""
    here, batch, lp = on_policy(a)
    s = streams(batch, dtype=torch.float64)
    scores = here.scores(batch, lp)
    if a.stores_top:
        assert TOP_LOGP in batch
        scores = replace(scores, candidates=torch.as_tensor(batch[TOP_LOGP].astype(np.float64)))
    seen = objective(a, s, scores).gauges
    n = float(batch.spoken)
    assert (seen["policy/ratio"].sum, seen["policy/ratio_square"].sum) == (n, n)
    assert seen["policy/clip_low"].sum == seen["policy/clip_high"].sum == seen["policy/kl_anchor"].sum == 0
    changes: dict[str, Any] = {
        f: none
        for f, none in (("pull", None), ("correction", ()), ("tokens", None), ("imitate", None))
        if getattr(a, f) != none
    }
    bare = patch(a, "bare", "-", **changes) if changes else a
    (found,) = torch.autograd.grad(objective(bare, s, scores).loss, lp)
    at = torch.as_tensor((batch.target_M - 100) // 12, dtype=torch.int64)
    assert torch.equal(found[at], -s[WEIGHT] * s[ADVANTAGE])


@every
def test_start_left_out_is_the_policy_itself(a: Algorithm) -> None:
    """Law 3: on the first optimizer step the start may be left out; that is the same as scoring it, for every term."""
    here = world(a, SEED)
    batch = batch_of(a, here.credit, with_start=False)
    bare, scores = streams(batch, dtype=torch.float64), here.scores(batch)
    known = bare.having({START: scores.logp.detach()})
    for found, right in zip(*(here.gradient(objective(a, s, scores).loss) for s in (bare, known)), strict=True):
        assert torch.equal(found, right)


@every
def test_what_was_not_said_is_not_taught(a: Algorithm) -> None:
    """Law 6: over all packed positions, prompts and observations have exactly zero cotangent on their own log-prob."""
    here = world(a, SEED)
    batch = here.batch
    scores = here.scores(batch)
    packed = torch.zeros(len(batch.ids_N), dtype=torch.float64)
    packed[batch.source_M + 1] = scores.logp.detach()
    packed.requires_grad_()
    s = streams(batch, dtype=torch.float64)
    (grad,) = torch.autograd.grad(
        objective(a, s, replace(scores, logp=packed[batch.source_M + 1])).loss, packed, allow_unused=True
    )
    (right,) = torch.autograd.grad(objective(a, s, scores).loss, scores.logp, allow_unused=True)
    silent = np.setdiff1d(np.arange(len(batch.ids_N)), batch.source_M + 1)
    assert len(silent) and grad is not None and right is not None
    assert torch.all(grad[silent] == 0) and torch.allclose(grad[batch.source_M + 1], right, rtol=0, atol=1e-12)


turns = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=60)
@given(turns, st.integers(0, 5), st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 1))
def test_deleting_observations_changes_no_return(
    shape: list[list[int]], observation: int, seed: int, lam: float, gamma: float
) -> None:
    """Law 6: advantages and returns depend on the spoken tokens alone, wherever observations of any length lie between
    them."""
    n = sum(map(sum, shape))
    rng = np.random.default_rng(seed)
    mu, values = -rng.random(n).astype(np.float32), rng.normal(size=n).astype(np.float32)
    a = patch(PPO, "p", "-", whiten=None, baseline=Value(gae_lambda=lam, gamma=gamma, clip=None))

    def credit(cut: list[list[int]], seen: int) -> tuple[np.ndarray, np.ndarray]:
        answer = PlainEpisode(1.0, cut, mu, mu, values=values, observation=seen)
        (e,) = credit_step(a, [scored_group("t", [answer])], max_tokens=20, ema=0.0).groups[0].episodes
        assert e.returns is not None
        return np.concatenate(e.advantage), np.concatenate(e.returns)

    for found, right in zip(credit(shape, observation), credit([[n]], 0), strict=True):
        assert np.array_equal(found, right)
