"""Who waits for whom: every wait of a pool has an owner, a reason and a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Wait:
    """One wait that has not ended."""

    owner: object
    """Who waits; its text names it."""
    on: str
    """For what."""
    future: asyncio.Future[Any]
    since: float

    def line(self, now: float) -> str:
        return f"{self.owner} waits for {self.on} since {now - self.since:.0f} s"


@dataclass
class WaitList:
    """All waits of a pool.

    Args:
        timeout: seconds that a wait may take. Time in which the event loop stood still, because the learner computed in
            it, does not count.
    """

    timeout: float
    _waits: dict[int, Wait] = field(default_factory=dict[int, Wait])
    _seen: float = 0.0

    def __len__(self) -> int:
        return len(self._waits)

    def owners(self) -> list[object]:
        """Who waits. It may be asked from any thread."""
        return [wait.owner for wait in list(self._waits.values())]

    async def until(self, future: asyncio.Future[T], owner: object, on: str, since: float | None = None) -> T:
        """Wait for the future. `since`: when the wait began, where that was earlier."""
        wait = Wait(owner, on, future, time.monotonic() if since is None else since)
        self._waits[id(wait)] = wait
        try:
            return await future
        finally:
            del self._waits[id(wait)]

    def look(self, every: float) -> str:
        """To be called every so many seconds; returns what has stalled, as text, or ''."""
        now = time.monotonic()
        late = max(0.0, now - self._seen - 2 * every) if self._seen else 0.0
        self._seen = now
        for wait in self._waits.values():
            wait.since = min(now, wait.since + late)
        if not any(now - w.since > self.timeout and not w.future.done() for w in self._waits.values()):
            return ""
        return "\n".join(w.line(now) for w in sorted(self._waits.values(), key=lambda w: w.since))

    def begin_anew(self, owners: Iterable[object]) -> None:
        """What these wait for does something else meanwhile: their time counts from now on."""
        known, now = {id(o) for o in owners}, time.monotonic()
        for wait in self._waits.values():
            wait.since = now if id(wait.owner) in known else wait.since

    def begin(self) -> None:
        """Forget the waits of an earlier event loop."""
        self._waits, self._seen = {}, 0.0

    def fail(self, error: Exception) -> None:
        """Every wait raises this error."""
        for wait in self._waits.values():
            if not wait.future.done():
                wait.future.set_exception(error)
