"""Runs a coroutine to its end from ordinary code, also where an event loop is already running (notebooks).

There the work runs in a second thread, and the first one waits. An interrupt of the kernel reaches only the first
thread, so it is passed on: the run finishes its step, writes a checkpoint and ends. A second interrupt ends it at once.
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
    """Run a coroutine to its end. `stopper` is told where an interrupt should let it end by itself."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A loop is running in this thread, and loops do not nest: the work gets a loop and a thread of its own.
    box: list[Any] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
        loops.append((asyncio.get_running_loop(), task))
        return await task

    done = threading.Event()  # an interrupted Thread.join takes the thread for ended in some versions of Python

    def body() -> None:
        try:
            box.append((True, asyncio.run(main())))
        except BaseException as error:
            # All of them, KeyboardInterrupt and SystemExit too: they are raised again in the thread that waits.
            box.append((False, error))
        finally:
            done.set()

    # the context tells a notebook's kernel to which cell the output of the thread belongs
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(body,), name="posttrain")
    thread.start()
    _watch(done, stopper, loops)
    thread.join()
    ok, value = box[0]
    if not ok:
        # The second interrupt cancels the work; to the caller it is the interrupt that it was.
        if isinstance(value, asyncio.CancelledError):
            raise KeyboardInterrupt
        raise value
    return value


def _watch(
    done: threading.Event,
    stopper: Stopper | None,
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]],
) -> None:
    """Wait for the end of the work. The first interrupt is told to the stopper, the next one cancels the work."""
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
