"""Calls user functions with a timeout. A synchronous one runs in a thread, so it cannot block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

THREADS = 16
"""The most synchronous calls that run at once in an event loop. The timeout of a call begins when it runs, not while it
waits."""

# Each event loop has its own semaphore. The keys are weak, so a semaphore is freed together with its loop.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class TimedOut(Exception):
    """The call did not return in time. A thread cannot be killed, so it may still be running."""


async def call(function: Callable[..., Any], timeout: float, *args: Any, **kwargs: Any) -> Any:
    """Call a sync or async function. Raises what it raises, or `TimedOut` after it has run for `timeout` seconds.

    A sync function runs in a daemon thread of its own. If it hangs, neither the loop nor the next call nor the end of
    the process waits for it. With a shared thread pool they would.
    """
    if is_async(function):
        return await _within(timeout, function(*args, **kwargs))
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS))
    async with slots:
        result = await _within(timeout, _threaded(function, args, kwargs))
    # A plain function may return a coroutine, such as a lambda that calls an async one. To wait for it needs no thread.
    return await _within(timeout, result) if inspect.isawaitable(result) else result


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a call returns a coroutine. Works for functions, partials and objects with `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def contained(awaitable: Any) -> Any:
    """The result of code of the user. An exception that would end the run (SystemExit), or that looks as if the run had
    cancelled the code (CancelledError), becomes `Raised`."""
    try:
        return await awaitable
    except (SystemExit, asyncio.CancelledError) as raised:
        task = asyncio.current_task()
        if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # this call was cancelled, and the code did not raise it of its own
        raise Raised(raised) from raised


async def _within(timeout: float, awaitable: Any) -> Any:
    """The result of an awaitable; `TimedOut` after `timeout` seconds."""
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await contained(awaitable)
    except TimeoutError:
        # A TimeoutError may also be the function's own, which is an error like any other.
        if limit.expired():
            raise TimedOut from None
        raise


def _threaded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
    """A future of this loop for the result of a function in a new thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    # The function sees the variables of the task that called it, as an async function does.
    context = contextvars.copy_context()

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:
            # A future does not accept StopIteration, and a SystemExit in the event loop would end the run.
            storable = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if storable else Raised(raised)
        try:
            loop.call_soon_threadsafe(resolve, future, result, error)
        except RuntimeError:
            return  # the loop closed while a timed-out call was still running, so nothing waits for the result

    threading.Thread(target=work, name=f"call {getattr(function, '__name__', 'function')}", daemon=True).start()
    return future


def resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Sets the outcome of a future, unless nobody waits for it any more."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Raised(Exception):
    """Wraps, as its `__cause__`, an exception that a future cannot hold (SystemExit, StopIteration)."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(repr(cause))
        self.__cause__ = cause
