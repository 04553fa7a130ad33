"""The learner's side of one engine elsewhere: calls to it, and why it died."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from posttrain.engine.pool.worker_side import EngineFacts, EngineReport
from posttrain.system.errors import EngineError


class EngineDied(Exception):
    """The process of an engine has ended, or was ended because it gave no sign of life. Its words are the cause."""


class EngineHost(ABC):
    """One engine in a process of its own, and the calls to it that wait for an answer. Any thread may use these."""

    pid: int | None = None
    """The process that computes; None before it is known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.died = ""
        """The reason why the engine cannot be asked any more; '' while it can."""
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        """Calls that have no answer yet, by their number."""
        self._number = 0
        self._report = EngineReport()

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the engine (`worker_side.HostedEngine`). The future raises EngineDied where the engine dies
        first. Cancelling the future cancels the call in the engine."""

    @abstractmethod
    def kill(self, why: str) -> None:
        """End it now. `why` becomes the cause of its death."""

    @abstractmethod
    def close(self) -> None:
        """End it and free what it held. A second call does nothing."""

    def take_report(self) -> EngineReport:
        """Returns what the engine counted since the last call."""
        with self._lock:
            # The last reading of the memory stays, because the message about a death names it.
            taken, self._report = self._report, EngineReport(memory=self._report.memory)
        return taken

    def die(self, cause: str) -> None:
        """All open calls raise EngineDied with the first cause that was told."""
        with self._lock:
            self.died = self.died or cause
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(EngineDied(self.died))

    def _begin(self) -> tuple[int, Future[Any]]:
        """A new call: its number and its future. Where the engine is dead, the future raises that at once."""
        future: Future[Any] = Future()
        # Under the lock, so that no call can be opened after `die` has told all open ones.
        with self._lock:
            self._number += 1
            if self.died:
                future.set_exception(EngineDied(self.died))
            else:
                self._open[self._number] = future
            return self._number, future

    def _end(self, number: int, value: Any, error: BaseException | None, report: EngineReport | None) -> None:
        """An answer has come. One of a call that was cancelled meanwhile is dropped."""
        with self._lock:
            if report is not None:
                self._report = self._report + report
            future = self._open.pop(number, None)
        if future is None:
            return
        # Outside the lock: the callbacks of the future run at once in this thread, and may begin another call.
        with suppress(InvalidStateError):
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def _drop(self, number: int) -> None:
        """Nobody waits for this call any more."""
        with self._lock:
            self._open.pop(number, None)

    @property
    def _memory(self) -> str:
        """The last reading of the process's memory, as the end of a message about its death; '' without a reading."""
        memory = self._report.memory
        return f"; its memory was {memory / 2**20:,.0f} MiB at the last reading" if memory else ""


NewHost = Callable[[int], tuple[EngineHost, Future[EngineFacts]]]
"""Begins the engine of that number; the future has its facts when it can sample."""


def all_started(kind: str, new: NewHost, count: int, timeout: float) -> tuple[list[EngineHost], list[EngineFacts]]:
    """Begin `count` processes and wait until each can be asked. If one fails, none is left behind: EngineError with the
    first cause where it ended or took more than `timeout` seconds; an error that it raised is raised as it is."""
    begun, facts = list[tuple[EngineHost, Future[EngineFacts]]](), list[EngineFacts]()
    try:
        # All begin before the first one is waited for, so they start side by side.
        for number in range(count):
            begun.append(new(number))
        for host, started in begun:
            try:
                facts.append(started.result(timeout))
            except TimeoutError:
                if started.done():  # a process that ended with such an error of its own
                    raise
                host.kill(f"it did not start in {timeout:g} s (placement.timeout)")
                raise EngineError(f"{kind} {len(facts)} did not start: {host.died}") from None
            except EngineDied as death:
                raise EngineError(f"{kind} {len(facts)} did not start: {death}") from None
    except BaseException:
        for host, _ in begun:
            host.close()
        raise
    return [host for host, _ in begun], facts
