"""Environments in processes of their own. Any of the processes may die at any time.

An episode whose process died is played again from its beginning in another one. Turns that were said are not asked
again, and what the environment writes must be what it wrote, or the episode fails by name. So nothing is sampled twice,
and an environment that is a function of its task and of what is said ends as if nobody had died. An episode may cause a
limited number of deaths. With one death left, it is played in a process that plays nothing else. If that dies too, the
episode is guilty: it raises `UnanswerableTurn`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.core.exchange.request_owner import RequestOwner, UnanswerableTurn, asker
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauges
from posttrain.core.ports import Talk, Utterance
from posttrain.core.stop import Stop
from posttrain.core.types import Task
from posttrain.engine.pool.parent_side import EngineDied, NewHost, all_started
from posttrain.engine.pool.pool_waits import in_thread
from posttrain.engine.pool.remote_environment import (
    EndedMove,
    GivenUpMove,
    LeftMove,
    Move,
    PaidMove,
    SeenMove,
    TurnMove,
)
from posttrain.engine.pool.seat_transcript import AccountedTalk, same_account
from posttrain.engine.pool.supervised_processes import SupervisedProcess, SupervisedProcesses

STARTS = 3
"""New processes in a row that may die while they start."""


class PlayedDifferentlyError(Exception):
    """An environment that was played again, because its process had died, did something else than the first time."""


@dataclass(eq=False)
class PlayedElsewhere:
    """One episode, from its first move to its last, by however many processes."""

    task: Task
    talk: Talk
    """The conversation, which stays in this process."""
    environment: int
    others: bool
    """Whether other seats have players of their own."""
    who: RequestOwner | None
    done: list[Move] = field(default_factory=list[Move])
    """The moves that were done to the conversation, in order."""
    said: dict[int, Utterance] = field(default_factory=dict[int, Utterance])
    """Turns that were said, by their number in the episode."""
    turns: dict[int, asyncio.Task[Utterance]] = field(default_factory=dict[int, asyncio.Task[Utterance]])
    """Turns that are being said, by their number in the episode."""
    deaths: int = 0
    """Processes that have died with it."""
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return str(self.who or f"task {self.task.id!r}")

    def does(self, move: Move, index: int) -> None:
        """Do a move to the conversation, unless it was done before. `index` is its number, from 0, in the present play.
        PlayedDifferentlyError where another move was done before."""
        # Played again: up to here the conversation has everything already, so the move is compared and not done twice.
        if index < len(self.done):
            if self.done[index] != move:
                raise PlayedDifferentlyError(
                    f"{self}: its process died, and played again the environment did another thing at move {index + 1}"
                    f" ({type(move).__name__} for {type(self.done[index]).__name__}, or with other words). Let what it"
                    " writes follow from the task and what was said, or set placement.environments=0"
                )
            return
        self.done.append(move)
        match move:
            case SeenMove(seat, content, tools):
                (self.talk if seat is None else self.talk.seat(seat)).see(content, tools)
            case TurnMove(seat, most, number):
                speaker = self.talk if seat is None else self.talk.seat(seat)
                # A task of the episode, and not of the process: a turn goes on while the process is replaced.
                self.turns[number] = asyncio.ensure_future(speaker.say(most))
            case GivenUpMove(number):
                if (turn := self.turns.get(number)) is not None:
                    turn.cancel()
            case PaidMove(source, score):
                self.talk.pay(source, score)
            case LeftMove(state):
                self.talk.leave(state)
            case EndedMove(left=left):
                if left is not None:
                    self.talk.leave(left.state)


@dataclass(eq=False)
class EnvironmentProcess(SupervisedProcess[PlayedElsewhere]):
    """One place of the pool: the process that is there now, and the episodes that it plays."""

    def row(self) -> RoleRow:
        return RoleRow(
            name=self.name,
            doing="plays" if self.held else "ready" if self.ready else "starting",
            depth=f"{len(self.held)} episodes",
            age=self.age(),
            more=f"{self.restarts} restarts",
        )


class EnvironmentPool(SupervisedProcesses[EnvironmentProcess]):
    """Plays episodes in `count` processes.

    Args:
        timeout: seconds in which an environment must do something, while it waits for no turn.
        deaths: processes that one episode may kill.
    """

    def __init__(
        self,
        new: NewHost,
        *,
        count: int,
        timeout: float,
        deaths: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        hosts, _ = all_started("environment", new, count, timeout)
        processes = [EnvironmentProcess(f"environment {i}", host) for i, host in enumerate(hosts)]
        words = "the environments", "Its episodes are played again"
        super().__init__(processes, new, words, timeout=timeout, starts=STARTS, say=say)
        self._deaths, self._number, self._alone = deaths, 0, asyncio.Lock()

    async def play(self, environment: int, task: Task, talk: Talk, others: bool = False) -> Stop:
        """Play one episode of environment number `environment`.

        Args:
            others: whether other seats have players of their own.

        Raises:
            UnanswerableTurn: it has killed as many processes as an episode may. EngineError: nothing moves any more.
            InvariantError: the conversation is not what its environment wrote and heard. Exception: what the
            environment raised.
        """
        self._attend()
        accounted = AccountedTalk(talk)
        episode = PlayedElsewhere(task, accounted, environment, others, asker())
        try:
            while True:
                alone = episode.deaths >= self._deaths - 1 > 0
                try:
                    ended = await (self._play_alone(episode) if alone else self._play_among_others(episode))
                    same_account(str(episode), accounted.accounts(), ended.account)
                    assert ended.stop is not None
                    return ended.stop
                except EngineDied as death:
                    episode.deaths += 1
                    # Only a death that it had alone proves its guilt. With one allowed death the first one counts.
                    if episode.deaths >= self._deaths and (alone or self._deaths == 1):
                        what = "processes of environments died while they played it"
                        raise UnanswerableTurn(episode.who, episode.deaths, str(death), what) from None
        finally:
            # No turn that is still being said may enter an episode that has ended.
            running = list(episode.turns.values())
            for turn in running:
                turn.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def gauges(self) -> Gauges:
        return self._take_report().gauges

    def clock(self) -> Mapping[str, float]:
        return {"environment/deaths": self._take_deaths()}

    async def _play_among_others(self, episode: PlayedElsewhere) -> EndedMove:
        """Play it in the process that plays the fewest."""
        while True:
            self._waits.check()
            self._revive()
            if ready := [p for p in self.processes if p.ready]:
                return await self._drive(min(ready, key=lambda p: len(p.held)), episode)
            await self._waits.change(episode, "a process that plays environments")

    async def _play_alone(self, episode: PlayedElsewhere) -> EndedMove:
        """Play it in a process of its own, one such episode after the other."""
        async with self._alone:
            new = in_thread(self._new, len(self.processes))
            host, started = await self._waits.until(new, episode, "a process of its own")
            process = EnvironmentProcess("environment alone", host)
            try:
                await self._waits.until(started, episode, "a process of its own")
                self._besides.append(process)
                return await self._drive(process, episode)
            finally:
                self._besides = [p for p in self._besides if p is not process]
                self._report_of_dead = self._report_of_dead + host.take_report()
                await self._waits.until(in_thread(host.close), episode, "the end of its own process")

    async def _drive(self, process: EnvironmentProcess, episode: PlayedElsewhere) -> EndedMove:
        """Do to the conversation what the process does, until the episode has ended there."""
        self._number += 1
        number, host, moves_done = self._number, process.host, 0
        # Two kinds of events: moves of the process (`coming`: one question for them is open at a time), and ends of
        # turns, whose words are sent to the process before its next moves are read.
        coming: asyncio.Future[list[Move]] | None = None
        process.held[episode] = None
        try:
            args = (number, episode.environment, episode.task, episode.talk.format, episode.others)
            await self._waits.until(host.call("begin", *args), episode, f"{process.name} to begin")
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(self._waits.until(host.call("moves", number), episode, process.name))
                await asyncio.wait({coming, *episode.turns.values()}, return_when=asyncio.FIRST_COMPLETED)
                for turn, ended in [(n, task) for n, task in episode.turns.items() if task.done()]:
                    del episode.turns[turn]
                    if not ended.cancelled():
                        episode.said[turn] = ended.result()
                        host.call("said", number, turn, episode.said[turn])
                if not coming.done():
                    continue
                moves, coming = coming.result(), None
                for move in moves:
                    episode.does(move, moves_done)
                    moves_done += 1
                    if isinstance(move, TurnMove):
                        # The episode is played again: this turn was said before, so its words are sent at once.
                        if move.number in episode.said:
                            host.call("said", number, move.number, episode.said[move.number])
                        await asyncio.sleep(0)  # the turn begins before what comes after it
                    if isinstance(move, EndedMove):
                        if move.error is not None:
                            raise move.error
                        return move
        finally:
            process.held.pop(episode, None)  # `rest` may have forgotten it
            if coming is not None and not coming.cancel() and not coming.cancelled():
                coming.exception()  # read, so that asyncio does not report it too: another error is raised already
            if not host.died:
                host.call("drop", number)

    def _forget_loop(self) -> None:
        super()._forget_loop()
        self._alone = asyncio.Lock()

    def _excused(self) -> Iterable[object]:
        # An environment that waits for a turn has done nothing wrong; its time begins when the turn has been said.
        return [episode for process in self._everyone() for episode in process.held if episode.turns]


@dataclass(frozen=True)
class EnvironmentPlayer:
    """Plays the episodes of one environment of the run in the pool (`role.rollout.EpisodePlayer`)."""

    pool: EnvironmentPool
    environment: int

    async def play(self, task: Task, talk: Talk, others: bool) -> Stop:
        return await self.pool.play(self.environment, task, talk, others)

    def gauges(self) -> Gauges:
        return self.pool.gauges()

    def clock(self) -> Mapping[str, float]:
        return self.pool.clock()

    def rows(self) -> Sequence[RoleRow]:
        return self.pool.rows()
