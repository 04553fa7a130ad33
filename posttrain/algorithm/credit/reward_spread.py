"""Mean and spread of a few rewards. Sums are exact, so permuting the siblings changes nothing. `noise` is the largest
difference that counts as rounding (`core.measure.equal_numbers.rounding`). Differences are formed before they are
summed, so nearly equal values lose no digits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain.core.measure.equal_numbers import spread
from posttrain.ladder.algorithm import Whiten

Array = NDArray[np.float64]


def mean(x: Array) -> float:
    return math.fsum(x) / len(x)


def from_lowest(x: Array) -> Array:
    """Each value minus the lowest. It is exact for values near each other, and has the same differences to the mean."""
    # `initial`, so that an empty array gives an empty one and no error.
    return x - np.min(x, initial=np.inf)


def std(x: Array, noise: float) -> float:
    """Standard deviation, ddof 1; exactly 0 without spread. In units of max - min, so that no square underflows."""
    if not spread(x, noise):
        return 0.0
    # std(x) = width * std(y) for y = (x - min) / width in [0, 1]. Of rewards that differ
    # by 1e-200 the squares would be 0, and the division by the deviation would fail.
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


def whitened(
    whiten: Whiten, credit: Sequence[Array], sources: Sequence[str], noise: Sequence[float] | None = None
) -> list[Array]:
    """Credit minus its mean, divided by its standard deviation (ddof 1); zeros where all are equal up to rounding.

    Mean and deviation are over the whole step. `token` counts every token once, so long episodes weigh more. `sample`
    counts every episode once, and divides that count over its tokens. `source` is `sample` within the episodes of one
    source. `noise` is, for each episode, the size up to which its credit counts as rounding. The largest one of those
    compared is used.
    """
    out = list(credit)
    noise = [0.0] * len(out) if noise is None else noise
    # None stands for all samples. Each source is whitened alone; `at`
    # are the places of its samples, where its credit goes back to.
    for source in dict.fromkeys(sources) if whiten == "source" else [None]:
        at = [i for i, s in enumerate(sources) if source in (None, s)]
        widest = max((noise[i] for i in at), default=0.0)
        for i, x in zip(
            at, _whitened("token" if whiten == "token" else "sample", [credit[i] for i in at], widest), strict=True
        ):
            out[i] = x
    return out


def _whitened(whiten: Whiten, credit: Sequence[Array], noise: float) -> list[Array]:
    """`whitened` of the episodes that are compared with each other."""
    # An episode without tokens has no credit to count, and 1 / len would fail.
    spoken = [x for x in credit if len(x)]
    if not spoken:
        return list(credit)
    flat = np.concatenate(spoken)
    if not spread(flat, noise):
        return [np.zeros_like(x) for x in credit]
    # As in `std`: sums of squares neither cancel nor underflow.
    low, width = float(flat.min()), float(flat.max() - flat.min())
    flat = (flat - low) / width
    # [all tokens]. `sample`: the tokens of an episode share a weight of 1, so the count is that of the episodes.
    weight = np.concatenate([np.full(len(x), 1.0 if whiten == "token" else 1 / len(x)) for x in spoken])
    count = float(len(flat) if whiten == "token" else len(spoken))
    middle = math.fsum(weight * flat) / count
    # One sample has no deviation to be divided by: its credit is only centred.
    if count < 2:
        return [(x - low) - middle * width for x in credit]
    deviation = math.sqrt(math.fsum(weight * (flat - middle) ** 2) / (count - 1))
    return [((x - low) / width - middle) / deviation for x in credit]
