"""Reward functions of both signatures, and everything they can do wrong."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config.env import Reward
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.system.errors import ConfigError
from posttrain.verifier.builtin import BUILTIN
from posttrain.verifier.configured import sources
from posttrain.verifier.user_functions import source

TASK = Task(id="t1", prompt="what?", answer="12", info={"level": 3})
CHAT = Task(id="t2", prompt=({"role": "user", "content": "what?"},), answer="12", info={"level": 3})


def said(text: str, task: Task = TASK) -> Attempt:
    return Attempt(task=task, turns=(text,), stop=Stop.SAID)


def verdict(function: Any, text: str = "12", task: Task = TASK, timeout: float = 5.0) -> Verdict:
    return asyncio.run(source(function, timeout=timeout)(said(text, task))).verdict


async def slow_async(task: Task, text: str) -> float:
    await asyncio.sleep(0)
    return 0.25


async def gives_up(task: Task, text: str) -> float:
    raise asyncio.CancelledError("of its own")


async def leaves(task: Task, text: str) -> float:
    raise SystemExit(4)


class Judge:
    def __call__(self, task: Task, text: str) -> float:
        return float(task.answer == text)


class AsyncJudge:
    async def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(columns["level"][0])]


def trl_plain(completions: list[str], **kwargs: Any) -> list[float]:
    assert (
        kwargs["prompts"] == ["what?"]
        and kwargs["level"] == [3]
        and kwargs["answer"] == ["12"]
        and kwargs["id"] == ["t1"]
    )
    return [float(len(c)) for c in completions]


def trl_columns(prompts: list[str], completions: list[str], level: list[int]) -> list[float | None]:
    return [float(level[0])]


def trl_only_keywords(**kwargs: Any) -> list[float]:
    return [float(kwargs["completions"] == ["12"])]


@pytest.mark.parametrize(
    ("function", "score"),
    [
        (lambda task, text: 0.5, 0.5),
        (lambda task, text: np.float32(0.5), 0.5),
        (lambda task, text: np.array(2), 2.0),
        (lambda task, text: Verdict.value(0.75), 0.75),
        (lambda task, text, strict=False: 3, 3.0),
        (slow_async, 0.25),
        (functools.partial(lambda bonus, task, text: bonus, 2.0), 2.0),
        (functools.partial(slow_async), 0.25),
        (Judge(), 1.0),
        (AsyncJudge(), 3.0),
        (trl_plain, 2.0),
        (trl_columns, 3.0),
        (trl_only_keywords, 1.0),
        (lambda completions, **kwargs: (1,), 1.0),
        (lambda completions, **kwargs: np.array([0.5]), 0.5),
    ],
)
def test_a_reward_of_either_signature(function: Any, score: float) -> None:
    assert verdict(function) == Verdict.value(score)


def test_conversations_are_handed_over_as_messages() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    verdict(reward, task=CHAT)
    assert seen == {
        "prompts": [[{"role": "user", "content": "what?"}]],
        "completions": [[{"role": "assistant", "content": "12"}]],
    }


@pytest.mark.parametrize("function", [lambda task, text: None, lambda prompts, completions: [None]])
def test_none_abstains(function: Any) -> None:
    assert verdict(function).state is State.ABSTAIN


@pytest.mark.parametrize(
    ("function", "kind", "why"),
    [
        (lambda task, text: math.nan, "nan", "nan"),
        (lambda task, text: -math.inf, "nan", "-inf"),
        (lambda task, text: "1.0", "type", "str '1.0'"),
        (lambda task, text: True, "type", r"truth value True, wanted a number: return float"),
        (lambda task, text: text == "never", "type", "truth value False"),
        (lambda task, text: np.bool_(True), "type", "truth value"),
        (lambda task, text: torch.tensor(False), "type", "truth value"),
        (lambda completions, **kw: [c == "never" for c in completions], "type", "truth value False"),
        (lambda task, text: [1.0], "type", "list"),
        (lambda task, text: np.array([1.0, 2.0]), "type", "not one number"),
        (lambda completions, **kw: [math.nan], "nan", "nan"),
        (lambda completions, **kw: [1.0, 2.0], "count", "2 rewards for 1"),
        (lambda completions, **kw: [], "count", "0 rewards"),
        (lambda completions, **kw: 1.0, "type", "float, wanted a list"),
        (lambda completions, **kw: "1", "type", "str"),
        (lambda completions, **kw: ["1"], "type", "str"),
        (lambda task, text: 1 / 0, "raised", r"ZeroDivisionError: division by zero \(test_rewards.py:\d+\)"),
        (lambda task, text: next(iter(())), "raised", "StopIteration"),
        (lambda task, text: exit(3), "raised", "SystemExit: 3"),
        (leaves, "raised", "SystemExit: 4"),
        (gives_up, "raised", "CancelledError: of its own"),
        (lambda task, text: (_ for _ in ()).throw(TimeoutError("its own")), "raised", "TimeoutError: its own"),
        (lambda task, text: int("x" + text), "raised", r"ValueError.*test_rewards.py"),
    ],
)
def test_a_broken_reward_is_an_outage_never_a_wrong_answer(function: Any, kind: str, why: str) -> None:
    v = verdict(function)
    assert (v.state, v.kind) == (State.FAILED, kind)
    import re

    assert re.search(why, v.why), v.why


def test_the_line_named_is_the_users_own_even_when_a_library_raised(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\n\ndef reward(task, text):\n    return json.loads(text)['score']\n")
    (s,) = sources((Reward(function=f"{tmp_path}/mine.py:reward"),))
    v = asyncio.run(s(said("{"))).verdict
    assert v.kind == "raised" and v.why.startswith("JSONDecodeError") and v.why.endswith("(mine.py:4)")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hang_is_cut_off_and_holds_up_nobody(asynchronous: bool) -> None:
    async def hang_async(task: Task, text: str) -> float:
        await asyncio.sleep(20)
        return 1.0

    def hang(task: Task, text: str) -> float:
        time.sleep(20)
        return 1.0

    async def go() -> tuple[list[Verdict], float]:
        hung = source(hang_async if asynchronous else hang, timeout=0.2)
        good = source(lambda task, text: 1.0)
        start = time.perf_counter()
        verdicts = await asyncio.gather(*(s.verdict(said("x")) for s in [hung] * 20 + [good] * 20))
        return list(verdicts), time.perf_counter() - start

    verdicts, seconds = asyncio.run(go())
    assert [v.kind for v in verdicts[:20]] == ["timeout"] * 20
    assert verdicts[20:] == [Verdict.value(1.0)] * 20
    assert seconds < 8


def test_sync_rewards_do_not_block_the_loop() -> None:
    async def go() -> int:
        ticks = 0
        call = asyncio.ensure_future(source(lambda task, text: time.sleep(0.3) or 1.0).verdict(said("x")))
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(go()) >= 5


def test_cancelling_the_run_cancels_the_judging() -> None:
    async def go() -> None:
        async with asyncio.timeout(0.1):
            await source(lambda task, text: time.sleep(3), timeout=10).verdict(said("x"))

    with pytest.raises(TimeoutError):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1.0, r"signature \(\)"),
        (lambda a, b, c: 1.0, "neither of the two"),
        (lambda *args, **kwargs: 1.0, "neither of the two"),
        (lambda text: 1.0, "neither of the two"),
        # Called with (task, text) they would compare the task with the model's answer, and never pay.
        (lambda response, answer: float(response == answer), r"the arguments \(response, answer\).*\(task, text\)"),
        (lambda solution_str, ground_truth, method="strict": 1.0, r"Write it as .*\(task, text\)"),
        (lambda question, label: 1.0, r"Write it as .*\(task, text\)"),
        (lambda completions, environments, **kw: [1.0], "'environments', which is not available"),
    ],
)
def test_a_signature_that_is_neither_is_refused_at_once(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(function, name="r")


def test_every_argument_of_trl_is_there() -> None:
    def f(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
        log_metric("seen", 1.0)
        log_extra("said", ["it"])
        return [float(completion_ids == [[]] and trainer_state.global_step == trainer_state.max_steps)]

    assert verdict(f) == Verdict.value(1.0)


@pytest.mark.parametrize(
    ("content", "function", "message"),
    [
        (None, "absent.py:reward", r"absent.py:reward: no such file; .* has broken_neighbour.py, other.py"),
        ("def reword(task, text): return 1", "r.py:reward", "did you mean 'reword'"),
        ("reward = 3", "r.py:reward", "is a int, not a function"),
        ("def reward(task, text) return 1", "r.py:reward", r"cannot be imported: r.py:1: expected ':'"),
        ("import broken_neighbour", "r.py:reward", r"cannot be imported: broken_neighbour.py:3: invalid syntax"),
        ("import nowhere_to_be_found", "r.py:reward", r"ModuleNotFoundError.*\(r.py:1\)"),
        ("raise SystemExit('no')", "r.py:reward", r"SystemExit: no \(r.py:1\)"),
    ],
)
def test_a_reward_that_cannot_be_found_says_what_exists(
    tmp_path: Path, content: str | None, function: str, message: str
) -> None:
    (tmp_path / "other.py").write_text("")
    (tmp_path / "broken_neighbour.py").write_text("x = 1\n\nx = = 1\n")
    if content is not None:
        (tmp_path / "r.py").write_text(content)
    with pytest.raises(ConfigError, match=message):
        sources((Reward(function=f"{tmp_path}/{function}"),))


def test_missing_columns_are_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match="'ground_truth', which task 't1' does not have"):
        source(lambda completions, ground_truth, **kw: [1.0], name="r").check([TASK])
    with pytest.raises(ConfigError, match="'exact' requires column 'answer'"):
        sources((Reward(function="exact"),), [TASK, Task(id="t9", prompt="x")])
    source(trl_columns).check([TASK])


def test_names_are_unique_and_weights_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        sources((Reward(function="exact"), Reward(function="exact", weight=2)))
    with pytest.raises(ConfigError, match="finite"):
        sources((Reward(function="exact", weight=math.nan),))


def test_a_reward_may_import_its_neighbours_and_hold_state(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 0.5\n")
    (tmp_path / "r.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_reward import BONUS\n@dataclass\nclass S:\n    n: int ="
        " 0\nS_ = S()\nasync def reward(task, text):\n    S_.n += 1\n    return BONUS * S_.n\n"
    )
    (s,) = sources((Reward(function=f"{tmp_path}/r.py:reward", weight=2.0),))
    judged = [asyncio.run(s(said("x"))) for _ in range(2)]
    assert [(j.source, j.weight, j.verdict.score) for j in judged] == [("reward", 2.0, 0.5), ("reward", 2.0, 1.0)]


@pytest.mark.parametrize(
    ("name", "text", "answer", "score"),
    [
        ("exact", " 12\n", "12", 1.0),
        ("exact", "12.", "12", 0.0),
        ("last_integer", "first 7, then 12.", 12, 1.0),
        ("last_integer", "12 or 13", "12", 0.0),
        ("contains", "It is 12.", "12", 1.0),
        ("contains", "It is 312", "12", 0.0),
        ("contains", "It is 12.5", "12", 0.0),
        ("contains", "It is -12.", "12", 0.0),
        ("contains", "It is -12.", "-12", 1.0),
        ("contains", "It is 10-12 of them.", "12", 1.0),
        ("contains", "", "12", 0.0),
        ("exact", "four", ["4", "four"], 1.0),
        ("exact", "five", ["4", "four"], 0.0),
        ("contains", "It is four.", [4, "four"], 1.0),
        ("last_integer", "so 12", [12, 13], 1.0),
        ("last_integer", "so 14", [12, 13], 0.0),
    ],
)
def test_builtins(name: str, text: str, answer: Any, score: float) -> None:
    assert verdict(BUILTIN[name], text, Task(id="t", prompt="p", answer=answer)).score == score


def test_a_builtin_without_an_answer_fails_instead_of_scoring() -> None:
    v = verdict(BUILTIN["exact"], "", Task(id="t", prompt="p"))
    assert v.state is State.FAILED and "no answer" in v.why
