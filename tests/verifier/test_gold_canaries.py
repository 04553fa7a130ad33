"""Gold canaries: what an environment vouches for scores 1 at the start and at every later step, or the run stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from posttrain.checks.judging.rejudge import GOLD, RejudgedAnswers
from posttrain.config.env import Env, Reward
from posttrain.core.ports import Attempt, Talk
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.gallery.calculator import CalculatorEnv
from posttrain.environment.make import environment
from posttrain.system.errors import InvariantError


@dataclass(frozen=True, kw_only=True)
class Moody(Arithmetic):
    """Judges as its mood says."""

    mood: dict[str, Any] = field(default_factory=dict)

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        self.mood["asked"] = self.mood.get("asked", 0) + 1
        if self.mood.get("down"):
            return (Judged(self.name, 1.0, Verdict.failed("timeout", "no answer")),)
        paid = self.mood["pays"].pop(0) if self.mood.get("pays") else self.mood.get("pay", 1.0)
        return (Judged(self.name, 1.0, Verdict.value(paid * (self.verify(attempt).score or 0.0))),)


async def begun(env: Any) -> RejudgedAnswers:
    judges = RejudgedAnswers()
    await judges.begin(env, 0)
    return judges


@pytest.mark.parametrize("heldout", [20, 0], ids=["held-out", "nothing held out"])
async def test_right_answers_that_never_scored_1_stop_the_run_before_its_first_step(heldout: int) -> None:
    with pytest.raises(InvariantError, match=r"does not score 1 before the first step: moody 0.5|arithmetic 0.5"):
        await begun(Moody(heldout_count=heldout, mood={"pay": 0.5}))


async def test_right_answers_that_score_1_no_more_stop_it_later() -> None:
    env = Moody(heldout_count=20)
    judges = await begun(env)
    assert env.mood["asked"] == GOLD and await judges.after(env, []) == ()
    env.mood["pay"] = 0.0
    with pytest.raises(InvariantError, match=r"does not score 1 any more: arithmetic 0"):
        await judges.after(env, [])


async def test_one_slip_is_asked_again_and_an_outage_is_no_wrong_answer() -> None:
    env = Moody(heldout_count=20)
    judges = await begun(env)
    env.mood["pays"] = [0.0]
    assert await judges.after(env, []) == ()
    env.mood["down"] = True
    assert await judges.after(env, []) == ()
    assert (await begun(Moody(heldout_count=20, mood={"down": True})))._gold, (
        "an outage at the start stops nothing either"
    )


@dataclass(frozen=True, kw_only=True)
class Counter(CalculatorEnv):
    """A calculator whose key breaks."""

    mood: dict[str, str] = field(default_factory=dict)

    async def play(self, task: Task, talk: Talk) -> Stop:
        if self.mood.get("breaks") == "raises":
            raise ConnectionError("no calculator")
        return await super().play(task, talk)

    def verify(self, attempt: Attempt) -> Verdict:
        return (
            Verdict.value(0.0, "tool", "the tool is gone")
            if self.mood.get("breaks") == "lies"
            else super().verify(attempt)
        )


async def test_the_right_answer_is_played_anew_through_its_world() -> None:
    env = Counter(heldout_count=20)
    judges = await begun(env)
    assert await judges.after(env, []) == ()
    env.mood["breaks"] = "raises"
    (note,) = await judges.after(env, [])
    assert note.startswith("rule gold_unplayed:") and "no calculator" in note
    env.mood["breaks"] = "lies"
    with pytest.raises(InvariantError, match="the tool is gone"):
        await judges.after(env, [])


async def test_nothing_is_demanded_where_nobody_vouches(tmp_path: Any) -> None:
    """A user's reward may pay a bare answer nothing, or more than 1; it only has to say so again."""
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(9)))
    (tmp_path / "mine.py").write_text("def reward(task, text):\n    return 3.0 * len(text)\n")
    env = environment(
        Env(
            name="prompts",
            prompts=str(tmp_path / "mine.jsonl"),
            rewards=(Reward(function=f"{tmp_path / 'mine.py'}:reward"),),
        ),
        0,
    )
    judges = await begun(env)
    assert judges._gold and await judges.after(env, []) == ()
