"""Threads that answer calls, each with a worker of its own: a process that runs untrusted code and can be killed.

Thousands of calls may wait: a call that waits is an entry in a queue. This is no `ThreadPoolExecutor`, because Python
waits at its end for the threads of those, and what a call runs may never end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from typing import Any, Generic, Protocol, TypeVar

LOOK_SECONDS = 30.0
"""Seconds between two looks of an idle thread whether it is still needed."""


class QueuedCall(Protocol):
    """Work for a thread: a call, or a session of several."""

    def begin(self) -> bool:
        """A thread has taken the call. False: it was cancelled while it waited, and is not run."""
        ...

    def refuse(self) -> None:
        """The threads were closed before one had taken the call."""
        ...


C = TypeVar("C", bound=QueuedCall)


class WorkerThreads(Generic[C]):
    """At most `most` threads. They begin when calls need them, and end when they are closed.

    The threads keep this object alive, but not its owner, which closes it when it is garbage-collected itself
    (`weakref.finalize`). For that, neither `work` nor a call may refer to the owner.

    Args:
        name: of the threads.
        work: runs in each thread: answers the calls that the thread gets, with a worker that it begins, and ends the
            worker when no more calls come.
        idle_seconds: seconds without a call after which a thread gets no more; None: it waits until `close`.
    """

    def __init__(
        self, name: str, most: int, work: Callable[[Iterator[C]], None], idle_seconds: float | None = None
    ) -> None:
        self.name, self.most, self.closed = name, most, False
        self.lock = threading.Condition()
        """Held where something is changed that threads share. It is reentrant, because the garbage collector may run
        `close` in a thread that holds it."""
        self.taken = 0
        """Calls that threads have taken so far."""
        self._work, self._idle_seconds, self._owner = work, idle_seconds, os.getpid()
        self.waiting = deque[C]()
        """The calls that no thread has taken."""
        self._threads = dict[threading.Thread, C | None]()
        """Each thread with the call that it answers."""

    @property
    def running(self) -> list[C]:
        """The calls that threads answer now."""
        return [call for call in list(self._threads.values()) if call is not None]

    def put(self, call: C) -> int | None:
        """Queue a call. Returns the number of calls for which no thread is free; None, without the call, if closed."""
        with self.lock:
            if self.closed:
                return None
            free = sum(call is None for call in self._threads.values())
            # Each free thread takes one waiting call. A thread is added only if more calls wait than threads are free.
            unserved = max(0, len(self.waiting) + 1 - free)
            if unserved and len(self._threads) < self.most:
                name = f"{self.name} {len(self._threads)}"
                thread = threading.Thread(target=self._work, args=(self._calls(),), name=name, daemon=True)
                thread.start()
                self._threads[thread] = None
            self.waiting.append(call)
            self.lock.notify()
            return unserved

    def close(self, end: Callable[[C], None] = lambda call: None, wait: bool = False) -> bool:
        """Refuse what waits, and let the threads end.

        Args:
            end: ends a call that a thread answers now. Without it, such a call comes to its end.
            wait: wait until all threads and their workers have ended.

        Returns False, and does nothing, in a forked child, because threads and workers belong to the parent.
        """
        if os.getpid() != self._owner:
            return False
        with self.lock:
            self.closed = True
            waiting, running, threads = list(self.waiting), self.running, list(self._threads)
            self.waiting.clear()
            self.lock.notify_all()
        # Without the lock: answers run the callbacks of a future in this thread, and the threads need the lock to end.
        for call in waiting:
            call.refuse()
        for call in running:
            end(call)
        # The garbage collector may run this in one of these threads. It cannot wait for itself, and not for others
        # either: it may hold the lock, and then they cannot end.
        if wait and threading.current_thread() not in threads:
            for thread in threads:
                thread.join()
        return True

    def _calls(self) -> Iterator[C]:
        """The calls that one thread gets."""
        while (call := self._next()) is not None:
            if call.begin():
                yield call

    def _next(self) -> C | None:
        """The call that has waited longest. None when this thread is not needed any more."""
        me = threading.current_thread()
        with self.lock:
            self._threads[me] = None
            while not self.waiting and not self.closed:
                # With a time limit also where it waits for ever: the garbage collector may have run `close` in this
                # thread just before it waits, and then nobody wakes it.
                if not self.lock.wait(self._idle_seconds or LOOK_SECONDS) and self._idle_seconds is not None:
                    break
            # Under the lock under which `put` counts threads, so that no call waits for a thread that ends.
            if self.closed or not self.waiting:
                del self._threads[me]
                return None
            call = self._threads[me] = self.waiting.popleft()
            self.taken += 1
            return call


def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
    """Set a future's outcome by `set_result` or `set_exception`, unless it was cancelled in between."""
    with contextlib.suppress(InvalidStateError):
        set_outcome(outcome)
