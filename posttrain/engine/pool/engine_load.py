"""Measures how much an engine had to do, over time: seconds without a turn, and tokens in flight."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class BusyTime:
    """The counts of a meter until now. The difference of two is what came between them."""

    seconds: float
    idle: float
    """Seconds without a turn, out of `seconds`."""
    flight: float
    """Tokens in flight times the seconds they were."""

    def __sub__(self, before: BusyTime) -> BusyTime:
        return BusyTime(self.seconds - before.seconds, self.idle - before.idle, self.flight - before.flight)

    @property
    def idle_share(self) -> float:
        """Share of the time without a turn; 0 where no time has passed."""
        return self.idle / self.seconds if self.seconds > 0 else 0.0

    @property
    def in_flight(self) -> float:
        """Tokens in flight, mean over the time."""
        return self.flight / self.seconds if self.seconds > 0 else 0.0


class BusyMeter:
    """Counts from now on. It is to be told when each turn begins and ends, from any thread: an answer has come when it
    is here, though the learner, which computes, takes it up later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[object, int] = {}
        self._tokens = 0
        self._seen = time.monotonic()
        self._counted = self._taken = BusyTime(0.0, 0.0, 0.0)

    def begin(self, turn: object, tokens: int) -> None:
        """It has this turn from now on. `tokens`: that it computes for it at most."""
        with self._lock:
            self._count()
            self._tokens += tokens - self._open.get(turn, 0)
            self._open[turn] = tokens

    def end(self, turn: object) -> None:
        """It has the turn no longer, if it had it."""
        with self._lock:
            self._count()
            self._tokens -= self._open.pop(turn, 0)

    def clear(self) -> None:
        """It has no turn."""
        with self._lock:
            self._count()
            self._open, self._tokens = {}, 0

    def read(self) -> BusyTime:
        """Since the meter was made."""
        with self._lock:
            self._count()
            return self._counted

    def take(self) -> BusyTime:
        """Since the last call."""
        now, before = self.read(), self._taken
        self._taken = now
        return now - before

    def _count(self) -> None:
        now = time.monotonic()
        spent, self._seen = max(0.0, now - self._seen), now
        idle = 0.0 if self._open else spent
        c = self._counted
        self._counted = BusyTime(c.seconds + spent, c.idle + idle, c.flight + self._tokens * spent)
