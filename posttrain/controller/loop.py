"""The loop: a bounded queue between rollouts and updates.

Synchronous and asynchronous training differ in one number only: by how many steps rollouts may run ahead (`bound`).

consumes   `ask(index)`, which plays the rollouts of step `index`
waits for  the update of step i - 1 - bound before it starts the rollouts of step i
produces   the rollouts of each step, in order
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
    """The steps `first` to `last` in order, each with what `ask` returned for it.

    The caller learns from a step before it takes the next one. The rollouts of step i start once step i - 1 - bound is
    learned. With bound 0, rollouts and updates alternate. With bound 1, the rollouts of the next step are played during
    the update of this one. Which rollouts start when depends on step numbers only, never on time.

    Rollouts that are no longer wanted are cancelled: when something raises, and when the caller closes the generator
    (`contextlib.aclosing`).
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
