"""Batch rewards get all answers to a prompt in one call, with every argument that TRL's trainers pass."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.checks.judging.rejudge import RejudgedAnswers
from posttrain.core.gauge import Gauge
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.stop import StepNumber
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.role.judging import SiblingVerdicts
from posttrain.system.errors import InvariantError
from posttrain.verifier.user_functions import source

TASK = Task(id="t", prompt="3+4=", answer="7", info={"level": 2})
TEXTS = ("7", "8", "7", "12")


def attempt(text: str) -> Attempt:
    return Attempt(TASK, (text,), Stop.SAID, ids=tuple(map(ord, text)))


def batch(function: Any, texts: tuple[str, ...] = TEXTS, at: StepNumber = StepNumber(2, 8)) -> Any:
    return asyncio.run(source(function, name="f", weight=0.5).batch([attempt(t) for t in texts], at))


def test_one_call_has_every_answer_and_every_argument() -> None:
    calls: list[dict[str, Any]] = []

    def f(prompts, completions, completion_ids, answer, level, trainer_state, log_metric, log_extra, **columns):
        calls.append(locals())
        log_metric("mean_length", 1.25)
        log_metric("mean_length", 1.75)
        log_extra("first", [c[0] for c in completions])
        return [
            float(c == a) * trainer_state.global_step / trainer_state.max_steps
            for c, a in zip(completions, answer, strict=True)
        ]

    judged, logged = batch(f)
    (seen,) = calls
    assert seen["completions"] == list(TEXTS) and seen["prompts"] == ["3+4="] * 4
    assert seen["completion_ids"] == [[55], [56], [55], [49, 50]] and seen["level"] == [2] * 4
    assert [j.verdict.score for j in judged] == [0.25, 0.0, 0.25, 0.0]
    assert judged[3].verdict.why == "first: 1"
    assert logged == {"metric/mean_length": Gauge(3.0, 2.0)}


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "\u202egpj", "x" * 65, "_x", "-x", 3, "a\x00"])
@pytest.mark.parametrize("which", ["log_metric", "log_extra"])
def test_what_is_logged_has_a_name_that_can_be_printed(name: Any, which: str) -> None:
    judged, logged = batch(lambda completions, **kw: kw[which](name, [1] * 4 if which == "log_extra" else 1.0))
    assert logged == {} and {j.verdict.kind for j in judged} == {"raised"}
    why = judged[0].verdict.why
    assert "a name is 1 to 64 letters" in why and why.isprintable(), why


def test_values_that_are_no_numbers_are_not_logged() -> None:
    def f(completions, log_metric, **kw):
        for x in (1.0, float("nan"), float("inf"), -float("inf"), 3.0):
            log_metric("länge/mean", x)
        return [1.0] * len(completions)

    def many(completions, log_metric, **kw):
        for i in range(1000):
            log_metric(f"m{i}", 1.0)

    assert batch(f)[1] == {"metric/länge/mean": Gauge(4.0, 2.0)}
    judged, logged = batch(many)
    assert "at most 100 different names" in judged[0].verdict.why and len(logged) <= 100


async def coroutine(completions, **columns):
    await asyncio.sleep(0)
    return [None if c == "8" else 1.0 for c in completions]


def test_none_is_not_applicable_and_coroutines_are_awaited() -> None:
    judged, _ = batch(coroutine)
    assert [j.verdict for j in judged] == [
        Verdict.value(1.0),
        Verdict.abstain(),
        Verdict.value(1.0),
        Verdict.value(1.0),
    ]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda completions, **kw: [1.0], "count"),
        (lambda completions, **kw: 1 / 0, "raised"),
        (lambda completions, log_extra, **kw: log_extra("x", [1]), "raised"),
        (lambda completions, trainer_state, **kw: [trainer_state.epoch], "raised"),
        (lambda completions, **kw: "1111", "type"),
    ],
)
def test_what_goes_wrong_fails_the_whole_call_and_is_no_zero(function: Any, kind: str) -> None:
    judged, _ = batch(function)
    assert {(j.verdict.state, j.verdict.kind) for j in judged} == {("failed", kind)}


def test_the_arguments_are_those_of_the_installed_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    text = inspect.getsource(trainer.GRPOTrainer._calculate_rewards)
    for name in ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"):
        assert f"{name}=" in text or f'"{name}"' in text


# --- in a group -------------------------------------------------------------------------------------------------------


def episode(text: str, sibling: int, *verdicts: Any) -> Episode:
    t = Transcript(Sampling(stop_ids=()))
    ids = np.array(list(map(ord, text)), np.int32)
    t.see([1])
    t.say(SampledTurn(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), Stop.SAID))
    return Episode(TASK, 0, sibling, (t.segment(),), Stop.SAID, verdicts, text, turns=(len(ids),))


async def judged_group(env: PromptsEnv) -> tuple[list[Episode], Any]:
    judging = SiblingVerdicts(env)
    episodes: list[Episode] = []
    for i, text in enumerate(TEXTS):
        e = episode(text, i)
        episodes.append(replace(e, verdicts=await judging.judge(attempt(text), e.segments, i)))
    return await judging.together(episodes, StepNumber(1, 4))


def rank(completions, **columns):
    """Compares siblings: the share of the others that are shorter."""
    return [sum(len(o) < len(c) for o in completions) / len(completions) for c in completions]


async def test_a_reward_that_compares_siblings_sees_them_all() -> None:
    calls = 0

    def wavers(completions, **columns):
        nonlocal calls
        calls += 1
        return [float(i) for i in range(len(completions))]

    def short(task, text):
        return float(len(text) == 1)

    env = PromptsEnv(rewards=tuple(source(f) for f in (rank, short, wavers)))
    episodes, _ = await judged_group(env)
    by_source = {j.source: [] for j in episodes[0].verdicts}
    for e in episodes:
        for j in e.verdicts:
            by_source[j.source].append(j.verdict.score)
    assert by_source["rank"] == [0.0, 0.0, 0.0, 0.75]
    assert by_source["short"] == [1.0, 1.0, 1.0, 0.0]
    assert by_source["wavers"] == [0.0, 1.0, 0.0, 3.0], "equal answers share one verdict"
    assert calls == 1


async def test_a_batch_is_judged_again_as_a_batch() -> None:
    env = PromptsEnv(rewards=(source(rank),))
    episodes, _ = await judged_group(env)
    checks = RejudgedAnswers(_steps_before=3)
    assert await checks.after(env, [Group(TASK, 0, tuple(episodes))], StepNumber(1, 4)) == ()
    first, *_, last = episodes
    swapped = [replace(first, verdicts=last.verdicts), *episodes[1:3], replace(last, verdicts=first.verdicts)]
    with pytest.raises(InvariantError, match="changed or\\s+reordered"):
        await RejudgedAnswers(_steps_before=3).after(env, [Group(TASK, 0, tuple(swapped))], StepNumber(1, 4))


async def test_scores_that_go_to_the_wrong_siblings_in_a_way_that_repeats_stop_the_run() -> None:
    def reversed_(completions):
        return [float(len(c)) for c in completions][::-1]

    env = PromptsEnv(rewards=(source(reversed_),))
    episodes, _ = await judged_group(env)
    with pytest.raises(InvariantError, match="scores to the wrong siblings"):
        await RejudgedAnswers(_steps_before=3).after(env, [Group(TASK, 0, tuple(episodes))], StepNumber(1, 4))


async def test_one_answer_alone_is_a_batch_of_one() -> None:
    env = PromptsEnv(rewards=(source(rank),))
    (judged,) = await env.judge(attempt("12"))
    assert judged.verdict.score == 0.0
