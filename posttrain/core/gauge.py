"""Numbers of a step: gauges as (sum, count), and the line of the record that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Gauge:
    """A sum and a count. Gauges merge by adding, so a mean is always over all entries and never a mean of means."""

    sum: float
    count: float

    def __add__(self, other: Gauge) -> Gauge:
        return Gauge(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """NaN where the count is 0."""
        return self.sum / self.count if self.count else math.nan

    @staticmethod
    def of(values: Sequence[float] | np.ndarray) -> Gauge:
        return Gauge(float(np.sum(values)), float(np.size(values)))


Gauges = dict[str, Gauge]


def merge(*parts: Mapping[str, Gauge]) -> Gauges:
    """Gauges of all parts; those of the same name are added."""
    out: Gauges = {}
    for part in parts:
        for name, gauge in part.items():
            out[name] = out[name] + gauge if name in out else gauge
    return out


@dataclass(frozen=True)
class Step:
    """One line of the record. No digest covers `clock` and `memory`, which are measured."""

    stage: str
    index: int
    version: int
    gauges: Mapping[str, Gauge]
    clock: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall seconds by role, and what else was timed."""
    notes: tuple[str, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict[str, float])
    """Peak bytes by role: of the device's allocator, or resident ones."""
