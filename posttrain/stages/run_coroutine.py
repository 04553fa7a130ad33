"""Runs a coroutine to its end from ordinary code, also where an event loop is already running (notebooks).

In a notebook the work runs in a second thread, and the first thread waits. An interrupt (Ctrl-C, or the notebook's stop
button) reaches only the first thread, which passes it on: the run finishes its step, writes a checkpoint and ends. A
second interrupt ends it at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from posttrain.stages.interrupt import Stopper

T = TypeVar("T")


def wait(work: Coroutine[Any, Any, T], stopper: Stopper | None = None) -> T:
    """Run a coroutine to its end; returns its result. `stopper` gets the first interrupt, so that the work ends."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A loop is running in this thread, and loops do not nest: the work gets a loop and a thread of its own.
    outcome: list[Any] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
        loops.append((asyncio.get_running_loop(), task))
        return await task

    # An event, because in some versions of Python an interrupted `Thread.join` believes that the thread has ended.
    done = threading.Event()

    def body() -> None:
        try:
            outcome.append((True, asyncio.run(main())))
        except BaseException as error:
            # Every exception, KeyboardInterrupt and SystemExit too: `wait` raises it again in the first thread.
            outcome.append((False, error))
        finally:
            done.set()

    # A notebook reads from the context to which cell the output of a thread belongs.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(body,), name="posttrain")
    thread.start()
    _watch(done, stopper, loops)
    thread.join()
    ok, value = outcome[0]
    if not ok:
        # The second interrupt has cancelled the work. The caller gets a KeyboardInterrupt, which it was.
        if isinstance(value, asyncio.CancelledError):
            raise KeyboardInterrupt
        raise value
    return value


def _watch(
    done: threading.Event, stopper: Stopper | None, loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]
) -> None:
    """Wait until the work has ended. The first interrupt goes to the stopper; the next one cancels the work."""
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:
            if stopper is not None and not stopper.number:
                stopper.stop(signal.SIGINT)
            else:
                for loop, task in loops:
                    # A task may only be cancelled from the thread of its loop.
                    loop.call_soon_threadsafe(task.cancel)
