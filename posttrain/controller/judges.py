"""Whether the judges can be believed: right answers score what they scored, and an answer judged again scores the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.errors import InvariantError
from posttrain.core.ports import Attempt
from posttrain.core.types import Episode, Gauge, Gauges, Group, Stop
from posttrain.core.verdict import Judged, State
from posttrain.environment.script import attempt

GOLD = 8
"""Held-out tasks whose right answers are remembered."""


@dataclass
class Judges:
    """The verdicts of right answers as they were at the start, asked again one at a time, beside one episode of every step."""

    _gold: list[tuple[Attempt, tuple[Judged, ...]]] = field(default_factory=list[tuple[Attempt, tuple[Judged, ...]]])
    _turn: int = 0
    _wavers: bool = False

    async def begin(self, env: Any, turn: int) -> None:
        """Ask for the right answers of some held-out tasks, where the environment knows them and can say them in a script."""
        self._turn = turn
        for task in env.heldout[:GOLD] if hasattr(env, "gold") else ():
            if not getattr(env, "knows_gold", lambda _: True)(task):
                continue
            try:
                said = await attempt(env, task, env.gold(task))
            except IndexError:  # the environment asks for more turns than its right answer has
                continue
            self._gold.append((said, await env.judge(said)))

    async def after(self, env: Any, played: Sequence[Group]) -> tuple[str, ...]:
        """One right answer and one or two episodes of the step, judged again. Returns what is odd but may be meant.

        Raises:
            InvariantError: a verdict changed, and changed for good.
        """
        out: list[str] = []
        if self._gold:
            said, before = self._gold[self._turn % len(self._gold)]
            out += await self.verdicts_repeat(env, said, before, "the right answer")
        for e in _sample([e for g in played for e in g.episodes], self._turn):
            again = Attempt(e.task, _turns(e), e.stop, int, e.state)  # verdicts about steps are not compared, so any border will do
            out += await self.verdicts_repeat(env, again, e.verdicts, "an answer of this step")
        self._turn += 1
        return tuple(out)

    def mute(self, played: Sequence[Group]) -> Gauges:
        """How many sources gave nothing but 0 in this step, although right answers are known, and earned nothing with them either."""
        if not self._gold:
            return {}
        paid = {j.source for _, verdicts in self._gold for j in verdicts if j.verdict.score not in (0.0, None)}
        given = [j for g in played for e in g.episodes for j in e.verdicts if j.verdict.score is not None]
        sources = {j.source for j in given}
        return {"canary/mute_sources": Gauge(len(sources - paid - {j.source for j in given if j.verdict.score}), len(sources))}

    async def verdicts_repeat(self, env: Any, said: Attempt, before: Sequence[Judged], what: str) -> list[str]:
        now = await env.judge(said)
        if _same(before, now):
            return []
        if _same(now, await env.judge(said)):
            was, is_ = _shown(before), _shown(now)
            raise InvariantError(
                f"{what} to task {said.task.id!r} ({said.text[-60:]!r}, stop reason {said.stop.value!r}) has verdict {was} in this run, and the environment asked "
                f"again says {is_}. Either the verifier broke and hides it (an outage must raise, or return Verdict.failed: never a score), or verdicts are "
                "changed or reordered after judging. A verdict must depend on task and text alone"
            )
        if self._wavers:
            return []
        self._wavers = True
        return [
            f"rule verifier_wavers: asked twice about {what} to task {said.task.id!r} the verifier said {_shown(before)} and {_shown(now)}. If it is not random on purpose, "
            "an outage may be scored as an answer"
        ]


def _sample(episodes: Sequence[Episode], turn: int) -> list[Episode]:
    """One episode, another at every step, and one that was cut off where there is one; only what its text tells whole."""
    cut = [e for e in episodes if e.stop is Stop.LENGTH]
    chosen = [x[turn % len(x)] for x in (episodes, cut) if x]
    return [e for e in chosen if e.stop is not Stop.ERROR and e.reward is not None and not e.shown and _turns(e)]


def _turns(e: Episode) -> tuple[str, ...]:
    """What was said, turn by turn; empty where line breaks inside a turn leave that open."""
    spoken = sum(int(np.sum(np.diff(s.mask.astype(np.int8), prepend=0) == 1)) for s in e.segments)
    turns = (e.text,) if spoken == 1 else tuple(e.text.split("\n"))
    return turns if len(turns) == spoken else ()


def _same(one: Sequence[Judged], two: Sequence[Judged]) -> bool:
    """Whether all sources that could judge both times gave the same. A weight of 0 makes a source a number to look at, such as a time."""
    scores = [{j.source: j.verdict.score for j in x if j.counts and j.weight and j.verdict.state is not State.FAILED} for x in (one, two)]
    both = scores[0].keys() & scores[1].keys()
    return all(_equal(scores[0][s], scores[1][s]) for s in both)


def _equal(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else abs(a - b) <= 1e-9 * max(1.0, abs(a))


def _shown(verdicts: Sequence[Judged]) -> str:
    return ", ".join(f"{j.source} {j.verdict.state.value if j.verdict.score is None else format(j.verdict.score, 'g')}" for j in verdicts)
