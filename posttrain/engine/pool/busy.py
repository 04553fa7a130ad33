"""How much an engine had to do, over time: seconds without a turn, and tokens in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class BusyTime:
    """What a meter has counted until now. The difference of two is what came between."""

    seconds: float
    idle: float
    """Of these, the seconds without a turn."""
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
    """Counts from now on. It is to be told of every change, and can be read from any thread."""

    def __init__(self) -> None:
        self._state = time.monotonic(), BusyTime(0.0, 0.0, 0.0), 0, 0
        self._taken = self.read()

    def change(self, turns: int, tokens: int) -> None:
        """From now on it has so many turns, and tokens in flight."""
        now = time.monotonic()
        self._state = now, self._until(now), turns, tokens

    def read(self) -> BusyTime:
        """Since the meter was made."""
        return self._until(time.monotonic())

    def take(self) -> BusyTime:
        """Since the last call."""
        now, before = self.read(), self._taken
        self._taken = now
        return now - before

    def _until(self, now: float) -> BusyTime:
        since, counted, turns, tokens = self._state
        spent = max(0.0, now - since)
        idle = 0.0 if turns else spent
        return BusyTime(counted.seconds + spent, counted.idle + idle, counted.flight + tokens * spent)
