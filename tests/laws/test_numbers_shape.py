"""Numbers of the shapings of reward: every case names its item of the survey."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.algorithm.credit.reward_shaping import shaped
from posttrain.core.types import Episode, Stop
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.pieces.shape import (
    Cosine,
    Gate,
    RankLength,
    RateLength,
    RelativeLength,
    Repetition,
    Shaping,
    TargetLength,
)
from posttrain.system.errors import DataError
from posttrain.toy.episodes import PlainEpisode, scored_group


def episodes(
    lengths: list[int], rewards: list[float], *, stop: Stop = Stop.SAID, ids: list[int] | None = None, **info: float
) -> list[Episode]:
    said = np.array(ids or [], np.int32)
    answers = [
        PlainEpisode(r, [[n]], np.full(n, -1.0), stop=stop, ids=said) for n, r in zip(lengths, rewards, strict=True)
    ]
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


def test_a_column_that_is_no_number_is_named() -> None:
    for wrong in ("many", None, np.nan):
        with pytest.raises(DataError, match="'n_gold' of every task, and task 't' has"):
            after(TargetLength(), episodes([8], [1.0], n_gold=wrong))  # type: ignore[arg-type]


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
        PlainEpisode(
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
