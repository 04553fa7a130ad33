"""A fair queue for jobs that a policy asked for. A job's time limit does not depend on the other jobs.

Every job has its own thread. Few run at once, and the one that has used the least processor time goes first, so a short
job never waits for the end of a long one. The limit of a job is in its own processor time: waiting does not count.
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

from posttrain.verifier.timed_calls import resolve

SLICE = 0.02
"""Seconds of processor time after which a running job lets waiting jobs go first."""
AT_ONCE = min(8, max(2, os.cpu_count() or 1))
"""How many jobs run at once."""


class FairQueue:
    """Decides which jobs run now and which wait."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = at_once
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, Future[None]]] = []
        self._number = itertools.count()

    @property
    def crowded(self) -> bool:
        return bool(self._waiting)

    def ask(self, used: float) -> Future[None]:
        """A future that is done when the caller may run. `used`: its processor time so far. Once the future is done,
        the caller must call `leave` at the end. A cancelled future never gets a turn."""
        turn: Future[None] = Future()
        with self._lock:
            # The number breaks ties in order of arrival, and futures cannot be compared.
            heapq.heappush(self._waiting, (used, next(self._number), turn))
        self._next()
        return turn

    def leave(self) -> None:
        """End a turn."""
        with self._lock:
            self._free += 1
        self._next()

    def _next(self) -> None:
        """Give free turns to waiting jobs. The futures are set outside the lock, as their callbacks may do anything."""
        while True:
            with self._lock:
                if not self._free or not self._waiting:
                    return
                _, _, turn = heapq.heappop(self._waiting)
                # A cancelled turn is dropped here. Another can no longer be cancelled, so the free place is used.
                if not turn.set_running_or_notify_cancel():
                    continue
                self._free -= 1
            turn.set_result(None)


class QueuedWork:
    """One job. Its work must call `tick` regularly, and end if `tick` returns true.

    Args:
        work: the function to run. It is not called if the job is stopped before.
        interrupt: called from another thread to end the work before its next `tick`.
    """

    def __init__(self, queue: FairQueue, work: Callable[[], Any], interrupt: Callable[[], None]) -> None:
        self._queue, self._work, self._interrupt = queue, work, interrupt
        self._lock = threading.Lock()
        self._turn: Future[None] | None = None
        """The turn that a job waits for after it let others go first."""
        self._holds = False
        """True while this job has a turn of the queue."""
        self._thread: int | None = None
        self._used = self._yielded = 0.0
        """Seconds of processor time so far, and when the job last let others go first."""
        self._ended = False
        self.stopped = False
        """Whether it was stopped before its end, so that its work is incomplete."""
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """The result of the work, or its exception."""
        # asyncio logs an exception that nobody reads, and a cancelled `run` does not read it. So it is read here.
        self.done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def run(self, seconds: float) -> Any:
        """Run the work; returns what it returned or raises what it raised. After `seconds` of its own processor time it
        is stopped. The work has ended when this returns, so that `stopped` is final. If this coroutine is cancelled,
        the work is stopped as well and ends soon after.
        """
        await self._start()
        try:
            while not self.done.done():
                # The wait lasts as long as the remaining time would on an idle processor, and a moment at least. Then
                # the clock is read again, because a job that waited for its turn has used less.
                if (seconds_left := seconds - self.used()) <= 0:
                    self.stop()
                await asyncio.wait([self.done], timeout=None if seconds_left <= 0 else max(seconds_left, 0.005))
        except asyncio.CancelledError:
            self.stop()
            raise
        return self.done.result()

    async def _start(self) -> None:
        """Wait for the turn and start the thread."""
        turn = self._queue.ask(0.0)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            self.done.cancel()
            if not turn.cancel():  # it had just come
                self._queue.leave()
            raise
        self._holds = True
        try:
            # `Thread.start` would block the event loop until the thread runs
            start_new_thread(self._body, (asyncio.get_running_loop(),))
        except BaseException:  # the machine may refuse one more thread
            self.done.cancel()
            self._queue.leave()
            raise

    def used(self) -> float:
        """Seconds of processor time so far. If no other thread can be measured here, those up to its last `tick`."""
        with self._lock:
            if self._thread is not None and hasattr(time, "pthread_getcpuclockid"):
                self._used = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
            return self._used

    def stop(self) -> None:
        """Make the work end, or never begin. Its turn becomes free at once, because the end can take a while. After the
        end this does nothing."""
        with self._lock:
            if self._ended:
                return
            self.stopped = True
            # The thread that sets `_holds` to False, under the lock, gives the place back. So none is given back twice.
            had_turn, self._holds = self._holds, False
            if self._turn is not None:
                self._turn.cancel()
            if self._thread is not None:
                self._interrupt()
        if had_turn:
            self._queue.leave()

    def tick(self) -> bool:
        """Returns whether the work has to end. The work calls this in its own thread; if other jobs wait, it lets them
        go first for a while."""
        self._used = time.thread_time()
        if self.stopped or not self._queue.crowded or self._used - self._yielded < SLICE:
            return self.stopped
        with self._lock:
            if self.stopped:
                return True
            # A new turn is asked for before the place is given back. The queue then compares this job with the waiting
            # ones, and it goes on at once if it has used least.
            self._turn, self._holds = self._queue.ask(self._used), False
        self._queue.leave()
        # If `stop` cancelled the turn, the job has no place to give back, and this `tick` tells it to end.
        with contextlib.suppress(CancelledError):
            self._turn.result()
            self._holds = True
        with self._lock:
            self._turn, self._yielded = None, self._used
            return self.stopped

    def _body(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread of the job: it runs the work, gives its place back, and sets the result in the event loop."""
        result, error = None, None
        with self._lock:
            self._thread = threading.get_ident()
        try:
            if self.stopped:
                raise InterruptedError("stopped before it began")
            result = self._work()
        except BaseException as raised:  # `run` raises it again, whatever it is
            error = raised
        with self._lock:
            self._thread, self._ended = None, True
            had_turn, self._holds = self._holds, False
        if had_turn:
            self._queue.leave()
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            loop.call_soon_threadsafe(resolve, self.done, result, error)
