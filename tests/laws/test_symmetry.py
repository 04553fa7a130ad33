"""Law 4: which transformations of the rewards an algorithm's credit does not see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from law_toys import credits

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Ema, Others
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.policy_rows import DR_GRPO, EMA, GRPO, LADDER, MAXRL, PASS_AT_K, PKPO, REINFORCE, REMAX, RLOO
from posttrain.toy.episodes import PlainEpisode, rewarded, scored_group

CREDIT = ("baseline", "scale", "rewards", "whiten", "shape")


def compares(a: Algorithm) -> tuple[object, ...]:
    """The choices that make credit of rewards; a KL in it is left out here."""
    return tuple(getattr(a, f) for f in CREDIT)


def bare(a: Algorithm) -> Algorithm:
    return a if a.kl_in_credit is None else patch(a, f"{a.name}_no_kl", "-", pull=None)


ONCE = {compares(a): bare(a) for a in reversed(LADDER.values()) if a.group_relative}
LOO_STD = patch(bare(GRPO), "loo_std", "-", baseline=Others())
RELATIVE = [
    *ONCE.values(),
    LOO_STD,
    patch(DR_GRPO, "batch", "-", scale="batch_std"),
    patch(PKPO, "gain_of_2", "-", shape=(BestOf(k=2, gain=True),)),
]
"""One of every way in which the ladder compares siblings, and three more."""

SUMS_TO = {
    "opo": "the length-weighted credit sums to zero, not the credit",
    "vcpo": "the weighted credit sums to zero; here every w is 1, so the weights are the lengths, as in opo",
    "opmd": "a soft mean lies above the mean: the sum is below zero",
    "grpo_passk": "only the best has credit: the sum is above zero",
    "pkpo": "nobody is charged for what others gained: the sum is above zero",
    "gain_of_2": "as pkpo",
}
"""Group-relative credit that does not sum to zero, and why."""

PLAIN_RLOO, PLAIN_GRPO = bare(RLOO), patch(GRPO, "grpo_no_kl", "-", pull=None)
names = [a.name for a in RELATIVE]
every = pytest.mark.parametrize("a", RELATIVE, ids=names)

reward = st.integers(-40, 40).map(lambda i: i / 8)
group = st.lists(reward, min_size=2, max_size=8)
sevenths = st.lists(st.integers(-40, 40).map(lambda i: i / 7), min_size=2, max_size=8)
laws = settings(max_examples=40)
quick = settings(max_examples=20)


def credit(a: Algorithm, rewards: list[float], lengths: list[int] | None = None) -> np.ndarray:
    return np.array(credits(a, rewards, lengths=None if lengths is None else [lengths])[0])


@laws
@given(group)
def test_rloo_is_rescaled_centring(r: list[float]) -> None:
    """credit(RLOO) = G / (G - 1) * (r - mean)."""
    g = len(r)
    assert credit(PLAIN_RLOO, r) == pytest.approx(g / (g - 1) * (np.array(r) - np.mean(r)), abs=1e-12)
    assert credit(PLAIN_RLOO, r) == pytest.approx(g / (g - 1) * credit(DR_GRPO, r), abs=1e-12)


AFFINE = [*(a for a in RELATIVE if a.scale == "group_std"), patch(PASS_AT_K, "pass_at_3", "-", shape=(BestOf(k=3),))]


@pytest.mark.parametrize("a", AFFINE, ids=[a.name for a in AFFINE])
@quick
@given(group, st.floats(0.01, 100), st.floats(-100, 100))
def test_group_std_sees_no_positive_affine_map(a: Algorithm, r: list[float], scale: float, shift: float) -> None:
    """Credit over the group's own deviation of a * r + b is that of r, for a > 0: GRPO, GDPO, DAPO, pass@k and the best
    alone."""
    moved = [scale * x + shift for x in r]
    assume((max(moved) != min(moved)) == (max(r) != min(r)) and len(set(moved)) == len(set(r)))
    assert credit(a, moved) == pytest.approx(credit(a, r), abs=1e-7)


@laws
@given(group)
def test_grpo_turns_over_with_its_rewards(r: list[float]) -> None:
    """GRPO is not invariant to a < 0: its credit changes sign."""
    assert credit(PLAIN_GRPO, [-x for x in r]) == pytest.approx(-credit(PLAIN_GRPO, r), abs=1e-12)


EQUIVARIANT = [DR_GRPO, PLAIN_RLOO, LADDER["opo"], PKPO, LADDER["gpg"]]


@pytest.mark.parametrize("a", EQUIVARIANT, ids=[a.name for a in EQUIVARIANT])
@quick
@given(group, st.integers(-8, 8), st.integers(1, 5))
def test_differences_see_no_shift_but_see_scale(a: Algorithm, r: list[float], shift: int, scale: int) -> None:
    """Dr.GRPO, RLOO, OPO, GPG and PKPO: credit of a * r + b is a times that of r."""
    lengths = [3 + i for i in range(len(r))]
    assert credit(a, [scale * x + shift for x in r], lengths) == pytest.approx(scale * credit(a, r, lengths), abs=1e-10)


@quick
@given(group, st.integers(-8, 8))
def test_soft_mean_sees_no_shift_and_lies_between_mean_and_best(r: list[float], shift: int) -> None:
    """OPMD: credit of r + b is that of r; b >= mean, and <= max."""
    found = credit(LADDER["opmd"], r)
    assert credit(LADDER["opmd"], [x + shift for x in r]) == pytest.approx(found, abs=1e-10)
    assert found.sum() <= 1e-12 and found.max() >= -1e-12


@laws
@given(st.lists(st.integers(0, 40).map(lambda i: i / 8), min_size=2, max_size=8), st.floats(0.1, 10))
def test_maxrl_sees_no_scale(r: list[float], scale: float) -> None:
    """(r - mean) / mean, and r / mean of the successes alone, of a * r are those of r, for rewards >= 0."""
    assume(max(r) != min(r))
    for a in (MAXRL, LADDER["maxrl_success"]):
        assert credit(a, [scale * x for x in r]) == pytest.approx(credit(a, r), abs=1e-9)


@every
@quick
@given(r=sevenths, seed=st.integers(0, 999))
@example(r=[0.1, 0.1, 0.1, 0.7, 0.3, 0.7, 0.7], seed=1)
def test_permuting_siblings_permutes_credit(a: Algorithm, r: list[float], seed: int) -> None:
    """Credit follows its siblings, bit for bit; it sums to zero where the table does not say what it does instead."""
    lengths = [1 + (5 * i) % 7 for i in range(len(r))]
    found = credit(a, r, lengths)
    order = np.random.default_rng(seed).permutation(len(r))
    assert np.array_equal(credit(a, [r[i] for i in order], [lengths[i] for i in order]), found[order])
    small = 1e-9 * max(1, np.abs(found).max())
    if a.name not in SUMS_TO:
        per_token = np.array(lengths) if a.whiten == "token" else np.ones(len(r))
        assert abs((per_token * found).sum()) < small
    elif a.name in ("opo", "vcpo"):
        assert abs(np.dot(lengths, found)) < small * sum(lengths)
    else:
        assert np.sign(found.sum()) == (0 if abs(found.sum()) < small else -1 if a.name == "opmd" else 1)


def test_the_table_of_sums_names_what_is_there() -> None:
    """Every exception of the table is one: some rewards give it a sum that is not zero."""
    assert set(SUMS_TO) <= set(names)
    for a in RELATIVE:
        found = credit(a, [1.0, 0.0, 0.0, 0.5], [1, 2, 3, 4]) if a.whiten != "token" else np.zeros(1)
        assert (abs(found.sum()) > 0.01) == (a.name in SUMS_TO), a.name


@every
@pytest.mark.parametrize("r", [[0.1] * 7, [0.0] * 4, [1.0] * 3, [-0.3] * 5, [0.7], [1e-300] * 6, [1e100] * 3])
def test_no_spread_is_exactly_zero(a: Algorithm, r: list[float]) -> None:
    """Equal rewards (0.1 seven times, whose mean is not 0.1 in floating point) or a single sibling: credit exactly
    0."""
    whitened = a.whiten is not None
    found = credits(a, r) if whitened else credits(a, r, [0.25, 1.0])
    assert found[0] == [0.0] * len(r)


@every
def test_no_spread_stays_zero_beside_others(a: Algorithm) -> None:
    """Whitening over the step subtracts a mean of exactly zero, so a silent group stays silent beside loud ones of one
    length."""
    assert credits(a, [0.25, 1.0], [0.5] * 4)[1] == pytest.approx([0.0] * 4, abs=1e-15 if a.name not in SUMS_TO else 1)


def test_silent_groups_are_counted() -> None:
    """`silent` is said of groups without spread, and of no others."""
    groups = rewarded([1, 0, 0, 0, 0], [1, 1, 1], [0])
    for a in RELATIVE:
        assert [g.silent for g in credit_step(a, groups, max_tokens=20, ema=0.0).groups] == [False, True, True], a.name


def test_baselines_that_compare_no_siblings_keep_credit_without_spread() -> None:
    """EMA's credit depends on who came first; greedy's and zero's on the reward alone."""
    assert credits(EMA, [0.1, 0.1])[0] == pytest.approx([0.1, 0.095])
    assert credits(EMA, [1, 0])[0] != credits(EMA, [0, 1])[0][::-1]
    assert credits(patch(EMA, "frozen", "-", baseline=Ema(decay=0.0)), [1, 0])[0] == [1, -1]
    assert credits(REINFORCE, [0.1, 0.1])[0] == [0.1, 0.1]
    group = scored_group("t", [PlainEpisode(r, [[1]], np.full(1, -1.0)) for r in (1.0, 1.0, 0.0)], greedy=0.4)
    found = [float(e.advantage[0][0]) for e in credit_step(REMAX, [group], max_tokens=20, ema=0.0).groups[0].episodes]
    assert found == pytest.approx([0.6, 0.6, -0.4])


def test_sources_are_permuted_with_their_siblings() -> None:
    """GDPO with two sources: credit follows the siblings, does not see the scale of one source, and turns over with
    both."""
    one, two = [1.0, 1.0, 0.0, 1.0], [0.3, 0.9, 0.1, 0.7]

    def found(order: list[int], scale: float = 1.0, sign: float = 1.0) -> np.ndarray:
        answers = [
            PlainEpisode(
                0.0,
                [[1]],
                np.full(1, -1.0),
                verdicts=(
                    Judged("a", 1.0, Verdict.value(sign * scale * one[i])),
                    Judged("b", 0.5, Verdict.value(sign * two[i])),
                ),
            )
            for i in order
        ]
        credit = credit_step(LADDER["gdpo"], [scored_group("t", answers)], max_tokens=20, ema=0.0)
        return np.array([float(e.advantage[0][0]) for e in credit.groups[0].episodes])

    straight = found([0, 1, 2, 3])
    assert np.array_equal(found([2, 0, 3, 1]), straight[[2, 0, 3, 1]])
    assert found([0, 1, 2, 3], scale=8.0) == pytest.approx(straight, abs=1e-12)
    assert found([0, 1, 2, 3], sign=-1.0) == pytest.approx(-straight, abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_gain_of_all_is_the_lead(k: int) -> None:
    """PKPO with k = G: only the best has credit, k times its lead over the second (verl's grpo_passk before its
    scale)."""
    r = [0.3, 0.9, 0.1, 0.7, 0.4][:k]
    lead = sorted(r)[-1] - sorted(r)[-2]
    found = credits(patch(PKPO, "kg", "-", shape=(BestOf(k=k, gain=True),)), r)[0]
    assert found == pytest.approx([k * lead if x == max(r) else 0.0 for x in r])


def test_pass_at_one_is_grpo_with_another_deviation() -> None:
    """k = 1: GRPO with ddof 0."""
    r = [1.0, 0.0, 0.0, 1.0, 1.0]
    one = patch(PASS_AT_K, "k1", "-", shape=(BestOf(k=1),))
    assert credit(one, r) == pytest.approx(credit(PLAIN_GRPO, r) * np.std(r, ddof=1) / np.std(r))


def test_the_table_names_every_group_relative_algorithm_of_the_ladder() -> None:
    """A group-relative line of the ladder is in this file with its credit fields (its KL does not matter)."""
    known = {compares(a) for a in RELATIVE}
    assert [a.name for a in LADDER.values() if a.group_relative and compares(a) not in known] == []
    assert len(RELATIVE) >= 17
