"""Value and gradient of every preference algorithm against its textbook form in float64, the numbers of its paper, and
what must not change them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from law_preferences import Judged, judged, outcome, textbook
from textbooks_preference import BOOKS, alpha_half, forward_kl, jensen_shannon

from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.link import Hinge
from posttrain.ladder.pieces.preference_pieces import (
    AlphaDivergence,
    Conservative,
    FixedMargin,
    ForwardKL,
    JensenShannon,
    RatioMargin,
    Robust,
)
from posttrain.ladder.preference_algorithm import SIDES, PreferenceAlgorithm
from posttrain.ladder.preference_rows import CPO, DPO, IPO, IPO_MEAN, KTO, NASH_MD, ORPO, PREFERENCES, SIMPO, SLIC

ROWS = sorted(PREFERENCES)
LENGTHS = st.lists(st.integers(1, 9), min_size=6, max_size=24)


def fitting(a: PreferenceAlgorithm, lengths: list[int]) -> list[int]:
    """As many lengths as make whole units."""
    k = len(SIDES[a.rows]) or 1
    return lengths[: len(lengths) // k * k]


def test_every_row_has_a_textbook() -> None:
    assert sorted(BOOKS) == ROWS


@pytest.mark.parametrize("name", ROWS)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32 - 1))
@example(lengths=[1] * 6, seed=0)
@settings(max_examples=15)
def test_value_and_gradient_are_the_textbooks(name: str, lengths: list[int], seed: int) -> None:
    a = PREFERENCES[name]
    j = judged(a, fitting(a, lengths), seed)
    value, gradient = textbook(j, BOOKS[name])
    found = outcome(j)
    np.testing.assert_allclose(found.value, value, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.gradient, gradient, rtol=1e-9, atol=1e-12)
    assert found.gauges["preference/loss"].sum == found.value


@pytest.mark.parametrize(
    ("divergence", "book"),
    [(ForwardKL(), forward_kl), (JensenShannon(), jensen_shannon), (AlphaDivergence(alpha=0.5), alpha_half)],
    ids=["forward_kl", "jensen_shannon", "alpha"],
)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_the_other_divergences_are_their_textbooks(divergence, book, lengths: list[int], seed: int) -> None:  # type: ignore[no-untyped-def]
    a = patch(DPO, "x", "x", divergence=divergence)
    j = judged(a, fitting(a, lengths), seed)
    value, gradient = textbook(j, book)
    found = outcome(j)
    np.testing.assert_allclose(found.value, value, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.gradient, gradient, rtol=1e-9, atol=1e-12)


# --- the numbers of the papers ----------------------------------------------------------------------------------------


def pair(a: PreferenceAlgorithm, c: float, r: float, tokens: tuple[int, int] = (1, 1), **more: object) -> Judged:
    """One pair with these log-ratios (or log-probs without a reference) of whole completions."""
    sums, whole = (c, r), a.against == "reference"
    logp = tuple(np.full(n, (x - 20 if whole else x) / n) for x, n in zip(sums, tokens, strict=True))
    reference = tuple(np.full(n, -20.0 / n) for n in tokens)
    squares = tuple(np.ones(n) for n in tokens)
    return Judged(a, logp, reference, (1, 0), (0.8,), (True,), squares)


def value(a: PreferenceAlgorithm, c: float = 2.0, r: float = -1.0, tokens: tuple[int, int] = (1, 1)) -> float:
    return outcome(pair(a, c, r, tokens)).value


P = PREFERENCES


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("B02 dpo", 0.554355),
        ("B02 cdpo", 0.584355),
        ("B02 robust_dpo", 0.516855),
        ("B02 slic", 0.7),
        ("B03 ipo", 4.0),
        ("B08 apo_zero", 0.925187),
        ("B08 apo_down", 0.975391),
        ("B08 sppo", 25.0),
    ],
)
def test_numbers_of_pairs(case: str, number: float) -> None:
    assert value(P[case.split()[1]]) == pytest.approx(number, abs=5e-7)


def test_the_gradient_of_dpo_is_beta_times_the_probability_of_the_wrong_order() -> None:
    """B02's weight of the gradient, .042556."""
    found = outcome(pair(DPO, 2.0, -1.0)).gradient
    assert found == pytest.approx([-0.042556, 0.042556], abs=5e-7)


def test_ipo_of_sums_is_not_that_of_averages() -> None:
    """B03: of averages over 10 and 5 tokens it is 21.16."""
    assert value(IPO, tokens=(10, 5)) == pytest.approx(4.0)
    assert value(IPO_MEAN, tokens=(10, 5)) == pytest.approx(21.16)


def labelled(d: float, good: bool) -> Judged:
    return Judged(KTO, (np.array([d - 9.0]),), (np.array([-9.0]),), (int(good),), (0.0,), (True,), (np.ones(1),))


def test_both_sides_of_kto_with_a_margin_of_one_and_a_half() -> None:
    """B04: desirable at 2 and undesirable at -1, z .5, are .462570 both."""
    assert outcome(labelled(2.0, True)).value == pytest.approx(0.462570, abs=5e-7)
    assert outcome(labelled(-1.0, False)).value == pytest.approx(0.462570, abs=5e-7)


def test_the_weights_of_kto_are_those_of_its_labels() -> None:
    a = patch(KTO, "x", "x", good=1.5, bad=0.5)
    assert outcome(labelled(2.0, True).of(a)).value == pytest.approx(1.5 * 0.462570, abs=1e-6)
    assert outcome(labelled(-1.0, False).of(a)).value == pytest.approx(0.5 * 0.462570, abs=1e-6)


def test_simpo_with_its_gamma_and_with_the_ratio_of_it_are_two_names_of_one_number() -> None:
    """B05's trap: TRL's gamma is absolute, and another book's is the ratio gamma / beta, so 0.55 means two losses.
    Averages -.5 and -.9: .554355 with beta 2 and gamma .5, .898123 with 2.5 and 1.375."""
    small = patch(SIMPO, "x", "x", beta=2.0, margin=FixedMargin(gamma=0.5))
    assert value(small, -0.5 * 4, -0.9 * 7, (4, 7)) == pytest.approx(0.554355, abs=5e-7)
    assert value(SIMPO, -0.5, -0.9) == pytest.approx(0.898123, abs=5e-7)
    by_ratio = patch(SIMPO, "x", "x", margin=RatioMargin(ratio=0.55))
    assert value(by_ratio, -0.5, -0.9) == pytest.approx(0.898123, abs=5e-7)
    absolute = patch(SIMPO, "x", "x", margin=FixedMargin(gamma=0.55))
    assert value(absolute, -0.5, -0.9) == pytest.approx(0.493249, abs=5e-7)


def test_orpo_reads_average_log_probs_and_its_lambda_stands_before_the_link() -> None:
    """B06: log-odds .810917 apart are .367729, and .036773 with lambda .1."""
    alone = patch(ORPO, "x", "x", add=())
    assert value(patch(alone, "y", "y", coef=1.0), -0.5, -0.9) == pytest.approx(0.367729, abs=5e-7)
    assert value(alone, -0.5 * 3, -0.9 * 8, (3, 8)) == pytest.approx(0.036773, abs=5e-7)


@pytest.mark.parametrize("mean", [-1e-12, -1e-6, -0.6931, -50.0])
def test_log_odds_are_finite_near_certainty_and_near_nothing(mean: float) -> None:
    found = outcome(pair(ORPO, mean, -0.7))
    assert np.isfinite(found.value) and np.isfinite(found.gradient).all()


def test_nash_md_with_a_preference_of_four_fifths() -> None:
    """B09, P = .8: KL term 0, because policy and reference agree: -(0.8 - 0.5) * -3 = 0.9, and the gradient is -0.3."""
    j = Judged(
        NASH_MD,
        (np.array([-3.0]), np.array([-1.0])),
        (np.array([-3.0]), np.array([-1.0])),
        (1, 0),
        (0.8,),
        (True,),
        (np.ones(1), np.ones(1)),
    )
    found = outcome(j)
    assert found.value == pytest.approx(0.9) and found.gradient == pytest.approx([-0.3, 0.0])


# --- what must not change a loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=8)
def test_a_split_of_the_minibatch_changes_nothing(
    name: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    a = PREFERENCES[name]
    j = judged(a, fitting(a, lengths), seed)
    if a.match is None:
        rng = np.random.default_rng(seed)
        j = Judged(a, j.logp, j.reference, j.side, j.margin, j.own, j.squares, tuple(rng.random(j.units) + 0.1))
    order = data.draw(st.permutations(range(j.units)))
    cut = data.draw(st.integers(1, j.units))
    parts = [sorted(p) for p in (order[:cut], order[cut:]) if p]
    whole, split = outcome(j), outcome(j, parts)
    np.testing.assert_allclose(split.value, whole.value, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(split.gradient, whole.gradient, rtol=1e-11, atol=1e-13)
    for name_, gauge in whole.gauges.items():
        np.testing.assert_allclose(split.gauges[name_].sum, gauge.sum, rtol=1e-10, atol=1e-12)
        assert split.gauges[name_].count == gauge.count


@pytest.mark.parametrize("name", ROWS)
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    a = PREFERENCES[name]
    j = judged(a, fitting(a, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]), 3)
    turned = j.taking([*range(1, j.units), 0])
    np.testing.assert_allclose(outcome(turned).value, outcome(j).value, rtol=1e-12)


def swapped(j: Judged) -> Judged:
    """Each pair with its sides exchanged."""
    at = [e ^ 1 for e in range(len(j.logp))]
    logp, reference, squares = (tuple(x[e] for e in at) for x in (j.logp, j.reference, j.squares))
    return Judged(j.a, logp, reference, j.side, j.margin, tuple(not x for x in j.own), squares)


def test_exchanging_the_sides_turns_the_margin_round() -> None:
    j = judged(DPO, [3, 1, 4, 1, 5, 9], 1)
    here, there = outcome(j).gauges, outcome(swapped(j)).gauges
    assert there["preference/margin"].sum == pytest.approx(-here["preference/margin"].sum)
    assert there["preference/accuracy"].sum == pytest.approx(3 - here["preference/accuracy"].sum)
    for name in ("reward", "logp"):
        assert there[f"preference/chosen_{name}"].sum == pytest.approx(here[f"preference/rejected_{name}"].sum)


def test_discopop_begins_in_a_hollow() -> None:
    """At equal log-ratios it lowers the chosen completion; x is at rest at -2.3714 tau and 1.44012 tau (2406.08414)."""
    a = P["discopop"]

    def slope(x: float) -> float:
        return float(np.ravel(outcome(pair(a, x / a.beta, 0.0)).gradient)[0])

    assert slope(0.0) > 0 > slope(-0.2) and slope(0.1) < 0
    assert slope(-2.3714 * 0.05) == pytest.approx(0, abs=1e-6) and slope(1.44012 * 0.05) == pytest.approx(0, abs=1e-6)
    assert float(np.ravel(outcome(pair(DPO, 0.0, 0.0)).gradient)[0]) < 0


@pytest.mark.parametrize("link", [DPO.link, SLIC.link, IPO.link, P["discopop"].link])
def test_label_noise_of_a_swapped_pair_is_the_noise_of_the_other_share(link) -> None:  # type: ignore[no-untyped-def]
    """(1 - e) f(x) + e f(-x) at -x is the form of 1 - e; the robust form is unbiased over swapped labels."""
    base = DPO if link == DPO.link else patch(DPO, "y", "y", link=link)
    j = judged(base, [3, 1], 5)
    straight, other = outcome(j).value, outcome(swapped(j)).value
    mixed = outcome(j.of(patch(base, "x", "x", noise=Conservative(rate=0.2)))).value
    assert mixed == pytest.approx(0.8 * straight + 0.2 * other)
    robust = patch(base, "x", "x", noise=Robust(rate=0.2))
    a, b = outcome(j.of(robust)).value, outcome(swapped(j.of(robust))).value
    assert 0.8 * a + 0.2 * b == pytest.approx(straight)


@pytest.mark.parametrize(
    "name", [n for n in ROWS if P[n].against == "reference" and n not in ("wpo", "nash_md", "xpo")]
)
@given(shift=st.floats(-0.5, 0.5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_log_probs_shifted_with_the_reference_change_nothing(name: str, shift: float, seed: int) -> None:
    """Only the ratio to the reference is read: what both models say of a token may move together."""
    a = P[name]
    j = judged(a, fitting(a, [3, 1, 4, 1, 5, 9]), seed)
    moves = [shift + 0.1 * i for i in range(len(j.logp))] if a.match != "margins" else [shift] * len(j.logp)
    if a.match == "margins":
        j = judged(a, [3] * 6, seed)
    moved = Judged(
        a,
        tuple(x + m for x, m in zip(j.logp, moves, strict=True)),
        tuple(x + m for x, m in zip(j.reference, moves, strict=True)),
        j.side,
        j.margin,
        j.own,
        j.squares,
    )
    np.testing.assert_allclose(outcome(moved).value, outcome(j).value, rtol=1e-9)
    np.testing.assert_allclose(outcome(moved).gradient, outcome(j).gradient, rtol=1e-8, atol=1e-12)


def test_a_reference_equal_to_the_policy_has_the_loss_of_no_opinion() -> None:
    j = judged(DPO, [3, 1, 4, 1], 1)
    same = Judged(DPO, j.logp, j.logp, j.side, j.margin, j.own, j.squares)
    found = outcome(same)
    assert found.value == pytest.approx(np.log(2)) and found.gauges["preference/accuracy"].mean == 0.5


def test_a_hinge_beyond_its_delta_has_no_gradient() -> None:
    found = outcome(pair(patch(SLIC, "x", "x", link=Hinge(delta=0.2)), 2.0, -1.0))
    assert found.value == 0 and not found.gradient.any()


def test_the_likelihood_of_the_chosen_reads_no_rejected_token() -> None:
    j = judged(CPO, [3, 4, 2, 5], 2)
    only = patch(CPO, "x", "x", coef=1e-12)
    gradient = outcome(j.of(only)).gradient
    assert gradient[:3] == pytest.approx(-1 / 5) and gradient[3:7] == pytest.approx(0)
