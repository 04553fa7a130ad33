"""Coroutines side by side (the first error cancels the rest), and an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; returns the results in the order of `work`. The first error cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except* Exception as errors:
        # Only errors are unpacked. An interrupt or a cancellation keeps its own way out of the group.
        raise _first(errors) from None
    return [t.result() for t in tasks]


async def settled(work: Sequence[Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run all until `count` have ended and cancel the rest. Returns their results in the order of `work`.

    An error is raised as it is.
    """
    if count >= len(work):
        return await together(work)
    tasks = [asyncio.ensure_future(w) for w in work]
    ended: list[int] = []
    try:
        while len(ended) < count:
            running = [t for i, t in enumerate(tasks) if i not in ended]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for t in done:
                # Only to raise what the task raised.
                t.result()
            # In the order of `work`, and not of the set `done`, whose order is random: so if several tasks end at once,
            # the same ones are taken each time.
            ended += [i for i, t in enumerate(tasks) if t.done() and i not in ended]
        return [tasks[i].result() for i in sorted(ended[:count])]
    finally:
        # A cancelled task still runs its own `finally`. It is waited for, so that nothing of it goes on after this.
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception that is no group, inside nested exception groups."""
    cause: BaseException = errors
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


ENDING = 2.0
"""Most seconds for which `close` waits."""


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. A loop that is not closed keeps its selector and its pipe open."""
    try:
        loop.run_forever()
    finally:
        loop.close()


class LoopThread:
    """An event loop in a thread of its own, started when it is first used.

    Work in it does not delay the episodes in the main loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which is run in the thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_and_close, args=(self._loop,), name=self._name, daemon=True).start()
            loop = self._loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Cancel all tasks, then run `last` in the loop, and stop the loop. Waits at most `ENDING` seconds."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return

        async def ended() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if last is not None:
                await last()

        done = asyncio.run_coroutine_threadsafe(ended(), loop)
        # The loop stops itself when all has ended, also where that takes longer than is waited for.
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        wait([done], ENDING)
