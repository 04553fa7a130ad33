"""A policy with scripted turns. Tests, checks and examples give it to an environment instead of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from posttrain.core.ports import Attempt, Environment, Utterance
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.verifier.timed_calls import contained


class ScriptEnded(IndexError):
    """The environment asks for more turns than the script has."""


class ScriptedPolicy:
    """A `Talk` whose policy says `turns` in order. `stop` is the stop reason of all turns, or one for each turn.

    `seen` holds what the environment showed. `seats` has the turns of the other seats, by name. ScriptEnded if the
    environment asks for more turns than the script has.
    """

    format: str | None = "hermes"
    """The format in which its turns write tool calls, in episodes of messages (`Seat.format`)."""

    def __init__(
        self,
        turns: Sequence[str],
        stop: Stop | Sequence[Stop] = Stop.SAID,
        seats: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.others = {name: ScriptedPolicy(said) for name, said in seats.items()}
        self._turns = tuple(turns)
        self._stops = (stop,) * len(self._turns) if isinstance(stop, Stop) else tuple(stop)
        self.seen: list[str | tuple[Message, ...]] = []
        self.said: list[str] = []
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.paid: list[Judged] = []
        self.state: Any = None

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tuple(tools) or self.tools
        self.seen.append(content if isinstance(content, str) else tuple(content))

    async def say(self, most: int | None = None) -> Utterance:
        """The next turn. It is cut after `most` characters, because a character counts as a token."""
        turn = len(self.said)
        if turn == len(self._turns):
            raise ScriptEnded(f"the environment asked for turn {turn + 1}, but the script has {turn}")
        text = self._turns[turn][:most]
        self.said.append(text)
        return Utterance(text, self._stops[turn] if len(text) == len(self._turns[turn]) else Stop.LENGTH, len(text))

    def seat(self, name: str) -> ScriptedPolicy:
        return self.others.setdefault(name, ScriptedPolicy(()))

    def pay(self, source: str, score: float) -> None:
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=sum(map(len, self.said)), paid=True))

    def leave(self, state: Any) -> None:
        self.state = state


async def attempt(
    env: Environment, task: Task, turns: Sequence[str], stop: Stop | Sequence[Stop] = Stop.SAID
) -> Attempt:
    """Play one scripted episode. Turns that the environment does not ask for are not used."""
    return (await _played(env, task, turns, stop))[0]


async def judged(env: Environment, task: Task, turns: Sequence[str]) -> tuple[Judged, ...]:
    """Play and judge one scripted episode. The verdicts include the rewards that it was paid during play."""
    played, talk = await _played(env, task, turns, Stop.SAID)
    return (*await env.judge(played), *talk.paid)


async def _played(
    env: Environment, task: Task, turns: Sequence[str], stop: Stop | Sequence[Stop]
) -> tuple[Attempt, ScriptedPolicy]:
    """The attempt of one scripted episode, and the policy that played it."""
    other_seats = env.abilities.seats
    # The other seats give right answers, so that the score depends only on the tested turns.
    talk = ScriptedPolicy(turns, stop, {} if other_seats is None else other_seats(task))
    # `play` may be the user's code. If it raises SystemExit, that must not end this program.
    ended = await contained(env.play(task, talk))
    return Attempt(task, tuple(talk.said), ended, int, talk.state), talk  # in a script a character counts as a token
