"""The counts of the scheduler; `engine_counters.EngineCounters` turns them into gauges."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SchedulerCounts:
    """Sums since the gauges were last read.

    A type apart from `EngineCounters`, because a scheduler is replaced after a failure, and its counts end with it.
    """

    shared: int = 0
    """Prompt tokens that were not computed, because another request of the same prompt had computed them."""
    found: int = 0
    """Prompt tokens found in the prefix tree."""
    asked: int = 0
    """Prompt tokens looked up in the prefix tree. A resumed request's tokens count again."""
    again: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(from, to): ranges of positions that are computed again, because their cache was freed."""
    preempted: int = 0
