"""Numbers of the shapings of reward, of staleness and of scaling: every case names its item of the survey."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_toys import Answer, scored_group

from posttrain.algorithm.shape import shaped
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.pieces.shape import (
    Cosine,
    Gate,
    RankLength,
    RateLength,
    RelativeLength,
    Repetition,
    Shaping,
    TargetLength,
)
from posttrain.core.types import Episode, Stop
from posttrain.core.verdict import Judged, Verdict
from posttrain.plan import scaling, staleness
from posttrain.plan.scaling import Curve, fit, reward_at
from posttrain.plan.staleness import capacity, versions_behind


def episodes(
    lengths: list[int], rewards: list[float], *, stop: Stop = Stop.SAID, ids: list[int] | None = None, **info: float
) -> list[Episode]:
    said = np.array(ids or [], np.int32)
    answers = [Answer(r, [[n]], np.full(n, -1.0), stop=stop, ids=said) for n, r in zip(lengths, rewards, strict=True)]
    return [e.episode for e in scored_group("t", answers, info=info).episodes]


def after(piece: Shaping, them: list[Episode], max_tokens: int = 100) -> list[float]:
    raw = np.array([e.reward for e in them], np.float64)
    return shaped((piece,), raw, them, max_tokens)[0].tolist()


# --- C04: length and repetition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "bonus"),
    [([1, 1, 0], [0.5, 0, -0.5]), ([0, 1, 1], [0, 0, -0.5])],
    ids=["C04 Kimi right,right,wrong", "C04 Kimi wrong,right,right"],
)
def test_rank_length(rewards: list[float], bonus: list[float]) -> None:
    """C04: lengths 100, 200, 300: +.5 for the shortest to -.5 for the longest, failures only lose; nothing where all
    are as long."""
    found = after(RankLength(), episodes([100, 200, 300], rewards))
    assert [x - r for x, r in zip(found, rewards, strict=True)] == pytest.approx(bonus)
    assert after(RankLength(), episodes([7, 7, 7], rewards)) == rewards
    assert after(RankLength(coef=0.1), episodes([100, 200, 300], rewards)) == pytest.approx(
        [r + 0.1 * b for r, b in zip(rewards, bonus, strict=True)]
    )


def test_relative_length() -> None:
    """C04 O1-Pruner: L_ref 1000, L 800, A 1, A_ref .75, lambda 2: 1.25 - 1 + .5 = .75."""
    them = episodes([800], [1.0], reference_length=1000.0, reference_accuracy=0.75)
    assert after(RelativeLength(coef=2.0), them) == pytest.approx([0.75])
    with pytest.raises(DataError, match="reference_length"):
        after(RelativeLength(), episodes([800], [1.0]))


@pytest.mark.parametrize(
    ("form", "value"), [("exact", 0.94), ("most", 0.44)], ids=["C04 L1 exact .94", "C04 L1 max .44"]
)
def test_target_length(form, value: float) -> None:
    """C04: n_gold 1000, n 1200, alpha .0003, correct: exact .94, at most .44; the authors' code halves the slope
    (.47)."""
    piece = TargetLength(target=1000, form=form)
    assert after(piece, episodes([1200], [1.0])) == pytest.approx([value])
    assert after(TargetLength(target=5, form=form), episodes([1200], [1.0], n_gold=1000)) == pytest.approx([value]), (
        "the task's own target"
    )
    code = (min(max(0.0003 * (1000 - 1200), -1), 1) + 1) / 2
    assert code == pytest.approx(0.47)


@pytest.mark.parametrize(
    ("solved", "of", "value"),
    [(4, 8, [0.95, -0.05]), (0, 8, [-0.0125])],
    ids=["C04 ALP p .5 correct", "C04 ALP p 0 wrong"],
)
def test_rate_length(solved: int, of: int, value: list[float]) -> None:
    """C04: beta / N 1e-4, 1000 tokens, 8 siblings: .95 for a success at rate .5, -.0125 for a failure at rate 0."""
    rewards = [1.0] * solved + [0.0] * (of - solved)
    found = after(RateLength(beta=1e-4), episodes([1000] * of, rewards))
    assert sorted(set(np.round(found, 12)), reverse=True) == pytest.approx(value)


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [(50, 0.75, -0.75), (0, 1.0, -1.0), (100, 0.5, -0.5)],
    ids=["C04 cosine L=50", "C04 cosine L=0", "C04 cosine L=100"],
)
def test_cosine(length: int, right: float, wrong: float) -> None:
    """C04: 1 -> .5 and -1 -> -.5 over half a cosine of 100 tokens; an answer that was cut off has its own reward."""
    assert after(Cosine(), episodes([length] * 2, [1.0, 0.0])) == pytest.approx([right, wrong])
    assert after(Cosine(exceeded=-10.0), episodes([length], [1.0], stop=Stop.LENGTH)) == [-10.0]


@pytest.mark.parametrize(
    ("ids", "penalty"),
    [([5] * 5, -0.75), ([1, 2, 3, 4], 0.0), ([3], 0.0)],
    ids=["C04 repetition 5,5,5,5,5", "C04 repetition 1,2,3,4", "C04 repetition short"],
)
def test_repetition(ids: list[int], penalty: float) -> None:
    """C04: n = 2: one distinct pair of four costs three quarters."""
    assert after(Repetition(n=2), episodes([len(ids)], [1.0], ids=ids)) == pytest.approx([1 + penalty])


@pytest.mark.parametrize(
    ("form", "reward"), [(1.0, 1.0), (0.0, 0.0), (0.5, 0.0)], ids=["C03 in form", "C03 not in form", "C03 in part"]
)
def test_gate(form: float, reward: float) -> None:
    """C03: multiplied, not added: a right answer in the wrong form earns nothing, and the form alone earns nothing
    either."""
    right, wrong = (
        Answer(
            r,
            [[1]],
            np.full(1, -1.0),
            verdicts=(Judged("task", 1.0, Verdict.value(r)), Judged("think_format", 0.0, Verdict.value(form))),
        )
        for r in (1.0, 0.0)
    )
    them = [e.episode for e in scored_group("t", [right, wrong]).episodes]
    assert after(Gate(), them) == [reward, 0.0]
    assert after(Gate(otherwise=-1.0), them) == ([1.0, 0.0] if form == 1 else [-1.0, -1.0])
    assert [e.reward for e in them] == [1.0, 0.0], "filters and pass rates read the outcome as it was"
    with pytest.raises(DataError, match="shape=gate reads the reward source 'form', and there are task, think_format"):
        after(Gate(source="form"), them)


def test_pieces_follow_each_other() -> None:
    """Shapings are applied in order, each on what the one before left; a group without anybody stays empty."""
    them = episodes([100, 300], [1.0, 0.0])
    first = after(RankLength(), them)
    both, _ = shaped((RankLength(), RateLength(beta=1e-3)), np.array([1.0, 0.0]), them, 100)
    assert both.tolist() == pytest.approx([first[0] - 0.5 * 0.1, first[1] - 0.5 * 0.3])
    for piece in (RankLength(), TargetLength(), RateLength(), Cosine(), Repetition(), Gate(), RelativeLength()):
        assert shaped((piece,), np.zeros(0), [], 100)[0].shape == (0,)


# --- A26: staleness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behind", "version", "batch", "accepted", "running", "room"),
    [(0, 0, 4, 0, 0, 4), (4, 2, 8, 20, 10, 26), (1, 3, 8, 32, 8, 0), (0, 0, 4, 4, 4, 0)],
    ids=["A26 capacity eta 0", "A26 capacity eta 4", "A26 capacity eta 1", "A26 capacity never negative"],
)
def test_capacity(behind: int, version: int, batch: int, accepted: int, running: int, room: int) -> None:
    assert capacity(behind=behind, version=version, batch=batch, accepted=accepted, running=running) == room
    with pytest.raises(ConfigError, match="capacity"):
        capacity(behind=-1, version=version, batch=batch, accepted=accepted, running=running)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 9), st.integers(1, 6), st.integers(0, 60))
def test_capacity_is_the_bound_it_claims(behind: int, version: int, batch: int, begun: int) -> None:
    """A26: the last sample that may start is learned from exactly `behind` versions later, the next one would be too
    old."""
    room = capacity(behind=behind, version=version, batch=batch, accepted=begun, running=0)
    if room:
        assert versions_behind(place=begun + room - 1, version=version, batch=batch) == behind
    assert versions_behind(place=begun + room, version=version, batch=batch) > behind


# --- A28: scaling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "value"),
    [(100, 0.4), (300, 0.5), (0, 0.2), (1e-300, 0.2), (1e300, 0.6)],
    ids=["A28 C=100", "A28 C=300", "A28 none", "A28 next to none", "A28 without end"],
)
def test_reward_at(compute: float, value: float) -> None:
    """A28: R0 .2, A .6, B 1, C_mid 100."""
    assert reward_at(compute, Curve(start=0.2, asymptote=0.6, middle=100, exponent=1)) == pytest.approx(value)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "curve",
    [
        Curve(start=0.2, asymptote=0.6, middle=100, exponent=1),
        Curve(start=0.05, asymptote=0.95, middle=3.5, exponent=0.6),
        Curve(start=0.7, asymptote=0.3, middle=2e4, exponent=2.5),
    ],
    ids=["A28 fit", "A28 fit slow", "A28 fit falling"],
)
def test_fit_recovers_the_curve(curve: Curve, known: bool) -> None:
    """A28: from 16 points up to six times the middle all four numbers come back, and with a little noise the asymptote
    to +-.02."""
    compute = np.geomspace(curve.middle / 30, curve.middle * 6, 16)
    reward = np.array([reward_at(c, curve) for c in compute])
    found = fit(compute, reward, start=curve.start if known else None)
    assert (
        [*vars(found.curve).values()] == pytest.approx([*vars(curve).values()], rel=1e-4)
        and found.residual < 1e-6
        and found.bent
    )
    noisy = fit(compute, reward + np.random.default_rng(0).normal(size=16) * 0.002, start=curve.start)
    assert noisy.curve.asymptote == pytest.approx(curve.asymptote, abs=0.02) and 1e-4 < noisy.residual < 4e-3


def test_fit_says_when_it_guesses() -> None:
    """A28: before the middle the asymptote is a guess; too few points are refused."""
    curve = Curve(start=0.1, asymptote=0.9, middle=1000, exponent=1.5)
    early = np.geomspace(10, 400, 12)
    assert not fit(early, [reward_at(c, curve) for c in early]).bent
    for compute, reward in (([1, 2, 3], [0, 1, 2]), ([0, 1, 2, 3], [0, 1, 2, 3]), ([1, 2, 3, 4], [0, 1, 2])):
        with pytest.raises(DataError, match="fit"):
            fit(compute, reward)


@pytest.mark.parametrize("module", [scaling, staleness])
def test_examples_of_the_plan_are_true(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
