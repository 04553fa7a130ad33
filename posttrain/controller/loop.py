"""The loop: a bounded queue between asking and learning. How far asking may run ahead is all that topologies differ in.

consumes   `ask(index)`
waits for  learning of step i - 1 - bound before step i is asked
produces   what was asked for each step, in order
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def loop(
    ask: Callable[[int], Awaitable[T]], *, first: int, last: int, bound: int = 0
) -> AsyncGenerator[tuple[int, T]]:
    """The steps `first` to `last` in order, each with what was asked for it. Whoever iterates learns from it before the
    next one.

    Step i is asked once step i - 1 - bound is learned: with bound 0 that is ask, learn, ask, learn, one after the
    other; with bound 1 the next step is asked while this one is learned. What is asked when is a function of steps,
    never of time. What was asked and is not wanted any more is given up (`contextlib.aclosing`); so it is where
    something raises.
    """
    asked: deque[asyncio.Task[T]] = deque()
    due = first
    try:
        for index in range(first, last + 1):
            while due <= min(last, index + bound):
                asked.append(asyncio.ensure_future(_held(ask, due)))
                due += 1
            yield index, await asked.popleft()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _held(ask: Callable[[int], Awaitable[T]], index: int) -> T:
    return await ask(index)
