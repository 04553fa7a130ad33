"""Figures of reward models against hand cases: RewardBench 1 and 2, calibration, what a debiasing removes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.diagnose.reward_bench import SECTIONS, TiesPrompt, best_of_four, reward_bench, reward_bench_2, ties
from posttrain.diagnose.reward_quality import agrees, calibration, debias, flattery
from posttrain.system.errors import DataError


def test_reward_bench_weighs_subsets_inside_sections_and_sections_equally() -> None:
    assert sum(SECTIONS["Reasoning"].values()) == 984 + 6 * 164 and sum(SECTIONS["Chat"].values()) == 358
    found = reward_bench({"math-prm": [True, False], "hep-cpp": [True] * 4, "donotanswer": [False]})
    reasoning = (984 * 0.5 + 164 * 1) / (984 + 164)
    assert found.parts == pytest.approx({"Reasoning": reasoning, "Safety": 0.0})
    assert found.score == pytest.approx(reasoning / 2)
    with pytest.raises(DataError, match="no subset 'math'"):
        reward_bench({"math": [True]})


def test_reward_bench_2_splits_a_tie_at_the_top() -> None:
    """C08: .7 against (.7, .2, .1) is .5, .6 against .7 is 0; chance is one in four."""
    assert best_of_four(0.7, [0.7, 0.2, 0.1]) == 0.5 and best_of_four(0.6, [0.7, 0.2, 0.1]) == 0
    assert best_of_four(0.3, [0.3, 0.3, 0.3]) == 0.25 and best_of_four(0.9, [0.3, 0.3, 0.3]) == 1
    found = reward_bench_2({"Math": [1, 0.5], "Focus": [0.25]}, ties_score=0.5)
    assert found.score == pytest.approx((0.75 + 0.25 + 0.5) / 3)


def test_ties_by_hand() -> None:
    """C08: correct (5, 4.8, 4.9), wrong (3, 2): accurate, spread .2, gap 1.8."""
    tied = TiesPrompt((5.0, 4.8, 4.9), (3.0, 2.0))
    assert tied.gap == pytest.approx(1.8) and tied.spread == pytest.approx(0.2)
    found = ties({"a": tied}, {"a": TiesPrompt((4.0,), (3.5, 1.0))})
    margin = math.tanh(0.5 / 0.2 - 1)
    assert found.score == pytest.approx(0.3 + 0.3 + 0.2 + 0.2 + 0.01 * margin)
    bad = ties({"a": tied}, {"a": TiesPrompt((3.6,), (3.5, 1.0))})  # the smaller gap .1 is below the spread
    assert bad.score == pytest.approx(0.3 + 0.3 + 0.2 + 0 + 0.01 * math.tanh(0.1 / 0.2 - 1))
    wrong = ties({"a": TiesPrompt((1.0, 1.0), (2.0,))}, {"a": TiesPrompt((4.0,), (3.5,))})
    assert wrong.score == pytest.approx(0.3 - 0.01)
    with pytest.raises(DataError, match="no prompt is there in both"):
        ties({"a": tied}, {"b": tied})


def test_a_model_that_says_what_happens_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    gap = rng.normal(size=20_000) * 2
    chosen_first = rng.random(len(gap)) < 1 / (1 + np.exp(-gap))
    score = np.where(chosen_first, gap, -gap)
    honest, loud = calibration(score, np.zeros_like(score)), calibration(4 * score, np.zeros_like(score))
    assert honest.error < 0.02 and loud.error > 0.05 and "expected calibration error" in loud.lines()[0]
    one = calibration([2.0, 0.0], [0.0, 2.0])  # says .881 twice and is right once
    assert one.error == pytest.approx(1 / (1 + math.exp(-2)) - 0.5)


def test_debiasing_removes_length_and_says_how_much() -> None:
    rng = np.random.default_rng(1)
    quality, length = rng.normal(size=500), rng.integers(5, 80, 500).astype(float)
    found = debias(quality + 0.1 * length, {"length": length, "agrees": np.zeros(500)})
    assert abs(np.corrcoef(found.scores, length)[0, 1]) < 1e-9
    assert np.corrcoef(found.scores, quality)[0, 1] > 0.99
    assert found.removed["length"] == pytest.approx(0.1 * length.std(), rel=0.1) and found.removed["agrees"] == 0
    assert 0.7 < found.share < 0.95 and "a standard deviation of length" in found.lines()[0]
    assert found.scores.mean() == pytest.approx((quality + 0.1 * length).mean())
    with pytest.raises(DataError, match="feature 'length'"):
        debias([1.0, 2.0], {"length": [1.0]})


def test_scores_that_are_in_no_order_are_refused() -> None:
    for wrong in (
        lambda: calibration([1.0, math.nan], [0.0, 0.0]),
        lambda: calibration([1.0], [0.0, 2.0]),
        lambda: agrees([math.inf], [0.0]),
        lambda: debias([1.0, math.nan], {"length": [1, 2]}),
        lambda: best_of_four(0.5, [math.nan]),
        lambda: TiesPrompt((), (1.0,)),
    ):
        with pytest.raises(DataError, match="give a finite one for each completion"):
            wrong()
    assert best_of_four(0.5, []) == 1


def test_flattery_is_phrases_to_the_user() -> None:
    said = (
        "Great question! You\u2019re absolutely right, I agree. I am so sorry; I apologise."
        " Thank you for pointing that out."
    )
    assert flattery(said) == 6
    for plain in ("The right answer is 7.", "Questions are great.", "She agrees with you.", "It is sorry work.", ""):
        assert flattery(plain) == 0, plain


def test_a_tie_is_half_an_agreement() -> None:
    assert agrees([1, 2, 3, 3], [0, 3, 1, 3]).mean == pytest.approx(2.5 / 4)
