"""Mean and spread of a few rewards, as exact sums, so that siblings may be permuted.

`noise` is the width up to which the values do not differ (`core.spread.rounding`). Differences are formed before they
are summed, so that what is left of values that nearly agree is as exact as the values are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from posttrain.core.spread import spread

Array = NDArray[np.float64]


def mean(x: Array) -> float:
    return math.fsum(x) / len(x)


def above(x: Array) -> Array:
    """Each value less the lowest: exact where values lie near each other, and as good to centre as the values."""
    return x - np.min(x, initial=np.inf)


def std(x: Array, noise: float) -> float:
    """Standard deviation, ddof 1; exactly 0 without spread. In units of the width, so that no square underflows."""
    if not spread(x, noise):
        return 0.0
    y = above(x)
    width = float(y.max())
    y = y / width
    return width * math.sqrt(math.fsum((y - mean(y)) ** 2) / (len(y) - 1))


def compared(x: Array, noise: float, *, scaled: bool) -> Array:
    """Each value less the mean of all, over their standard deviation where `scaled`; zeros without spread."""
    if not spread(x, noise):
        return np.zeros_like(x)
    y = above(x)
    return (y - mean(y)) / (std(x, noise) if scaled else 1.0)
