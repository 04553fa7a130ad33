"""Numbers of credit that knows turns: paid turns, MT-GRPO, GiGPO."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numbers_credit import of

from posttrain.algorithm.credit.reward_spread import compared
from posttrain.core.streams import REFERENCE, START
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Scale
from posttrain.ladder.pieces.baseline import AnchorMean, GroupMean, ToGo, TurnMean, Value
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GDPO, GIGPO, GRPO, MT_GRPO, PPO, REINFORCE
from posttrain.toy.episodes import PlainEpisode, scored_group


def turned(reward: float, *paid: float, tokens: int = 1) -> PlainEpisode:
    """An answer of a turn of `tokens` for each entry of `paid`, and `reward` at the end."""
    n = len(paid) * tokens
    given = [Judged("turn", 1.0, Verdict.value(p), end=(i + 1) * tokens, paid=True) for i, p in enumerate(paid) if p]
    end = Judged("toy", 1.0, Verdict.value(reward))
    return PlainEpisode(
        reward, [[tokens] * len(paid)], np.full(n, -1.0), np.full(n, -1.0), values=np.zeros(n), verdicts=(end, *given)
    )


def test_gigpo_numbers() -> None:
    """E05: returns 1, 0, 0, 1 have episode credit +-.8660; turns in one state with returns .95, 0, .9025 have .6212,
    -1.1536, .5324 (std1), and the first turn 1.4872."""
    half = math.sqrt(3) / 2
    assert compared(np.array([1.0, 0.0, 0.0, 1.0]), 0.0, scaled=True) == pytest.approx([half, -half, -half, half])
    assert compared(np.array([0.95, 0.0, 0.9025]), 0.0, scaled=True) == pytest.approx(
        [0.6212, -1.1536, 0.5324], abs=1e-4
    )
    group = [turned(1.0, 0, 0), turned(0.0, 0), turned(0.0, 0, 0, 0), turned(1.0, 0, 0, 0)]
    for i, a in enumerate(group):
        a.observation = 3 + i  # every later turn is in a state of its own, but those of one sibling among each other
    credit = of(replace(GIGPO, baseline=AnchorMean(by="history")), scored_group("t", group))
    first = compared(np.array([0.95, 0.0, 0.0, 0.9025]), 0.0, scaled=True)
    assert [x[0] for x in credit] == pytest.approx(
        [half + first[0], -half + first[1], -half + first[2], half + first[3]]
    )
    assert credit[0][1] == pytest.approx(half), "a state of its own gives nothing"
    assert half + compared(np.array([0.95, 0.0, 0.9025]), 0.0, scaled=True)[0] == pytest.approx(1.4872, abs=1e-4)


def test_gigpo_compares_within_a_trajectory_too() -> None:
    """Two turns of one answer after the same observation are compared with each other."""
    group = [turned(1.0, 0, 0, 0), turned(1.0, 0, 0, 0)]
    for a in group:
        a.observation = 3
    credit = of(GIGPO, scored_group("t", group))
    later = compared(np.array([0.95, 1.0, 0.95, 1.0]), 0.0, scaled=True)
    assert credit[0][1:] == pytest.approx(later[:2].tolist()), "outcomes agree, so only the states speak"


def test_mt_grpo_numbers() -> None:
    """E05: turn credit .5, -.5 and outcome credit -1, 1 with lambda 1 give -.5, .5; a last turn that is paid nothing
    gets -1, 1."""
    a = replace(MT_GRPO, scale="one")
    first, second = of(a, scored_group("t", [turned(-1.0, 1.0, 0.0), turned(1.0, 0.0, 0.0)]))
    assert first == pytest.approx([0.5 - 1, -1.0]) and second == pytest.approx([-0.5 + 1, 1.0])
    assert of(replace(a, baseline=TurnMean(outcome=0.0)), scored_group("t", [turned(-1.0, 1.0), turned(1.0, 0.0)])) == [
        [0.5],
        [-0.5],
    ]


def test_without_paid_turns_mt_grpo_is_grpo_and_gigpo_of_one_turn_is_it_twice() -> None:
    group = [turned(r, 0.0, tokens=2) for r in (1.0, 0.0, 0.0, 1.0)]
    plain = of(replace(GRPO, pull=None), scored_group("t", group))
    assert of(MT_GRPO, scored_group("t", group)) == [pytest.approx(x) for x in plain]
    assert of(GIGPO, scored_group("t", group)) == [pytest.approx([2 * y for y in x]) for x in plain]


def test_a_paid_turn_is_part_of_the_outcome_and_stands_where_it_was_paid() -> None:
    """Rewards .25 after turn one and 1 at the end: GAE with lambda 1 and values 0 gives 1.25 and 1; reward-to-go the
    same; a group compares the whole 1.25. A reward before an observation is never lost."""
    group = scored_group("t", [turned(1.0, 0.25, 0.0), turned(0.0, 0.0, 0.0)])
    assert [s.episode.reward for s in group.episodes] == [1.25, 0.0]
    assert of(replace(PPO, whiten=None, baseline=Value(gae_lambda=1.0)), group) == [[1.25, 1.0], [0.0, 0.0]]
    assert of(replace(REINFORCE, baseline=ToGo()), group) == [[1.25, 1.0], [0.0, 0.0]]
    assert of(replace(REINFORCE, baseline=GroupMean()), group) == [[0.625, 0.625], [-0.625, -0.625]]


@given(
    rows=st.lists(
        st.tuples(st.integers(-3, 3), st.lists(st.integers(-2, 2), min_size=1, max_size=3)), min_size=2, max_size=4
    ),
    scale=st.sampled_from(["one", "batch_std"]),
    charged=st.booleans(),
)
@settings(max_examples=60)
def test_reward_to_go_is_scaled_as_a_whole(rows: list[tuple[int, list[int]]], scale: Scale, charged: bool) -> None:
    """An answer's first token has the credit it has under `Zero`, whatever the scale. Each later one has less by what
    was paid before it and more by the KL charged before it, over the same scale; after the last payment, of an outcome
    of 0, that leaves exactly 0."""
    pull = KL(coef=0.5, estimator="k1", placement="reward") if charged else None
    group = [turned(reward / 4, *(p / 4 for p in paid)) for reward, paid in rows]
    for i, a in enumerate(group):
        a.start, a.reference = np.full(a.spoken, -1.0), np.full(a.spoken, -1.0 - i / 8)
    plain = replace(REINFORCE, scale=scale, pull=pull)
    whole, to_go = of(plain, scored_group("t", group)), of(replace(plain, baseline=ToGo()), scored_group("t", group))
    outcomes = [
        r / 4 + math.fsum(paid) / 4 - (i * len(paid) / 16 if charged else 0.0) for i, (r, paid) in enumerate(rows)
    ]
    d = 1.0 if scale == "one" else stdev(outcomes)
    for i, ((reward, paid), zero, own) in enumerate(zip(rows, whole, to_go, strict=True)):
        assert own[0] == pytest.approx(zero[0], abs=1e-12)
        before = [math.fsum(paid[:t]) / 4 - (i * t / 16 if charged else 0.0) for t in range(len(paid))]
        assert own == pytest.approx([own[0] - (b / d if d > 1e-12 else 0.0) for b in before], abs=1e-9)
        if not charged and reward == 0 and len(paid) > 1 and paid[-1] == 0:
            assert own[-1] == 0.0


def test_a_turn_after_the_last_payment_has_no_credit_under_a_scale() -> None:
    """.5 for turn one and nothing after it, beside a sibling that earned nothing: over std .3536 turn one has 1.4142,
    turn two 0."""
    group = scored_group("t", [turned(0.0, 0.5, 0.0), turned(0.0, 0.0, 0.0)])
    assert of(replace(REINFORCE, baseline=ToGo(), scale="batch_std"), group) == [
        [pytest.approx(math.sqrt(2)), 0.0],
        [0.0, 0.0],
    ]
    alike = scored_group("t", [turned(0.0, 0.5, 0.0), turned(0.0, 0.0, 0.5)])
    assert of(replace(REINFORCE, baseline=ToGo(), scale="batch_std"), alike) == [[0.0, 0.0], [0.0, 0.0]], (
        "no spread, no scale, no credit"
    )


def test_gdpo_sums_what_a_source_paid() -> None:
    """A sibling whom a paying source gave nothing earned 0 there; one that was paid twice earned the sum."""
    group = scored_group("t", [turned(1.0, 0.5, 0.5), turned(1.0, 0.0, 0.0)])
    first, second = of(replace(GDPO, whiten=None, pull=None), group)
    assert first == pytest.approx([math.sqrt(0.5)] * 2) and second == pytest.approx([-math.sqrt(0.5)] * 2)


def test_what_is_not_learned_from_is_not_placed() -> None:
    """With rewards=none a value learns what the KL costs, here 0, whatever the world paid."""
    group = scored_group("t", [turned(1.0, 0.25, 0.0), turned(0.0, 0.0, 0.0)])
    a = replace(
        PPO,
        whiten=None,
        baseline=Value(gae_lambda=1.0),
        rewards="none",
        pull=KL(coef=1.0, estimator="k1", placement="reward"),
    )
    same = [s.having({REFERENCE: s[START]}) for s in group.episodes]
    assert of(a, replace(group, episodes=tuple(same))) == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(AssertionError):
        assert of(replace(a, rewards="sum"), replace(group, episodes=tuple(same))) == [[0.0, 0.0], [0.0, 0.0]]
