"""Supervision of the run's own processes: engines, and environments. Any of them may die at any time.

A dead process is replaced, and one that gives no sign of life is ended first. Where a wait takes too long, the pool is
lost: everybody who waits is told who waits for what.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from posttrain.core.exchange.role_status import RoleRow
from posttrain.engine.pool.parent_side import EngineDied, EngineHost, NewHost
from posttrain.engine.pool.pool_waits import WaitList, attended, briefly, in_thread
from posttrain.engine.pool.worker_side import EngineReport
from posttrain.system.errors import EngineError

WATCH_EVERY = 1.0
"""Seconds between two looks at who waits."""
SILENT = 0.1
"""Share of the time-out after which a process without any sign of life is replaced."""


class GivenWork(Protocol):
    """Work of a process. `since`: when it was given to it."""

    since: float


W = TypeVar("W", bound=GivenWork)


@dataclass(eq=False)
class SupervisedProcess(ABC, Generic[W]):
    """One place of a pool: the process that is there now, and what it works at."""

    name: str
    host: EngineHost
    _: KW_ONLY
    held: dict[W, None] = field(default_factory=dict[W, None], init=False)
    """Its work that has not ended, in the order in which it was given (a dictionary as an ordered set)."""
    restarts: int = 0
    starting: asyncio.Task[None] | None = None
    _sign: tuple[Future[Any], float] | None = field(default=None, init=False)
    """The last question for a sign of life, and when it was asked."""

    @abstractmethod
    def row(self) -> RoleRow:
        """Returns what the process does now. It may be called from any thread."""

    @property
    def replacing(self) -> bool:
        """True while a new process starts in its place."""
        return self.starting is not None and not self.starting.done()

    @property
    def ready(self) -> bool:
        """True where the process can be given work."""
        return not self.host.died and not self.replacing

    def age(self) -> float | None:
        """Seconds since the oldest work that it holds was given to it; None where it holds none."""
        times = [work.since for work in list(self.held)]
        return time.monotonic() - min(times) if times else None

    def silent(self) -> float:
        """Seconds for which a question for a sign of life is open; asks one where none is. 0 while it cannot answer."""
        if not self.ready:
            return 0.0
        # A process answers whenever its event loop runs, so a long silence is the age of the question that is open.
        if self._sign is None or self._sign[0].done():
            self._sign = self.host.call("report"), time.monotonic()
        return time.monotonic() - self._sign[1]

    def begin(self, host: EngineHost) -> None:
        """A new process takes the place of the dead one."""
        self.host, self.restarts, self._sign = host, self.restarts + 1, None

    def forget_loop(self) -> None:
        """Forget work and questions: the event loop that used them has ended."""
        self.held, self.starting, self._sign = {}, None, None


P = TypeVar("P", bound=SupervisedProcess[Any])


class SupervisedProcesses(Generic[P]):
    """Watches processes and replaces those that die.

    Args:
        new: begins a process in the place of the one with that number.
        words: what the processes are, and what becomes of the work of a dead one, for messages.
        timeout: seconds that a wait may take.
        starts: new processes in a row that may die while they start.
    """

    def __init__(
        self,
        processes: Sequence[P],
        new: NewHost,
        words: tuple[str, str],
        *,
        timeout: float,
        starts: int,
        say: Callable[[str], None],
    ) -> None:
        self.processes, self._new, self._words, self._starts, self._say = processes, new, words, starts, say
        self._besides = list[P]()
        """Processes that are watched but not replaced."""
        self._waits = WaitList(timeout)
        self._report_of_dead, self._new_deaths = EngineReport(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    def rows(self) -> list[RoleRow]:
        """Returns what each process does now. Any thread may call it."""
        return [process.row() for process in self.processes]

    def close(self) -> None:
        for process in self._everyone():
            process.host.close()

    def _everyone(self) -> list[P]:
        return [*self.processes, *self._besides]

    def _take_report(self) -> EngineReport:
        """What all processes counted since the last call, with what dead ones had counted."""
        report, self._report_of_dead = self._report_of_dead, EngineReport()
        return sum((process.host.take_report() for process in self.processes), report)

    def _take_deaths(self) -> float:
        """The number of processes that died since the last call."""
        dead, self._new_deaths = self._new_deaths, 0
        return float(dead)

    def _revive(self) -> None:
        """Begin to replace every process that has died."""
        for number, process in enumerate(self.processes):
            if process.host.died and not process.replacing:
                process.starting = attended(self._restart(number, process), self._waits.lose)

    async def _restart(self, number: int, process: P) -> None:
        """A new process in the place of a dead one."""
        name = process.name
        # At 0 `tries_left` the pool is lost.
        for tries_left in reversed(range(self._starts)):
            # What the dead process had counted stays in the measurements.
            self._new_deaths += 1
            self._report_of_dead = self._report_of_dead + process.host.take_report()
            self._say(f"{name} died: {process.host.died}\n{self._words[1]}")
            # Ends and starts of processes block, so threads do them; the loop goes on with the other processes.
            await self._waits.until(in_thread(process.host.close), "the run", f"the end of {name}")
            host, started = await self._waits.until(in_thread(self._new, number), "the run", f"a new {name}")
            try:
                await self._waits.until(started, "the run", f"the start of a new {name}")
                await self._prepare(process, host)
                process.begin(host)  # only now it counts as ready
                break
            except EngineDied as death:
                # The dead new process takes the place of the dead old one: the next try tells of it and ends it.
                process.host = host
                if not tries_left:
                    self._waits.lose(EngineError(f"{name} dies whenever it is started anew: {death}"))
            finally:
                # After any other exception only this call knows the new process.
                if process.host is not host:
                    await self._waits.until(in_thread(host.close), "the run", f"the end of a new {name}")
        self._waits.notify()

    async def _prepare(self, process: P, host: EngineHost) -> None:
        """Give a new process what it needs before it can work in the place of `process`."""

    def _attend(self) -> None:
        """Begin to watch in the loop of now. What an earlier loop left is forgotten."""
        self._waits.check()
        # A run may ask from one event loop after the other. What belongs to an earlier loop cannot be waited for here.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._besides, self._watching = loop, [], None
            self._waits.begin()
            self._forget_loop()
        if self._watching is None or self._watching.done():
            self._watching = attended(self._watch(), self._waits.lose)

    def _forget_loop(self) -> None:
        for process in self.processes:
            process.forget_loop()

    def _excused(self) -> Iterable[object]:
        """Owners whose processes are not at fault for a long wait, since these wait for somebody else now."""
        return ()

    async def _watch(self) -> None:
        """While somebody waits: end processes without a sign of life, and stop where a wait takes too long."""
        await asyncio.sleep(0)  # whoever started the watch has not registered its wait yet
        while self._waits or any(process.held for process in self._everyone()):
            timeout = self._waits.timeout
            for process in self._everyone():
                if (silent := process.silent()) > SILENT * timeout:
                    why = f"it gave no sign of life for {silent:.0f} s and was ended (placement.timeout)"
                    await briefly(in_thread(process.host.kill, why), WATCH_EVERY)  # Ray may take long, or never answer
            self._waits.begin_anew(self._excused())
            if stalled := self._waits.look(WATCH_EVERY):
                raise EngineError(
                    f"{self._words[0]} have stalled: nothing may take more than {timeout:g} s (placement.timeout)\n"
                    f"{stalled}\n" + "\n".join(process.row().line() for process in self._everyone())
                )
            await asyncio.sleep(WATCH_EVERY)
