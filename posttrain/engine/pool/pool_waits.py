"""Records all waits of a pool, each with its owner, its reason and a deadline; and runs work in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Wait:
    """One wait that has not ended."""

    owner: object
    on: str
    future: asyncio.Future[Any]
    since: float
    wrong: Exception | None = None
    """The error that the wait raises, where the pool has ended it."""

    def line(self, now: float) -> str:
        return f"{self.owner} waits for {self.on} since {now - self.since:.0f} s"


@dataclass
class WaitList:
    """All waits of a pool. Each may take `timeout` seconds. Time in which the event loop stood still, because the
    learner computed in it, does not count."""

    timeout: float
    _waits: dict[int, Wait] = field(default_factory=dict[int, Wait])
    _changed: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    _seen: float = 0.0
    """When `look` was called last; 0: never."""
    _lost: Exception | None = None

    def __len__(self) -> int:
        return len(self._waits)

    def owners(self) -> list[object]:
        """Returns the owners that wait. It may be called from any thread."""
        return [wait.owner for wait in list(self._waits.values())]

    async def until(
        self, future: Future[T] | asyncio.Future[T], owner: object, on: str, since: float | None = None
    ) -> T:
        """Wait for the future, of a thread or of the event loop. `since`: when the wait began, if earlier."""
        wait = Wait(owner, on, asyncio.wrap_future(future), time.monotonic() if since is None else since)
        self._waits[id(wait)] = wait
        try:
            return await wait.future
        except asyncio.CancelledError:
            # Two reasons why: the pool is lost, which is an error, or the waiter itself was cancelled.
            if wait.wrong is not None:
                raise wait.wrong from None
            raise
        finally:
            del self._waits[id(wait)]

    async def change(self, owner: object, on: str) -> None:
        """Wait until something has changed (`notify`). Where something changes, nothing has stalled."""
        self._changed.append(asyncio.get_running_loop().create_future())
        await self.until(self._changed[-1], owner, on)

    def notify(self) -> None:
        """Wake all that wait in `change`. Each looks again whether its own condition holds."""
        waiting, self._changed = self._changed, []
        for waiter in [w for w in waiting if not w.done()]:
            waiter.set_result(None)

    def look(self, every: float) -> str:
        """Returns all waits as text where one takes longer than the time-out; else ''. Called every `every` seconds."""
        now = time.monotonic()
        # Late because the loop stood still. Nobody could be answered in that time, so every wait counts as begun that
        # much later. Up to twice the interval is usual.
        late = max(0.0, now - self._seen - 2 * every) if self._seen else 0.0
        self._seen = now
        for wait in self._waits.values():
            wait.since = min(now, wait.since + late)
        # A wait whose future is done only waits for its turn in the loop.
        if not any(now - w.since > self.timeout and not w.future.done() for w in self._waits.values()):
            return ""
        return "\n".join(w.line(now) for w in sorted(self._waits.values(), key=lambda w: w.since))

    def begin_anew(self, owners: Iterable[object]) -> None:
        """Begin the time of these owners' waits anew: what they wait for waits for something else."""
        owner_ids, now = {id(o) for o in owners}, time.monotonic()
        for wait in self._waits.values():
            wait.since = now if id(wait.owner) in owner_ids else wait.since

    def begin(self) -> None:
        """Forget the waits of an earlier event loop."""
        self._waits, self._changed, self._seen = {}, [], 0.0

    def check(self) -> None:
        """Raise the error by which the pool was lost, if it was."""
        if self._lost is not None:
            raise self._lost

    def lose(self, error: Exception) -> None:
        """Every wait raises this error, and from now on `check` raises it too."""
        self._lost = self._lost or error
        for wait in self._waits.values():
            if not wait.future.done():
                # A wait may be for a task, and nobody can set an exception on a task from outside. So the error is
                # left in the wait, and the future is cancelled.
                wait.wrong = self._lost
                wait.future.cancel()


def attended(work: Coroutine[Any, Any, None], lost: Callable[[Exception], None]) -> asyncio.Task[None]:
    """A task in the background. Nobody waits for it, so what it raises is given to `lost`."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            lost(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


def in_thread(function: Callable[..., T], *arguments: Any, **keywords: Any) -> Future[T]:
    """Returns the future of a call that may never return, made by a thread for which the process does not wait."""
    future: Future[T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    # No executor: Python waits for the threads of executors at its end.
    threading.Thread(target=work, name=f"call {function}", daemon=True).start()
    return future


async def briefly(future: Future[Any], seconds: float) -> None:
    """Wait for the future, at most `seconds`. Raises what it raises."""
    ended, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    for task in ended:
        task.result()
