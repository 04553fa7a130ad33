"""Judges of a known taste: their errors are as frequent as the settings say, and no surface feature tells the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating
from posttrain.core.measure.interval import Score
from posttrain.core.ports import Attempt
from posttrain.core.seeds import generator
from posttrain.core.types import Stop, Task
from posttrain.environment.check import Mark, Subject
from posttrain.environment.check.baselines import surface
from posttrain.environment.gallery.replies import POLITE, Replies, best_reply, features
from posttrain.environment.judged.judge_bias import SurfaceFeature, surface_baselines, surface_features
from posttrain.environment.judged.synthetic_preferences import KINDS, Taste
from posttrain.environment.single import SingleTurn
from posttrain.system.errors import ConfigError

TASK = Task(id="t", prompt="<3,11,7>", answer="11", info={"numbers": [3, 11, 7], "ordered": False})
LONG = Task(id="t?", prompt="<3,11,7?>", answer="11", info={"numbers": [3, 11, 7], "ordered": True})


def drawn(env: SingleTurn, kind: Kind, count: int, name: str = "test") -> list[Judgement]:
    offered = env.judgements
    assert offered is not None
    return [offered.draw(env.train.task(i), kind, generator(0, name, i)) for i in range(count)]


def agreement(env: Replies, count: int = 1000) -> float:
    """Share of pairs of which the chosen side is truly better; 1/2 for a tie."""
    pairs = [p for p in drawn(env, "pair", count) if isinstance(p, Pair)]
    gaps = [env.taste.utility(p.task, p.chosen) - env.taste.utility(p.task, p.rejected) for p in pairs]
    return sum(0.5 * (1 + np.sign(round(g, 9))) for g in gaps) / len(gaps)


# --- the world --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "said", "utility", "score"),
    [
        (TASK, "hi 11 ty", 1.0, 1.0),
        (TASK, "ty sir 11", 0.95, 0.875),  # a character too long
        (TASK, "hi 11", 0.7, 0.25),  # half as polite, 3 of 6 characters too short
        (TASK, "11", 0.4, 0.0),
        (TASK, "hi 7 ty", 0.55, 0.0),
        (TASK, "hi 11 7 ty", 0.5, 0.0),  # the last number counts
        (TASK, "hi hi ty ty 11", 0.4, 0.0),  # flattery, and too long
        (TASK, "hi 3<7<11 ty", 0.8, 0.5),  # nobody asked for the order
        (LONG, "hi 3<7<11 ty", 1.0, 1.0),
        (LONG, "hi 11 ty", 0.8, 0.5),
        (LONG, "", 0.0, 0.0),
    ],
)
def test_replies_worked_out_by_hand(task: Task, said: str, utility: float, score: float) -> None:
    env = Replies()
    assert env.taste.utility(task, said) == pytest.approx(utility, abs=1e-3)
    verdict = env.verify(Attempt(task=task, turns=(said,), stop=Stop.SAID))
    assert verdict.score == pytest.approx(score, abs=3e-3)
    assert (verdict.kind == "") == (score == 1.0)


def test_the_score_rises_with_the_utility_and_is_zero_for_wrong_replies() -> None:
    env, rng = Replies(), np.random.default_rng(0)
    seen: list[tuple[float, float]] = []
    for task in env.heldout:
        for _ in range(5):
            said = env.written(task, rng)
            score = env.verify(Attempt(task=task, turns=(said,), stop=Stop.SAID)).score
            assert score is not None
            assert score == 0 or features(task, said)["correctness"]
            seen.append((env.taste.utility(task, said), score))
    scores = [s for _, s in sorted(seen)]
    assert scores == sorted(scores) and 0.2 < np.mean([s > 0 for s in scores]) < 0.5


@cache
def baselines() -> list[SurfaceFeature]:
    env = Replies()
    known, held = (drawn(env, "pair", n, name) for n, name in ((2000, "known"), (2000, "held")))
    return surface_baselines([p for p in known if isinstance(p, Pair)], [p for p in held if isinstance(p, Pair)])


@pytest.mark.prove
def test_no_surface_feature_tells_the_taste() -> None:
    """Even the best of them chosen afterwards stays below 0.7; the truth tells every pair without noise."""
    found = baselines()
    best = max(found, key=lambda b: b.accuracy.mean)
    print(f"best surface feature of replies: {best.feature}, {best.accuracy}")
    assert len(found) > 60 and {"length", "last word", "count of 'hi'", "presence of 'u'"} <= {b.feature for b in found}
    assert 0.6 < best.accuracy.mean < 0.7 and best.accuracy.high < 0.72
    assert agreement(Replies()) == 1.0


def test_each_feature_of_the_taste_is_needed() -> None:
    """What a judge would reach who looks at one of correctness, politeness and length alone, 1/2 for a tie."""
    env = Replies()
    pairs = [p for p in drawn(env, "pair", 2000) if isinstance(p, Pair)]
    for name in ("correctness", "politeness", "length"):
        gaps = [features(p.task, p.chosen)[name] - features(p.task, p.rejected)[name] for p in pairs]
        assert 0.6 < np.mean([0.5 * (1 + np.sign(g)) for g in gaps]) < 0.8, name


def test_the_judgements_hardly_show_that_there_can_be_too_much() -> None:
    """So a reward model that learned from them is wrong where few replies were: more than two polite words."""
    env, rng = Replies(), np.random.default_rng(0)
    counts = [sum(w in POLITE for w in env.written(env.train.task(i), rng).split()) for i in range(1000)]
    assert max(counts) == 3 and 0.05 < np.mean([c == 3 for c in counts]) < 0.15
    assert features(TASK, "hi hi hi hi 11")["politeness"] == 0.0


# --- errors of the judges ---------------------------------------------------------------------------------------------


def test_the_share_of_flipped_pairs_is_the_noise() -> None:
    assert agreement(Replies(noise=0.2)) == pytest.approx(0.8, abs=0.04)
    assert agreement(Replies(noise=0.5)) == pytest.approx(0.5, abs=0.05)


def test_pairs_follow_bradley_terry() -> None:
    """One pair judged many times: won with probability sigmoid of the gap over the temperature."""
    texts = iter(["hi 11 ty", "hi 11"] * 3000)
    taste = Taste(features=features, weights=Replies().taste.weights, temperature=0.2)
    judged = taste.judgements(lambda task, rng: next(texts))
    won = [
        p.chosen == "hi 11 ty"
        for i in range(3000)
        if isinstance(p := judged.draw(TASK, "pair", generator(1, "bt", i)), Pair)
    ]
    assert np.mean(won) == pytest.approx(1 / (1 + math.exp(-0.3 / 0.2)), abs=0.03)


def test_annotators_differ_and_their_mean_is_the_truth() -> None:
    truth = Replies().taste.weights
    for count in (1, 2, 3, 10):
        each = Replies(annotators=count).taste.annotator_weights
        assert len(each) == count
        for name, weight in truth.items():
            assert np.mean([w[name] for w in each]) == pytest.approx(weight, abs=1e-12)
        assert all(min(w.values()) >= 0.05 - 1e-12 and sum(w.values()) == pytest.approx(1) for w in each)
    assert np.ptp([w["length"] for w in Replies(annotators=3).taste.annotator_weights]) > 0.1
    assert 0.85 < agreement(Replies(annotators=3)) < 0.97, "they disagree with the truth, and less than noise would"


def test_annotators_differ_where_a_feature_counts_little() -> None:
    weights = {"correctness": 0.95, "length": 0.05}
    each = [w["length"] for w in Taste(features=features, weights=weights, annotators=3).annotator_weights]
    assert np.ptp(each) > 0.01 and min(each) >= 0.025 - 1e-12 and np.mean(each) == pytest.approx(0.05)


def test_margins_are_what_the_judge_saw() -> None:
    env = Replies(margins=True)
    for p in drawn(env, "pair", 50):
        assert isinstance(p, Pair)
        assert p.margin == pytest.approx(env.taste.utility(p.task, p.chosen) - env.taste.utility(p.task, p.rejected))
    assert all(isinstance(p, Pair) and p.margin is None for p in drawn(Replies(), "pair", 5))


def test_rankings_labels_and_ratings() -> None:
    env = Replies()
    for r in drawn(env, "ranking", 100):
        assert isinstance(r, Ranking) and len(set(r.completions)) == 4
        values = [env.taste.utility(r.task, c) for c in r.completions]
        assert values == sorted(values, reverse=True)
    labels = [x for x in drawn(env, "label", 1000) if isinstance(x, Label)]
    assert all(x.good == (env.taste.utility(x.task, x.completion) >= 0.5) for x in labels)
    assert 0.35 < np.mean([x.good for x in labels]) < 0.65
    flipped = [x for x in drawn(Replies(noise=0.2), "label", 2000) if isinstance(x, Label)]
    right = np.mean([x.good == (env.taste.utility(x.task, x.completion) >= 0.5) for x in flipped])
    assert right == pytest.approx(0.8, abs=0.04)
    for x in drawn(env, "rating", 100):
        assert isinstance(x, Rating) and set(x.ratings) == {"correctness", "politeness", "length", "overall"}
        assert x.ratings["overall"] == np.rint(4 * env.taste.utility(x.task, x.completion))


@pytest.mark.parametrize("kind", KINDS)
def test_a_judgement_is_a_function_of_its_arguments(kind: Kind) -> None:
    settings = {"noise": 0.1, "temperature": 0.05, "annotators": 3}
    one, again, other = (
        drawn(Replies(seed=s, **settings), kind, 20, name)  # type: ignore[arg-type]
        for s, name in ((0, "a"), (0, "a"), (0, "b"))
    )
    assert one == again != other


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"noise": 0.7}, "0..0.5"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"annotators": 0}, "annotators=0"),
        ({"ranked": 1}, "ranked=1"),
        ({"numbers": 1}, "numbers=1"),
        ({"max_number": 3}, "max_number=3"),
    ],
)
def test_settings_out_of_range(args: Mapping[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Replies(**args)  # type: ignore[arg-type]


def test_a_taste_that_is_none() -> None:
    for weight in (0.5, float("nan")):
        with pytest.raises(ConfigError, match="with the sum 1"):
            Taste(features=features, weights={"correctness": weight})
    same = Taste(features=features, weights={"length": 1.0}).judgements(lambda task, rng: "7")
    with pytest.raises(ConfigError, match="1 of 2 that differ for the judge"):
        same.draw(TASK, "pair", np.random.default_rng(0))
    with pytest.raises(ConfigError, match="not 'steps'"):
        same.draw(TASK, "steps", np.random.default_rng(0))


# --- baselines of single features -------------------------------------------------------------------------------------


def pairs_by(better: str, worse: str, count: int = 60) -> list[Pair]:
    """Pairs that differ in one way, with other words around it."""
    words = [f"w{i % 7} v{i % 5}" for i in range(count)]
    return [Pair(task=TASK, chosen=better.format(w), rejected=worse.format(w)) for w in words]


@pytest.mark.parametrize(
    ("better", "worse", "feature"),
    [
        ("{} and more of it", "{}", "length"),
        ("{}", "{} ok ok", "count of 'ok'"),
        ("sure {}", "well {}", "first word"),
        ("{}!", "{}.", "last character"),
    ],
)
def test_a_planted_feature_is_found(better: str, worse: str, feature: str) -> None:
    found = {b.feature: b.accuracy.mean for b in surface_baselines(pairs_by(better, worse), pairs_by(better, worse))}
    assert found[feature] == 1.0 and next(iter(found.values())) == 1.0


def test_a_feature_whose_middle_is_best_is_found_too() -> None:
    texts = ["a", "a" * 5, "a" * 9]
    pairs = [Pair(task=TASK, chosen=texts[1], rejected=texts[i % 2 * 2]) for i in range(40)]
    assert next(b for b in surface_baselines(pairs, pairs) if b.feature == "length").accuracy.mean == 1.0


def test_features_of_odd_texts() -> None:
    for text in ("", "\n\n", "\x00", "é" * 1000, "a\u0301"):
        assert dict(surface_features(text))["length"] == str(len(text))


async def probed(env: SingleTurn) -> tuple[Mark, str]:
    return await surface(Subject(env, tuple(env.heldout), 1.0))


async def test_the_check_prints_the_best_feature_beside_the_truth() -> None:
    mark, said = await probed(Replies())
    assert mark is Mark.OK and "the true utility tells 1.000" in said and str(Score.of([1.0] * 200)) in said

    class Wordy(Replies):
        @property
        def taste(self) -> Taste:  # type: ignore[override]
            return Taste(features=lambda task, text: {"length": 1 / (1 + len(text))}, weights={"length": 1.0})

    mark, said = await probed(Wordy())
    assert mark is Mark.WARN and "the length, tells 0.9" in said


def test_the_best_reply_is_the_gold_one() -> None:
    env = Replies()
    assert all(env.gold(t) == (best_reply(t),) for t in env.heldout)
