"""Work that a policy asked for, in threads that take turns: nobody's work runs out of its own time because of
another's.

Every job has a thread of its own while it runs. Few run at once, and who has used least processor time goes first, so
that a short one never waits for the end of a long one. What a job may take is its own processor time: waiting for a
turn, or for a processor that others are using, costs it nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

SLICE = 0.02
"""Seconds of processor time after which a job that works on lets others go first."""
AT_ONCE = min(8, max(2, os.cpu_count() or 1))


class FairQueue:
    """Who runs now, and who waits for it."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = at_once
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, Future[None]]] = []
        self._number = itertools.count()

    @property
    def crowded(self) -> bool:
        return bool(self._waiting)

    def ask(self, used: float) -> Future[None]:
        """Done when it is the turn of who asks. `used`: processor time so far. Cancelled, it never is; done, `leave`
        has to follow."""
        turn: Future[None] = Future()
        with self._lock:
            heapq.heappush(self._waiting, (used, next(self._number), turn))
        self._next()
        return turn

    def leave(self) -> None:
        """A turn is over."""
        with self._lock:
            self._free += 1
        self._next()

    def _next(self) -> None:
        """Give free turns to those who wait; outside the lock, since their callbacks may do anything."""
        while True:
            with self._lock:
                if not self._free or not self._waiting:
                    return
                _, _, turn = heapq.heappop(self._waiting)
                if not turn.set_running_or_notify_cancel():
                    continue
                self._free -= 1
            turn.set_result(None)


class QueuedWork:
    """One piece of work. It calls `tick` every so often, and ends where that is true.

    Args:
        work: what to do. Never begun where the job is stopped before.
        interrupt: ends it sooner than the next `tick`, from another thread.
    """

    def __init__(self, line: FairQueue, work: Callable[[], Any], interrupt: Callable[[], None]) -> None:
        self._line, self._work, self._interrupt = line, work, interrupt
        self._lock = threading.Lock()
        self._turn: Future[None] | None = None
        """Of a job that lets others go first: what it waits for."""
        self._holds = False
        self._thread: int | None = None
        self._used = self._yielded = 0.0
        self._ended = False
        self.stopped = False
        """Before its end: what it would still have done it did not do."""
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """What came of it, or of its end."""
        self.done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def run(self, seconds: float) -> Any:
        """Do it: what `work` returned, or raised. After `seconds` of its own processor time it is stopped; it has
        really ended when this returns, so that whoever reads `stopped` beside its result knows what it did. Cancelled,
        it is stopped as well, and ends soon.
        """
        await self._begun()
        try:
            while not self.done.done():
                if (left := seconds - self.used()) <= 0:
                    self.stop()
                await asyncio.wait([self.done], timeout=None if left <= 0 else max(left, 0.005))
        except asyncio.CancelledError:
            self.stop()
            raise
        return self.done.result()

    async def _begun(self) -> None:
        """Wait for the turn and start the thread."""
        turn = self._line.ask(0.0)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            self.done.cancel()
            if not turn.cancel():  # it had just come
                self._line.leave()
            raise
        self._holds = True
        try:
            # `Thread.start` would wait until it runs, and the loop with it
            start_new_thread(self._body, (asyncio.get_running_loop(),))
        except BaseException:
            self.done.cancel()
            self._line.leave()
            raise

    def used(self) -> float:
        """Seconds of processor time so far; where a thread cannot be asked for them, those up to its last `tick`."""
        with self._lock:
            if self._thread is not None and hasattr(time, "pthread_getcpuclockid"):
                self._used = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
            return self._used

    def stop(self) -> None:
        """Let it end, or never begin. Its turn is free at once, since the end can take a while. After its end this does
        nothing."""
        with self._lock:
            if self._ended:
                return
            self.stopped = True
            held, self._holds = self._holds, False
            if self._turn is not None:
                self._turn.cancel()
            if self._thread is not None:
                self._interrupt()
        if held:
            self._line.leave()

    def tick(self) -> bool:
        """Whether the work has to end; called by it in its own thread. Where others wait, this lets them go first for a
        while."""
        self._used = time.thread_time()
        if self.stopped or not self._line.crowded or self._used - self._yielded < SLICE:
            return self.stopped
        with self._lock:
            if self.stopped:
                return True
            self._turn, self._holds = self._line.ask(self._used), False
        self._line.leave()
        with contextlib.suppress(CancelledError):
            self._turn.result()
            self._holds = True
        with self._lock:
            self._turn, self._yielded = None, self._used
            return self.stopped

    def _body(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread."""
        result, error = None, None
        with self._lock:
            self._thread = threading.get_ident()
        try:
            if self.stopped:
                raise InterruptedError("stopped before it began")
            result = self._work()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._thread, self._ended = None, True
            held, self._holds = self._holds, False
        if held:
            self._line.leave()
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(error)
