"""Coroutines side by side: the first error cancels the rest and is raised as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; returns the results in the order of `work`. The first error cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except* Exception as many:
        raise _first(many) from None
    return [t.result() for t in tasks]


async def settled(work: Sequence[Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run all until `count` have ended and cancel the rest. Returns their results in the order of `work`. An error is
    raised as it is."""
    if count >= len(work):
        return await together(work)
    tasks = [asyncio.ensure_future(w) for w in work]
    ended: list[int] = []
    try:
        while len(ended) < count:
            running = [t for i, t in enumerate(tasks) if i not in ended]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for t in done:
                t.result()
            ended += [i for i, t in enumerate(tasks) if t.done() and i not in ended]
        return [tasks[i].result() for i in sorted(ended[:count])]
    finally:
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(many: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception that is no group, inside nested exception groups."""
    cause: BaseException = many
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
