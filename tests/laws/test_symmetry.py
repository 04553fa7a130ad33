"""Law 4: which transformations of the rewards an algorithm's credit does not see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from law_toys import credits

from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.ladder import DAPO, DR_GRPO, EMA, GRPO, LADDER, REINFORCE, RLOO
from posttrain.core.pieces.baseline import Ema, GroupMean, Others

PLAIN_RLOO = patch(RLOO, "rloo_no_kl", "-", pull=None)
PLAIN_GRPO = patch(GRPO, "grpo_no_kl", "-", pull=None)
MAXRL = patch(REINFORCE, "maxrl", "2602.02710", baseline=GroupMean(), scale="group_mean")
LOO_STD = patch(PLAIN_GRPO, "loo_std", "-", baseline=Others())
RELATIVE = [PLAIN_RLOO, PLAIN_GRPO, DR_GRPO, DAPO, MAXRL, LOO_STD, patch(DR_GRPO, "batch", "-", scale="batch_std")]
names = [a.name for a in RELATIVE]

reward = st.integers(-40, 40).map(lambda i: i / 8)
group = st.lists(reward, min_size=2, max_size=8)
laws = settings(max_examples=60, deadline=None)


def credit(a: Algorithm, rewards: list[float]) -> np.ndarray:
    return np.array(credits(a, rewards)[0])


@laws
@given(group)
def test_rloo_is_rescaled_centring(r: list[float]) -> None:
    """credit(RLOO) = G / (G - 1) * (r - mean)."""
    g = len(r)
    assert credit(PLAIN_RLOO, r) == pytest.approx(g / (g - 1) * (np.array(r) - np.mean(r)), abs=1e-12)
    assert credit(PLAIN_RLOO, r) == pytest.approx(g / (g - 1) * credit(DR_GRPO, r), abs=1e-12)


@laws
@given(group, st.floats(0.01, 100), st.floats(-100, 100))
def test_grpo_sees_no_positive_affine_map(r: list[float], scale: float, shift: float) -> None:
    """GRPO's credit of a * r + b is that of r, for a > 0."""
    moved = [scale * x + shift for x in r]
    assume((max(moved) != min(moved)) == (max(r) != min(r)))
    assert credit(PLAIN_GRPO, moved) == pytest.approx(credit(PLAIN_GRPO, r), abs=1e-8)


@laws
@given(group)
def test_grpo_turns_over_with_its_rewards(r: list[float]) -> None:
    """GRPO is not invariant to a < 0: its credit changes sign."""
    assert credit(PLAIN_GRPO, [-x for x in r]) == pytest.approx(-credit(PLAIN_GRPO, r), abs=1e-12)


@laws
@given(group, st.integers(-8, 8), st.integers(1, 5))
def test_dr_grpo_sees_no_shift_but_sees_scale(r: list[float], shift: int, scale: int) -> None:
    """Dr.GRPO's and RLOO's credit of a * r + b is a times that of r."""
    for a in (DR_GRPO, PLAIN_RLOO):
        assert credit(a, [scale * x + shift for x in r]) == pytest.approx(scale * credit(a, r), abs=1e-10)


@laws
@given(st.lists(st.integers(0, 40).map(lambda i: i / 8), min_size=2, max_size=8), st.floats(0.1, 10))
def test_maxrl_sees_no_scale(r: list[float], scale: float) -> None:
    """(r - mean) / mean of a * r is that of r, for rewards >= 0."""
    assume(max(r) != min(r))
    assert credit(MAXRL, [scale * x for x in r]) == pytest.approx(credit(MAXRL, r), abs=1e-9)


@pytest.mark.parametrize("a", RELATIVE, ids=names)
@laws
@given(r=st.lists(st.integers(-40, 40).map(lambda i: i / 7), min_size=2, max_size=8), seed=st.integers(0, 999))
def test_credit_sums_to_zero_and_follows_its_siblings(a: Algorithm, r: list[float], seed: int) -> None:
    """Group-relative credit sums to zero, and permuting the siblings permutes it, bit for bit."""
    found = credit(a, r)
    assert abs(found.sum()) < 1e-9 * max(1, np.abs(found).max())
    order = np.random.default_rng(seed).permutation(len(r))
    assert np.array_equal(credit(a, [r[i] for i in order]), found[order])


@pytest.mark.parametrize("a", RELATIVE, ids=names)
@pytest.mark.parametrize("r", [[0.1] * 7, [0.0] * 4, [1.0] * 3, [-0.3] * 5, [0.7], [1e-300] * 6, [1e100] * 3])
def test_no_spread_is_exactly_zero(a: Algorithm, r: list[float]) -> None:
    """Equal rewards (0.1 seven times, whose mean is not 0.1 in floating point) or a single sibling: credit exactly 0."""
    assert credits(a, r, [0.25, 1.0])[0] == [0.0] * len(r)


def test_ema_is_order_dependent_and_absolute() -> None:
    """Baselines that do not compare siblings keep credit without spread, and EMA's depends on who came first."""
    assert credits(EMA, [0.1, 0.1])[0] == pytest.approx([0.1, 0.095])
    assert credits(EMA, [1, 0])[0] != credits(EMA, [0, 1])[0][::-1]
    assert credits(patch(EMA, "frozen", "-", baseline=Ema(decay=0.0)), [1, 0])[0] == [1, -1]


def test_the_table_names_every_group_relative_algorithm_of_the_ladder() -> None:
    """A group-relative line of the ladder is in this file with its credit fields (its KL in the loss does not matter)."""
    known = {(a.baseline, a.scale, a.whiten) for a in RELATIVE}
    assert all((a.baseline, a.scale, a.whiten) in known for a in LADDER.values() if a.group_relative)
