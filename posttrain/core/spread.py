"""Whether numbers differ, or are equal up to rounding: one rule for credit, filters, whitening and scales.

Rounding is relative to the terms a number was summed from, not to the number itself: .1 + .2 - .3 is 5.6e-17 where 0 is
meant, and its terms are of size .6. So rewards carry the sum of their absolute terms (`size`) and the resolution of who
gave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESOLUTION = 2.0**-40
"""Relative difference that says nothing in a verifier's scores: float64 rounds at 2^-53, and a sum of a few thousand
terms stays below this. A model that rewards is coarser, and says so where it is declared (`Reward.resolution`)."""


def rounding(sizes: Sequence[float] | np.ndarray, resolution: float = RESOLUTION) -> float:
    """The width up to which values do not differ: `resolution` times the largest of their sums of absolute terms."""
    return resolution * float(np.max(sizes, initial=0.0))


def spread(values: Sequence[float] | np.ndarray, noise: float) -> bool:
    """Whether values can be compared: at least two, and max - min > `noise` (what `rounding` says of them).

    >>> alike, summed = rounding([0.3]), rounding([0.0, 0.6])
    >>> spread([0.3, 0.1 + 0.2, 0.3], alike), spread([0.0, 0.1 + 0.2 - 0.3], summed), spread([0, 1], rounding([1]))
    (False, False, True)
    """
    return len(values) > 1 and bool(np.max(values) - np.min(values) > noise)
