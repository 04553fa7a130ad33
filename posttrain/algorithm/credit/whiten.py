"""Whitening: credit minus its mean, divided by its standard deviation, over a whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from posttrain.algorithm.credit.reward_spread import Array, spread
from posttrain.ladder.algorithm import Whiten


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
