"""Whitening: credit less its mean, over its standard deviation, over a whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from posttrain.algorithm.spread import Array, spread
from posttrain.core.algorithm import Whiten


def whitened(
    whiten: Whiten, credit: Sequence[Array], sources: Sequence[str], noise: Sequence[float] | None = None
) -> list[Array]:
    """Credit less its mean, over its standard deviation (ddof 1); zeros where all agree up to rounding.

    Over the whole step: `token` counts every token once, so long episodes weigh more; `sample` every episode once, its
    tokens sharing that one. `source` is `sample` within the episodes of one source. `noise` is, for each episode, the
    width up to which its credit says nothing; the largest of those that are compared counts.
    """
    out = list(credit)
    noise = [0.0] * len(out) if noise is None else noise
    for source in dict.fromkeys(sources) if whiten == "source" else [None]:
        at = [i for i, s in enumerate(sources) if source in (None, s)]
        widest = max((noise[i] for i in at), default=0.0)
        for i, x in zip(
            at, _whitened("token" if whiten == "token" else "sample", [credit[i] for i in at], widest), strict=True
        ):
            out[i] = x
    return out


def _whitened(whiten: Whiten, credit: Sequence[Array], noise: float) -> list[Array]:
    spoken = [x for x in credit if len(x)]
    if not spoken:
        return list(credit)
    flat = np.concatenate(spoken)
    if not spread(flat, noise):
        return [np.zeros_like(x) for x in credit]
    low, width = float(flat.min()), float(flat.max() - flat.min())
    flat = (flat - low) / width
    weight = np.concatenate([np.full(len(x), 1.0 if whiten == "token" else 1 / len(x)) for x in spoken])
    count = float(len(flat) if whiten == "token" else len(spoken))
    mean = math.fsum(weight * flat) / count
    if count < 2:
        return [(x - low) - mean * width for x in credit]
    std = math.sqrt(math.fsum(weight * (flat - mean) ** 2) / (count - 1))
    return [((x - low) / width - mean) / std for x in credit]
