"""Learning again from groups of earlier steps: which ones, how often, and with how much credit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.checks.learning.credit_by_definition import expected_credit
from posttrain.config.stages.reinforce import Replay
from posttrain.core.batch import Packed
from posttrain.core.ports import Learner
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, Scored, ScoredGroup
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import DR_GRPO, EMA, GRPO, RAE, RLOO
from posttrain.role.learning.replay_buffer import ReplayBuffer
from posttrain.stages.training_step import moved
from posttrain.system.errors import ConfigError


def group(name: str, visit: int, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0) -> Group:
    task, episodes = Task(name, "?"), list[Episode]()
    for i, reward in enumerate(rewards):
        t = Transcript(Sampling(max_tokens=4))
        t.see(np.array([1, 2], np.int32))
        t.say(
            SampledTurn(
                np.array([3 + i], np.int32), np.array([-1.0], np.float32), np.array([version], np.int32), Stop.SAID
            )
        )
        judged = (Judged("mine", 1.0, Verdict.value(reward)),)
        episodes.append(Episode(task, visit, i, (t.segment(),), Stop.SAID, judged, turns=(1,)))
    return Group(task, visit, tuple(episodes))


def near(_: Group) -> float:
    return 0.0


@given(
    config=st.builds(
        Replay,
        size=st.integers(4, 12),
        groups=st.integers(1, 4),
        age=st.integers(1, 5),
        discount=st.sampled_from([1.0, 0.5]),
        balanced=st.booleans(),
    ),
    prompts=st.integers(1, 4),
    names=st.integers(1, 5),
    steps=st.integers(1, 10),
    seed=st.integers(0, 3),
)
@settings(max_examples=150)
def test_no_group_is_too_old_or_comes_twice_and_none_leaves_uncounted(
    config: Replay, prompts: int, names: int, steps: int, seed: int
) -> None:
    buffer, again = (ReplayBuffer(config, seed, "rl") for _ in range(2))
    put, left, born = 0, 0.0, dict[tuple[str, int], int]()
    for step in range(1, steps + 1):
        drawn = buffer.draw(step, near)
        keys = [(g.task.id, g.visit) for g in drawn]
        assert len(set(keys)) == len(keys) <= config.groups
        for g in drawn:
            age = step - born[g.task.id, g.visit]
            assert 1 <= age <= config.age and g.discount == config.discount**age
        alive = list(buffer.held)
        assert len(drawn) == min(config.groups, len(alive)), "it gives as many as it can"
        if config.balanced and drawn:
            often = Counter(n for n, _ in keys)
            could = Counter(b.group.task.id for b in alive)
            assert all(n == could[name] or n >= max(often.values()) - 1 for name, n in often.items())
            assert len(often) == min(len(could), len(drawn)), "no prompt comes twice while another has not come"
        assert [(g.task.id, g.visit) for g in again.draw(step, near)] == keys, "a function of the seed and the step"
        new = [group(str((step * prompts + i) % names), step * prompts + i) for i in range(prompts)]
        born |= {(g.task.id, g.visit): step for g in new}
        for one in (buffer, again):
            one.add(step, new)
        put += len(new)
        told = buffer.gauges()
        left += sum(told[f"replay/left_by_{why}"].sum for why in ("age", "ratio", "size"))
        assert len(buffer.held) <= config.size and put - left == len(buffer.held)


def test_a_group_that_the_policy_has_left_behind_leaves() -> None:
    buffer = ReplayBuffer(Replay(size=8, groups=4, age=9, ratio=0.5), 0, "rl")
    buffer.add(1, [group(str(i), i) for i in range(4)])
    drawn = buffer.draw(2, lambda g: 0.6 if g.task.id in "02" else 0.4)
    assert sorted(g.task.id for g in drawn) == ["1", "3"]
    assert buffer.gauges()["replay/left_by_ratio"].sum == 2 and len(buffer.held) == 2


def test_how_far_a_group_is_left_behind_is_said_of_sampled_tokens_alone() -> None:
    """A demonstration among the siblings has no sampler; its log-probs are written as 0."""

    class Even:
        def score(self, packed: Packed) -> np.ndarray:
            return np.full(packed.spoken, -1.25, np.float32)

    said = group("a", 0)
    shown = Transcript(Sampling(max_tokens=4))
    shown.see(np.array([1, 2], np.int32))
    shown.show(np.array([3, 4], np.int32))
    mine = (Judged("mine", 1.0, Verdict.value(1.0)),)
    third = Episode(said.task, 0, 2, (shown.segment(),), Stop.SAID, mine)
    for one in (said, replace(said, episodes=(*said.episodes, third))):
        assert moved(cast("Learner", Even()), one) == pytest.approx(0.25)


def test_groups_without_a_verdict_are_not_held() -> None:
    unjudged = group("a", 0)
    failed = tuple(
        Episode(e.task, 0, e.sibling, e.segments, e.stop, (Judged("m", 1.0, Verdict.failed("down")),), turns=(1,))
        for e in unjudged.episodes
    )
    buffer = ReplayBuffer(Replay(), 0, "rl")
    buffer.add(1, [Group(unjudged.task, 0, failed)])
    assert buffer.held == []


def test_what_was_saved_comes_back() -> None:
    buffer, later = (ReplayBuffer(Replay(discount=0.9), 0, "rl") for _ in range(2))
    buffer.add(3, [group("a", 0), group("b", 1)])
    later.restore(buffer.rows(), [b.group for b in buffer.held])
    one, two = ([(g.task.id, g.visit, g.discount) for g in b.draw(5, near)] for b in (buffer, later))
    assert one == two and one[0][2] == pytest.approx(0.81)


@pytest.mark.parametrize("a", [GRPO, RLOO, DR_GRPO], ids=lambda a: a.name)
def test_a_discount_is_a_factor_of_the_credit(a: Algorithm) -> None:
    """Of its own group alone, in the credit and in the credit that every run checks it with."""
    a = replace(a, pull=None)
    plain = [group("a", 0, (0.0, 1.0, 0.5)), group("b", 1, (1.0, 0.0, 0.0))]
    less = [plain[0], replace(plain[1], discount=0.25)]

    def credit(groups: list[Group]) -> list[np.ndarray]:
        scored = [ScoredGroup(g, tuple(Scored(e) for e in g.episodes)) for g in groups]
        told = credit_step(a, scored, max_tokens=4, ema=0.0)
        expected = expected_credit(a, scored, max_tokens=4, ema=0.0)
        assert expected is not None
        flat = [np.concatenate(e.advantage) for g in told.groups for e in g.episodes]
        for x, o in zip(flat, expected, strict=True):
            np.testing.assert_allclose(x, o.credit, rtol=1e-12)
        return flat

    one, two = credit(plain), credit(less)
    for i in range(3):
        np.testing.assert_array_equal(two[i], one[i])
        np.testing.assert_array_equal(two[3 + i], 0.25 * one[3 + i])


outcomes = st.lists(st.tuples(*[st.integers(-4, 4).map(float)] * 2), min_size=1, max_size=3)


@pytest.mark.parametrize("a", [EMA, RAE], ids=lambda a: a.name)
@given(one=outcomes, two=outcomes, discount=st.sampled_from([1.0, 0.5]))
@settings(max_examples=40)
def test_a_moving_baseline_takes_each_group_in_once(
    a: Algorithm, one: list[Any], two: list[Any], discount: float
) -> None:
    """After a step that also learns again from the step before it, it is what it is without those groups. They are
    compared with it as the step's own groups left it."""
    buffer = ReplayBuffer(Replay(discount=discount), 0, "rl")
    first, second = ([group(f"{at}/{i}", at, r) for i, r in enumerate(of)] for at, of in enumerate((one, two)))

    def credit(groups: Sequence[Group], before: Credit | None) -> Credit:
        scored = [ScoredGroup(g, tuple(Scored(e) for e in g.episodes)) for g in groups]
        ema, emas = (0.0, {}) if before is None else (before.ema, before.emas)
        told = credit_step(a, scored, max_tokens=4, ema=ema, emas=emas)
        expected = expected_credit(a, scored, max_tokens=4, ema=ema)
        assert (expected is None) == (a is RAE)
        for got, want in zip([e for g in told.groups for e in g.episodes], expected or [], strict=a is EMA):
            np.testing.assert_allclose(np.concatenate(got.advantage), want.credit, rtol=1e-12, atol=1e-15)
        return told

    before = credit(first, None)
    buffer.add(1, first)
    again = buffer.draw(2, near)
    alone, told = credit(second, before), credit([*second, *again], before)
    assert len(again) == len(first) and (told.ema, told.emas) == (alone.ema, alone.emas)
    level = told.emas[""] if a is RAE else told.ema
    for g in told.groups[len(second) :]:
        for e in g.episodes:
            assert np.concatenate(e.advantage) == pytest.approx(discount * ((e.episode.reward or 0.0) - level))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"size": 0}, "size=0"),
        ({"groups": 0}, "groups=0"),
        ({"age": 0}, "age=0"),
        ({"size": 4, "groups": 5}, "raise size"),
        ({"ratio": 0.0}, "ratio=0"),
        ({"discount": 0.0}, "discount=0"),
        ({"discount": 1.5}, "discount=1.5"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Replay(**settings)
