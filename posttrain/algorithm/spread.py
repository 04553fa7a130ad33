"""Mean and spread of a few rewards, as exact sums, so that siblings may be permuted."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def spread(rewards: Array) -> bool:
    """Whether siblings can be compared: at least two, and max != min."""
    return len(rewards) > 1 and bool(rewards.max() != rewards.min())


def mean(x: Array) -> float:
    return math.fsum(x) / len(x)


def std(x: Array) -> float:
    """Standard deviation, ddof 1; exactly 0 without spread."""
    return math.sqrt(math.fsum((x - mean(x)) ** 2) / (len(x) - 1)) if spread(x) else 0.0


def compared(x: Array, *, scaled: bool) -> Array:
    """Each value less the mean of all, over their standard deviation where `scaled`; zeros without spread."""
    if not spread(x):
        return np.zeros_like(x)
    return (x - mean(x)) / (std(x) if scaled else 1.0)
