"""Environments in processes of their own. Any of the processes may die at any time.

An episode whose process died is played again from its beginning in another one, against what it had been told before:
turns that were said are not asked again, and what the environment writes must be what it wrote. So nothing is sampled
twice, and an environment that is a function of its task and of what is said ends as if nobody had died. One that writes
something else the second time fails its episode, by name.

An episode may cause a limited number of deaths. When only one is left, it is played in a process that plays nothing
else. If that process dies too, the episode is guilty: it raises `UnanswerableTurn`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.exchange.request_owner import RequestOwner, UnanswerableTurn, asker
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauges
from posttrain.core.ports import Talk, Utterance
from posttrain.core.stop import Stop
from posttrain.core.types import Task
from posttrain.engine.pool.parent_side import EngineDied, EngineHost, NewHost, has_started
from posttrain.engine.pool.pool_waits import WaitList, aside, attended, briefly
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
from posttrain.engine.pool.worker_side import EngineReport
from posttrain.system.errors import EngineError

WATCH_EVERY = 1.0
"""Seconds between two looks at who waits."""
SILENT = 0.1
"""Share of the time-out after which a process without any sign of life is replaced."""
STARTS = 3
"""New processes in a row that may die while they start."""


class PlayedDifferentlyError(Exception):
    """An environment that was played again, because its process had died, did something else than the first time."""


@dataclass(eq=False)
class PlayedElsewhere:
    """One episode, from its first move to its last, by however many processes."""

    task: Task
    talk: Talk
    environment: int
    who: RequestOwner | None
    done: list[Move] = field(default_factory=list[Move])
    """The moves in the conversation so far."""
    said: dict[int, Utterance] = field(default_factory=dict[int, Utterance])
    """Turns that were said, by their number in the episode."""
    turns: dict[int, asyncio.Task[Utterance]] = field(default_factory=dict[int, asyncio.Task[Utterance]])
    """Turns that are being said, by their number in the episode."""
    deaths: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return str(self.who or f"task {self.task.id!r}")

    def does(self, move: Move, told: int) -> None:
        """Do a move to the conversation, unless it was done before. `told` is its number, from 0, in the present play.

        Raises:
            PlayedDifferentlyError: another one was done before.
        """
        # Played again: up to here the conversation has everything already, so the move is compared and not done twice.
        if told < len(self.done):
            if self.done[told] != move:
                raise PlayedDifferentlyError(
                    f"{self}: its process died, and played again the environment did another thing at move {told + 1}"
                    f" ({type(move).__name__} for {type(self.done[told]).__name__}, or with other words). Let what it"
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
class EnvironmentProcess:
    """One place of the pool: the process that is there now, and what it plays."""

    name: str
    host: EngineHost
    episodes: dict[PlayedElsewhere, int] = field(default_factory=dict[PlayedElsewhere, int])
    restarts: int = 0
    starting: asyncio.Task[None] | None = None
    _sign: tuple[Any, float] | None = None

    @property
    def ready(self) -> bool:
        """True where the process can be given episodes."""
        return not self.host.died and (self.starting is None or self.starting.done())

    def silent(self) -> float:
        """Seconds since a question without an answer; asks one where none is open."""
        if not self.ready:
            return 0.0
        if self._sign is None or self._sign[0].done():
            self._sign = self.host.call("report"), time.monotonic()
        return time.monotonic() - self._sign[1]

    def begin(self, host: EngineHost) -> None:
        """A new process takes the place of the dead one."""
        self.host, self.restarts, self._sign = host, self.restarts + 1, None

    def row(self) -> RoleRow:
        """Returns what the process does now. It may be called from any thread."""
        episodes = list(self.episodes)
        return RoleRow(
            name=self.name,
            doing="plays" if episodes else "ready" if self.ready else "starting",
            depth=f"{len(episodes)} episodes",
            age=time.monotonic() - min(e.since for e in episodes) if episodes else None,
            more=f"{self.restarts} restarts",
        )


class EnvironmentPool:
    """Plays episodes in `count` processes.

    Args:
        new: begins a process with the environments of the run.
        timeout: seconds in which an environment must do something, while it waits for no turn.
        deaths: processes that one episode may kill.
        say: tells people what happened to a process.
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
        self._new, self._timeout, self._deaths, self._say = new, timeout, deaths, say
        begun = list[tuple[EngineHost, Any]]()
        try:
            for i in range(count):
                begun.append(new(i))
            for i, (host, started) in enumerate(begun):
                has_started(f"environment {i}", host, started, timeout)
        except BaseException:
            for host, _ in begun:
                host.close()
            raise
        self._processes = [EnvironmentProcess(f"environment {i}", host) for i, (host, _) in enumerate(begun)]
        self._number = 0
        self._dead, self._lost = 0, EngineReport()
        self._waits = WaitList(timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._alone = asyncio.Lock()

    @property
    def processes(self) -> Sequence[EnvironmentProcess]:
        return self._processes

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
        episode = PlayedElsewhere(task, accounted, environment, asker())
        try:
            while True:
                alone = episode.deaths >= self._deaths - 1 > 0
                try:
                    ended = await (self._by_itself(episode, others) if alone else self._among(episode, others))
                    same_account(str(episode), accounted.account(), ended.account)
                    assert ended.stop is not None
                    return ended.stop
                except EngineDied as death:
                    episode.deaths += 1
                    # Only a death that it had alone proves that it was this episode's; with one allowed death the first
                    # one counts.
                    if episode.deaths >= self._deaths and (alone or self._deaths == 1):
                        what = "processes of environments died while they played it"
                        raise UnanswerableTurn(episode.who, episode.deaths, str(death), what) from None
        finally:
            # Turns that are still being said are cancelled and waited for, so that none enters an episode that has
            # ended.
            running = list(episode.turns.values())
            for turn in running:
                turn.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def gauges(self) -> Gauges:
        """Returns the gauges that the environments counted since the last call."""
        report, self._lost = self._lost, EngineReport()
        for process in self._processes:
            report = report + process.host.take_report()
        return report.gauges

    def clock(self) -> Mapping[str, float]:
        """Returns the number of processes that died since the last call."""
        dead, self._dead = self._dead, 0
        return {"environment/deaths": float(dead)}

    def rows(self) -> list[RoleRow]:
        """Returns what each process does now. It may be called from any thread."""
        return [p.row() for p in self._processes]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.host.close()

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def _among(self, episode: PlayedElsewhere, others: bool) -> EndedMove:
        """Play it in the process that plays the fewest."""
        while True:
            self._waits.check()
            self._revive()
            ready = [p for p in self._processes if p.ready]
            if ready:
                process = min(ready, key=lambda p: len(p.episodes))
                return await self._driven(process, episode, others)
            starting = [p.starting for p in self._processes if p.starting is not None and not p.starting.done()]
            await self._waits.until(
                asyncio.ensure_future(asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)),
                episode,
                "a process that plays environments",
            )

    async def _by_itself(self, episode: PlayedElsewhere, others: bool) -> EndedMove:
        """Play it in a process of its own, one such episode after the other."""
        async with self._alone:
            new = aside(self._new, len(self._processes))
            host, started = await self._waits.until(new, episode, "a process of its own")
            try:
                await self._waits.until(asyncio.wrap_future(started), episode, "a process of its own")
                return await self._driven(EnvironmentProcess("environment alone", host), episode, others)
            finally:
                self._lost = self._lost + host.take_report()
                await self._waits.until(aside(host.close), episode, "the end of its own process")

    async def _driven(self, process: EnvironmentProcess, episode: PlayedElsewhere, others: bool) -> EndedMove:
        """Do to the conversation what the process does, until the episode has ended there."""
        self._number += 1
        number, host, moves_done = self._number, process.host, 0
        # There are two kinds of events. The process sends moves (`coming`: one question for them is open at a time),
        # and turns end here. The words of a turn that has ended are sent to the process before its next moves are read.
        coming: asyncio.Future[list[Move]] | None = None
        process.episodes[episode] = number
        try:
            args = (number, episode.environment, episode.task, episode.talk.format, others)
            await self._waits.until(asyncio.wrap_future(host.call("begin", *args)), episode, f"{process.name} to begin")
            while True:
                if coming is None:
                    waits = self._waits.until(asyncio.wrap_future(host.call("moves", number)), episode, process.name)
                    coming = asyncio.ensure_future(waits)
                await asyncio.wait({coming, *episode.turns.values()}, return_when=asyncio.FIRST_COMPLETED)
                for turn, speaking in [(t, s) for t, s in episode.turns.items() if s.done()]:
                    del episode.turns[turn]
                    if not speaking.cancelled():
                        episode.said[turn] = speaking.result()
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
                        return _ended(move)
        finally:
            del process.episodes[episode]
            if coming is not None and not coming.cancel() and not coming.cancelled():
                coming.exception()  # read, so that asyncio does not report it too: another error is raised already
            if not host.died:
                host.call("drop", number)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _revive(self) -> None:
        """Begin to replace every process that has died."""
        for i, process in enumerate(self._processes):
            if process.host.died and (process.starting is None or process.starting.done()):
                process.starting = attended(self._restart(i, process), self._waits.lose)

    async def _restart(self, number: int, process: EnvironmentProcess) -> None:
        """A new process in the place of a dead one."""
        self._dead, self._lost = self._dead + 1, self._lost + process.host.take_report()
        self._say(f"{process.name} died: {process.host.died}\nIts episodes are played again")
        await self._waits.until(aside(process.host.close), "the run", f"the end of {process.name}")
        # `tries_left` is how many more tries there are; at 0 the pool is lost.
        for tries_left in reversed(range(STARTS)):
            host, started = await self._waits.until(aside(self._new, number), "the run", f"a new {process.name}")
            try:
                await self._waits.until(asyncio.wrap_future(started), "the run", f"the start of a new {process.name}")
                process.begin(host)
                return
            except EngineDied as death:
                if not tries_left:
                    self._waits.lose(EngineError(f"{process.name} dies whenever it is started anew: {death}"))
            finally:
                if process.host is not host:
                    await self._waits.until(aside(host.close), "the run", f"the end of a new {process.name}")

    def _attend(self) -> None:
        """Begin to watch in the loop of now. What an earlier loop left is forgotten."""
        self._waits.check()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._watching, self._alone = loop, None, asyncio.Lock()
            self._waits.begin()
            for process in self._processes:
                process.episodes, process.starting = {}, None
        if self._watching is None or self._watching.done():
            self._watching = attended(self._watch(), self._waits.lose)

    async def _watch(self) -> None:
        """While somebody waits: replace processes without a sign of life, and stop where a wait takes too long."""
        await asyncio.sleep(0)
        while self._waits or any(p.episodes for p in self._processes):
            for process in self._processes:
                if (silent := process.silent()) > SILENT * self._timeout:
                    why = f"it gave no sign of life for {silent:.0f} s and was ended (placement.timeout)"
                    await briefly(aside(process.host.kill, why), WATCH_EVERY)
                # An environment that waits for a turn has done nothing wrong; its time begins when the turn has been
                # said.
                self._waits.begin_anew(e for e in process.episodes if e.turns)
            if stalled := self._waits.look(WATCH_EVERY):
                raise EngineError(
                    f"the environments have stalled: nothing may take more than {self._timeout:g} s"
                    f" (placement.timeout)\n{stalled}\n" + "\n".join(p.row().line() for p in self._processes)
                )
            await asyncio.sleep(WATCH_EVERY)


def _ended(move: EndedMove) -> EndedMove:
    """The last move; raises the error with which its episode ended."""
    if move.error is not None:
        raise move.error
    return move


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
