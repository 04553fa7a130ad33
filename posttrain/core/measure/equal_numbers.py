"""Decides whether numbers differ, or are equal up to rounding. Credit, filters, whitening and scales use this one rule.

Rounding is relative to the terms that a number was summed from, not to the number itself. For example .1 + .2 - .3 is
5.6e-17 instead of 0, and the sum of its absolute terms is .6. So rewards are stored with the sum of their absolute
terms (`size`) and the resolution of their source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESOLUTION = 2.0**-40
"""Relative difference up to which a verifier's scores count as equal. float64 rounds at 2^-53, and the error of a sum
of a few thousand terms is smaller than this. A reward model is coarser; its setting is `Reward.resolution`."""


def rounding(sizes: Sequence[float] | np.ndarray, resolution: float = RESOLUTION) -> float:
    """The largest difference that counts as rounding: `resolution` times the largest of the values' `size`s."""
    return resolution * float(np.max(sizes, initial=0.0))


def spread(values: Sequence[float] | np.ndarray, noise: float) -> bool:
    """Returns whether values have spread: there are at least two, and max - min > `noise` (from `rounding`).

    >>> alike, summed = rounding([0.3]), rounding([0.0, 0.6])
    >>> spread([0.3, 0.1 + 0.2, 0.3], alike), spread([0.0, 0.1 + 0.2 - 0.3], summed), spread([0, 1], rounding([1]))
    (False, False, True)
    """
    return len(values) > 1 and bool(np.max(values) - np.min(values) > noise)
