"""reasoning-gym's scorers: whose fault it is that one gives no number, and that none runs what a policy wrote."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.core.ports import Attempt
from posttrain.core.types import Stop
from posttrain.core.verdict import State, Verdict
from posttrain.environment.adapters import gym_scoring
from posttrain.environment.adapters.gym_scoring import FORMULAS, ScoringRequest, evaluate_literals_only, handler, scored
from posttrain.environment.adapters.reasoning_gym import Gym
from posttrain.verifier.workers.worker_pool import WorkerAnswer

ASKED = ScoringRequest("basic_arithmetic", (), 0, {}, "said", "gold")


def scorer(raises: str) -> Any:
    def score_answer(answer: str, entry: Any) -> float:
        if answer in raises.split():
            raise OSError("no space left on device")
        return 0.25

    return SimpleNamespace(score_answer=score_answer)


def test_a_scorer_that_raises_on_the_right_answer_too_is_an_outage() -> None:
    broken = scored(scorer("said gold"), ASKED)
    assert (broken.state, broken.kind) == (
        State.FAILED,
        "raised",
    ) and "on the right answer too: OSError: no space left" in broken.why
    own = scored(scorer("said"), ASKED)
    assert (own.score, own.kind) == (0.0, "unparsable") and own.why.startswith("OSError: no space left")
    assert scored(scorer(""), ASKED) == Verdict.value(0.25)
    assert scored(SimpleNamespace(score_answer=lambda a, e: True), ASKED) == Verdict.value(1.0), (
        "by the package's own rules a number"
    )


@pytest.mark.parametrize(
    ("said", "gold", "state"),
    [
        (Verdict.value(0.0, "timeout", "30 s"), Verdict.value(1.0), State.VALUE),
        (Verdict.value(0.0, "timeout", "30 s"), Verdict.value(0.0, "timeout", "30 s"), State.FAILED),
        (Verdict.value(0.0, "crash", "9"), Verdict.failed("raised", "outage"), State.FAILED),
        (Verdict.failed("timeout", "waited"), Verdict.value(1.0), State.FAILED),
        (Verdict.value(0.5), Verdict.failed("raised", "not asked"), State.VALUE),
    ],
)
async def test_what_ends_the_scorer_is_the_answers_fault_if_the_right_answer_is_scored(
    said: Verdict, gold: Verdict, state: State
) -> None:
    """Another item's answer, which is all that a pool knows by itself, says nothing about this item's scorer."""

    class Workers:
        async def ask(self, asked: ScoringRequest) -> WorkerAnswer:
            return WorkerAnswer((gold if asked.answer == "gold" else said,))

    found = await gym_scoring.verdict(Workers(), ASKED)  # type: ignore[arg-type]
    assert found.state is state and found.kind == said.kind


def attempt(env: Gym, text: str) -> Attempt:
    return Attempt(env.train.task(0), (text,), Stop.SAID)


@pytest.mark.prove
async def test_an_answer_without_end_is_killed_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of powers keeps the interpreter's lock as long as it lasts, so in a thread not even its time-out would
    come."""
    monkeypatch.setattr(gym_scoring, "SECONDS", 1)
    env = Gym.of("countdown", {}, heldout_count=1)
    right = str(env.train.task(0).answer)
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - begun)

    try:
        assert (await env.judge(attempt(env, right)))[0].verdict == Verdict.value(1.0)
        beating = asyncio.create_task(beat())
        late = (await env.judge(attempt(env, "9**9**9**9")))[0].verdict
        beating.cancel()
        assert (late.score, late.kind) == (0.0, "timeout") and "processor time" in late.why and max(gaps) < 3.0
        assert (await env.judge(attempt(env, right)))[0].verdict == Verdict.value(1.0)
        assert env.gauges()["verifier/gym/work_s"].count >= 3
    finally:
        env.close()


EVALUATE = {"binary_matrix", "spiral_matrix", "string_insertion", "n_queens"}


@pytest.mark.parametrize("task", sorted(EVALUATE | FORMULAS))
def test_no_scorer_runs_what_an_answer_says(task: str, tmp_path: Path) -> None:
    """Those that evaluate the answer score the right one and a list of it as before, and run no program."""
    answer = handler("")
    env = Gym.of(task, {}, heldout_count=1)
    target = tmp_path / "made"
    for i in range(3):
        t = env.train.task(i)
        gold = answer(env._asked(Attempt(t, (str(t.answer),), Stop.SAID)))
        assert gold["score"] == 1.0, gold
    spelled = "+".join(f"chr({ord(c)})" for c in f"__import__('os').mkdir({str(target)!r})")
    for text in (
        f"__import__('os').mkdir({str(target)!r})",
        f"[__import__('os').mkdir({str(target)!r})]",
        f"eval({spelled})",
    ):
        seen = answer(env._asked(attempt(env, text)))
        assert seen["state"] == "value" and seen["score"] < 1.0 and not target.exists(), seen


def test_a_list_of_the_answer_is_still_read() -> None:
    evaluate_literals_only()
    env = Gym.of("spiral_matrix", {}, heldout_count=1)
    listed = "[" + ", ".join(str(env.train.task(0).answer).split()) + "]"
    assert handler("")(env._asked(attempt(env, listed)))["score"] == 0.1


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("2*x**3/3 - sqrt(x)*asin(x) + C", True),
        ("(1.5 + 2)*3 = x!", True),
        ("Integral(acosh(x), x)", True),
        ("().__class__", False),
        ("x.diff", False),
        ("x . diff", False),
        ("eval(x)", False),
        ("lambda: 0", False),
        ("ｅｖａｌ(x)", False),
        ("x['a']", False),
        ("sin\n(x)", True),
    ],
)
def test_what_sympys_parser_may_read(text: str, fits: bool) -> None:
    assert (gym_scoring._no_formula(text) == "") == fits
