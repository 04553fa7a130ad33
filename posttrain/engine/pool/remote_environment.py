"""What an environment in a process of its own does to a conversation, as messages, and the side that sends them.

The environment plays against a `PlayedTalk`, which writes down what it does. The learner's side (`environment_pool`)
takes the messages in their order, does the same to the real conversation, and sends back what was said.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.gauge import merge
from posttrain.core.ports import Environment, Utterance
from posttrain.core.stop import Stop
from posttrain.core.types import Message, Task
from posttrain.engine.pool.seat_transcript import AccountedTalk, SeatAccount
from posttrain.engine.pool.worker_side import REPORT_EVERY, EngineReport, memory, portable
from posttrain.system.errors import ConfigError
from posttrain.verifier.timed_calls import contained


@dataclass(frozen=True)
class SeenMove:
    """The environment wrote to a seat: `Seat.see`. Seat None is the trained one."""

    seat: str | None
    content: str | tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class TurnMove:
    """A seat is to speak, as turn `number` of the episode, over all seats."""

    seat: str | None
    most: int | None
    number: int


@dataclass(frozen=True)
class GivenUpMove:
    """The environment does not wait for this turn any more."""

    number: int


@dataclass(frozen=True)
class PaidMove:
    """`Talk.pay`."""

    source: str
    score: float


@dataclass(frozen=True)
class LeftMove:
    """`Talk.leave`. Two of them compare as equal whatever their states, because a state may change after it was set."""

    state: Any = field(compare=False)


@dataclass(frozen=True)
class EndedMove:
    """The episode has ended, with a reason or an error. A state that was set is sent as it is now."""

    stop: Stop | None = None
    error: BaseException | None = field(default=None, compare=False)
    left: LeftMove | None = None
    account: Mapping[str | None, SeatAccount] | None = field(default=None, compare=False)
    """Accounts of the seats, from the side where the episode was played."""


Move = SeenMove | TurnMove | GivenUpMove | PaidMove | LeftMove | EndedMove


class PlayedSeat:
    """A `core.ports.Seat` whose speaker is in the learner's process."""

    def __init__(self, talk: PlayedTalk, name: str | None) -> None:
        self._talk, self._name = talk, name

    @property
    def format(self) -> str | None:
        """Known of the trained seat, and of others where the policy plays them; else ConfigError."""
        if self._name is not None and self._talk.others:
            raise ConfigError(
                f"the format of seat {self._name!r} is known in the learner's process only: set"
                " placement.environments=0"
            )
        return self._talk.tool_format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        shown = content if isinstance(content, str) else tuple(content)
        self._talk.tell(SeenMove(self._name, shown, tuple(tools)))

    async def say(self, most: int | None = None) -> Utterance:
        return await self._talk.turn(self._name, most)


class PlayedTalk(PlayedSeat):
    """A `core.ports.Talk` that writes down what an environment does to it.

    Args:
        tool_format: in which the policy writes tool calls: its `Seat.format`.
        others: whether other seats have players of their own.
    """

    def __init__(self, tool_format: str | None, others: bool) -> None:
        super().__init__(self, None)
        self.tool_format, self.others = tool_format, others
        self.moves: list[Move] = []
        """Moves that the learner's side has not fetched yet (`HostedEnvironments.moves`)."""
        self.told = asyncio.Event()  # set while there are any
        self.turns: dict[int, asyncio.Future[Utterance]] = {}
        """Turns that were asked for and have not been said, by their number in the episode."""
        self.playing: asyncio.Task[None] | None = None
        self._count = 0
        self._left: LeftMove | None = None

    def tell(self, move: Move) -> None:
        self.moves.append(move)
        self.told.set()

    async def turn(self, seat: str | None, most: int | None) -> Utterance:
        """Ask the learner's side for a turn of a seat, and wait until it has been said."""
        self._count += 1
        number, coming = self._count, asyncio.get_running_loop().create_future()
        self.turns[number] = coming
        self.tell(TurnMove(seat, most, number))
        try:
            return await coming
        except asyncio.CancelledError:
            # The environment has stopped waiting, by a time limit of its own for instance: nobody would read the turn.
            self.tell(GivenUpMove(number))
            raise
        finally:
            del self.turns[number]

    def seat(self, name: str) -> PlayedSeat:
        return PlayedSeat(self, name)

    def pay(self, source: str, score: float) -> None:
        self.tell(PaidMove(source, score))

    def leave(self, state: Any) -> None:
        """See `core.ports.Talk.leave`. ConfigError where the state cannot be sent to another process."""
        try:
            # Tried here, in the environment's own frame, where the error can name what to change.
            pickle.dumps(state)
        except Exception as error:
            raise ConfigError(
                f"the environment leaves a state that cannot be sent to another process ({type(error).__name__}:"
                f" {error}). Leave plain data, or set placement.environments=0"
            ) from error
        self._left = LeftMove(state)
        self.tell(self._left)

    async def play(self, environment: Environment, task: Task) -> None:
        """Play the episode to its end."""
        accounted = AccountedTalk(self)
        try:
            ended = EndedMove(await contained(environment.play(task, accounted)))
        except Exception as error:
            # An error of the environment ends the episode as it would in one process. An episode that was dropped is
            # cancelled, which is no Exception, and tells nothing.
            ended = EndedMove(error=portable(error))
        # A state is sent again with the end, because the environment may have changed the object after it left it.
        self.tell(EndedMove(ended.stop, ended.error, self._left, accounted.accounts()))


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about a process of environments, told when it has started."""

    pid: int


@dataclass(frozen=True)
class EnvironmentStart:
    """Makes the environments of such a process. It is pickled."""

    environments: Callable[[], Sequence[Environment]]

    def host(self) -> HostedEnvironments:
        return HostedEnvironments(self.environments())


class HostedEnvironments:
    """The environments of one process: what is asked of them by name."""

    def __init__(self, environments: Sequence[Environment]) -> None:
        self._environments = environments
        self._talks: dict[int, PlayedTalk] = {}
        self._reported = time.monotonic()

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, EngineReport | None]:
        """The value of one call, with a report where one is due."""
        value = await getattr(self, method)(*arguments)
        if method != "report" and time.monotonic() - self._reported < REPORT_EVERY:
            return value, None
        self._reported = time.monotonic()
        return value, EngineReport(merge(*(e.gauges() for e in self._environments)), {}, memory())

    async def facts(self) -> EnvironmentFacts:
        return EnvironmentFacts(os.getpid())

    async def begin(self, number: int, environment: int, task: Task, tool_format: str | None, others: bool) -> None:
        """Begin an episode, which is called by this number from now on."""
        talk = self._talks[number] = PlayedTalk(tool_format, others)
        talk.playing = asyncio.create_task(talk.play(self._environments[environment], task))

    async def moves(self, number: int) -> list[Move]:
        """Returns the moves of the episode since the last call; waits until there is one."""
        talk = self._talks[number]
        await talk.told.wait()
        talk.told.clear()
        moves, talk.moves = talk.moves, []
        return moves

    async def said(self, number: int, turn: int, said: Utterance) -> None:
        """A seat has spoken."""
        talk = self._talks.get(number)
        # The turn may have been given up, or the episode dropped, while the words were on their way.
        waiting = talk.turns.get(turn) if talk is not None else None
        if waiting is not None and not waiting.done():
            waiting.set_result(said)

    async def drop(self, number: int) -> None:
        """Nobody asks for this episode any more. One that still plays is cancelled, and cleans up."""
        talk = self._talks.pop(number, None)
        if talk is not None and talk.playing is not None and not talk.playing.done():
            talk.playing.cancel()

    async def report(self) -> None:
        """A sign of life; the report comes with the answer."""
