"""Mean and spread of a few rewards. Sums are exact, so permuting the siblings changes nothing.

`noise` is the largest difference of values that counts as rounding (`core.measure.equal_numbers.rounding`). Differences
are formed before they are summed, so that the result for nearly equal values is as exact as the values are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from posttrain.core.measure.equal_numbers import spread

Array = NDArray[np.float64]


def mean(x: Array) -> float:
    return math.fsum(x) / len(x)


def from_lowest(x: Array) -> Array:
    """Each value minus the lowest. It is exact for values near each other, and has the same differences to the mean."""
    return x - np.min(x, initial=np.inf)


def std(x: Array, noise: float) -> float:
    """Standard deviation, ddof 1; exactly 0 without spread. It is computed in units of max - min,
    so that no square underflows."""
    if not spread(x, noise):
        return 0.0
    y = from_lowest(x)
    width = float(y.max())
    y = y / width
    return width * math.sqrt(math.fsum((y - mean(y)) ** 2) / (len(y) - 1))


def compared(x: Array, noise: float, *, scaled: bool) -> Array:
    """Each value minus the mean, divided by the standard deviation where `scaled`; zeros without spread."""
    if not spread(x, noise):
        return np.zeros_like(x)
    y = from_lowest(x)
    return (y - mean(y)) / (std(x, noise) if scaled else 1.0)
