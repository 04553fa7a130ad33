"""Equal answers are scored once: within a group no text has two rewards, whoever scores it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment, Stop, Task
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.record import run_reader
from posttrain.role.judging import SiblingVerdicts
from posttrain.verifier.user_functions import source
from tests.engine.run_parts import mine, play

TASK = Task("t", "1+1=", "2")


def said(*ids: int, seen: int = 3) -> Segment:
    """A segment of one prompt token and these spoken ones."""
    n = 1 + len(ids)
    mask = np.array([False, *[True] * len(ids)])
    logp, version = np.full(n, np.nan, np.float32), np.full(n, -1, np.int32)
    logp[1:], version[1:] = -1.0, 0
    return Segment(np.array([seen, *ids], np.int32), mask, logp, version, Sampling(max_tokens=9, stop_ids=(0,)))


class Counting:
    """A reward of (task, text) that gives another number at every call."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, task: Task, text: str) -> float:
        return float(next(self.calls))


def bench() -> SiblingVerdicts:
    return SiblingVerdicts(replace(Arithmetic(), rewards=(source(Counting(), name="count"),)))


async def ask(b: SiblingVerdicts, *asked: tuple[Attempt, Segment]) -> list[float]:
    """What the wavering source says of each, all asked at once."""
    found = await asyncio.gather(*(b.judge(attempt, (segment,)) for attempt, segment in asked))
    await b.close()
    return [next(j.verdict.score for j in verdicts if j.source == "count") or 0.0 for verdicts in found]


async def test_the_same_tokens_share_one_verdict() -> None:
    """Other tokens that read the same, another stop reason and another prompt are other answers."""
    one = Attempt(TASK, ("2",), Stop.SAID)
    same = await ask(bench(), (one, said(5, 0)), (one, said(5, 0)), (one, said(5, 0)))
    assert len(set(same)) == 1
    other = [
        (one, said(5, 0)),
        (one, said(6, 0)),
        (replace(one, stop=Stop.LENGTH), said(5, 0)),
        (one, said(5, 0, seen=4)),
    ]
    assert len(set(await ask(bench(), *other))) == 4


async def test_a_world_with_a_state_is_judged_by_itself() -> None:
    """What a state stands for may differ where the tokens do not: two orders in a database are two."""
    one = Attempt(TASK, ("2",), Stop.SAID, state={"orders": 1})
    assert len(set(await ask(bench(), (one, said(5, 0)), (one, said(5, 0))))) == 2


async def test_a_sibling_that_is_given_up_takes_no_verdict_along() -> None:
    """The first to ask is cancelled; the second still gets the verdict, of the one call that was made."""
    asked, go = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    async def slow(task: Task, text: str) -> float:
        calls.append(text)
        asked.set()
        await go.wait()
        return 0.5

    b = SiblingVerdicts(replace(Arithmetic(), rewards=(source(slow, name="slow"),)))
    attempt = Attempt(TASK, ("2",), Stop.SAID)
    first = asyncio.ensure_future(b.judge(attempt, (said(5, 0),)))
    await asked.wait()
    second = asyncio.ensure_future(b.judge(attempt, (said(5, 0),)))
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    assert [j.verdict.score for j in await second] == [1.0, 0.5]
    assert calls == ["2"] and first.cancelled()
    await b.close()


async def test_closing_ends_what_nobody_waits_for() -> None:
    """A group that is cancelled leaves no judge behind."""
    ended = asyncio.Event()

    async def forever(task: Task, text: str) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 0.0

    b = SiblingVerdicts(replace(Arithmetic(), rewards=(source(forever, name="forever"),)))
    waiting = asyncio.ensure_future(b.judge(Attempt(TASK, ("2",), Stop.SAID), (said(5, 0),)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await b.close()
    assert ended.is_set()


RANDOM = "import random\n\ndef reward(task, text):\n    return random.random()\n"


def small_run(folder: Path, reward: str, *words: str) -> Path:
    """A run with a reward of one's own; `words` take the place of those that `mine` says."""
    own = [w for w in mine(folder, reward=reward) if w.split("=")[0] not in {x.split("=")[0] for x in words}]
    return play(folder / "run", *own, *words)


@pytest.mark.prove
@pytest.mark.parametrize("words", [(), ("rl.oversample=2",)])
def test_a_reward_that_rolls_dice_gives_one_text_one_reward(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In a whole run: siblings with the same tokens have the same reward to the last bit, and others have their own."""
    folder = small_run(tmp_path, RANDOM, "rl.sampling.max_tokens=1", "rl.siblings=24", "rl.steps=2", *words)
    said, alike, distinct = 0, 0, 0
    for row in run_reader.episode_files(folder):
        groups: dict[tuple[str, int], dict[tuple[bytes, str], set[float | None]]] = {}
        for r in run_reader.read_episodes(row.path):
            e = r.episode
            said += 1
            rewards = groups.setdefault((e.task.id, e.visit), {})
            rewards.setdefault((e.segments[0].ids.tobytes(), e.stop.value), set()).add(e.reward)
        for found in groups.values():
            assert all(len(x) == 1 for x in found.values())
            distinct += len({min(x) for x in found.values() if None not in x}) == len(found)
            alike += len(found)
    assert said > alike and distinct


ROUNDED = "def reward(task, text):\n    return .3 if len(text) % 2 else .1 + .2\n"


@pytest.mark.prove
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "dr_grpo"])
def test_rewards_equal_up_to_rounding_stop_no_run(tmp_path: Path, algorithm: str) -> None:
    """The second opinion agrees that they carry no credit; where the filter turns every group away, that is said."""
    folder = small_run(tmp_path, ROUNDED, f"algorithm={algorithm}", "rl.steps=2", "rl.siblings=4")
    for step in run_reader.steps(folder):
        assert step.gauges["rollout/mixed"].mean == 0 and step.gauges["credit/advantage_abs"].sum == 0
        assert any("no group has spread" in n or "groups passed the filter" in n for n in step.notes), step.notes
