"""What the scheduler counts; `counters` turns it into gauges."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SchedulerCounts:
    """Sums since the gauges were taken last."""

    shared: int = 0
    """Prompt tokens that were not computed because a sibling's were."""
    found: int = 0
    """Prompt tokens found in the prefix tree."""
    asked: int = 0
    """Prompt tokens admitted, those of resumed requests included."""
    again: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(from, to): positions that are computed again, because their cache was given up."""
    preempted: int = 0
