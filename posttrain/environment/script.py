"""A policy that says fixed turns: what tests, proofs and examples hand to an environment instead of a model."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.ports import Attempt, Environment, Utterance
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged


class Script:
    """A `Talk` whose policy says `turns` one after the other, each ending as `stop` says (once for all, or per turn).

    `seen` holds what the environment showed. Asking for a turn beyond the script is an error of the script.
    """

    def __init__(self, turns: Sequence[str], stop: Stop | Sequence[Stop] = Stop.SAID) -> None:
        self._turns = tuple(turns)
        self._stops = (stop,) * len(self._turns) if isinstance(stop, Stop) else tuple(stop)
        self.seen: list[str | tuple[Message, ...]] = []
        self.said: list[str] = []

    def see(self, content: str | Sequence[Message]) -> None:
        self.seen.append(content if isinstance(content, str) else tuple(content))

    async def say(self) -> Utterance:
        turn = len(self.said)
        if turn == len(self._turns):
            raise IndexError(f"the environment asked for turn {turn + 1}, but the script has {turn}")
        self.said.append(self._turns[turn])
        return Utterance(self._turns[turn], self._stops[turn], len(self._turns[turn]))


async def attempt(env: Environment, task: Task, turns: Sequence[str], stop: Stop | Sequence[Stop] = Stop.SAID) -> Attempt:
    """Play one scripted episode; turns the environment did not ask for are left unsaid."""
    talk = Script(turns, stop)
    end = await env.play(task, talk)
    return Attempt(task=task, turns=tuple(talk.said), stop=end, spoken_upto=int)  # a script says a token a character


async def judged(env: Environment, task: Task, turns: Sequence[str]) -> tuple[Judged, ...]:
    """Play and judge one scripted episode."""
    return await env.judge(await attempt(env, task, turns))
