"""Computes how long a step of sampling takes when a few answers are much longer than the others.

One slot says one token in one unit of time. Axis letters: P prompts, K siblings each; S steps of N answers.

>>> first_of(np.array([[3.0, 1.0, 9.0]]), 2).tolist()
[[3.0, 1.0, 3.0]]
>>> refilled(np.array([[4.0, 1.0], [2.0, 2.0]]), slots=2, ahead=0).tolist()
[[4.0, 1.0], [6.0, 6.0]]
>>> refilled(np.array([[4.0, 1.0], [2.0, 2.0]]), slots=2, ahead=1).tolist()
[[4.0, 1.0], [3.0, 5.0]]
"""

from __future__ import annotations

import heapq
from functools import cache

import numpy as np


def lengths(mean: float, cv: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Lognormal lengths with this mean and coefficient of variation (standard deviation over mean)."""
    variance = np.log1p(cv * cv)
    return mean * np.exp(rng.normal(-variance / 2, np.sqrt(variance), shape))


@cache
def longest_of(k: int, cv: float, draws: int = 4000) -> float:
    """Mean length of the longest of k answers, in mean lengths."""
    return float(lengths(1.0, cv, (draws, k), np.random.default_rng(k)).max(1).mean())


def first_of(length_PK: np.ndarray, keep: int) -> np.ndarray:
    """[P, K]: when each answer ends if a group ends with its `keep`-th answer and the others are given up."""
    return np.minimum(length_PK, np.sort(length_PK, 1)[:, keep - 1 : keep])


def refilled(length_SN: np.ndarray, slots: int, ahead: int) -> np.ndarray:
    """[S, N]: when each answer of each step ends. Answers are taken in order by whichever slot is free first, and those
    of a step begin when all of the step `ahead` + 1 before it have ended: no sample is older than `ahead` steps."""
    free, out = [0.0] * slots, np.zeros_like(length_SN)
    for s, row in enumerate(length_SN.tolist()):
        gate = float(out[s - 1 - ahead].max()) if s > ahead else 0.0
        for i, n in enumerate(row):
            out[s, i] = max(heapq.heappop(free), gate) + n
            heapq.heappush(free, out[s, i])
    return out
