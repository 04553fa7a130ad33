"""Chooses the answer that is given, of several sampled ones: the best by a score, or the one that most of them agree
on."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best(scores: Sequence[float]) -> int:
    """The index of the highest score; the first of equal ones.

    >>> best([0.2, 0.9, 0.9])
    1
    """
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> int:
    """The index of the first answer of the largest class of equal answers; with weights, of the heaviest one
    (2203.11171, 2206.02336).

    An answer that is None, which nothing could be read of, is given only where there is no other.

    >>> vote(["7", "8", "8", None])
    1
    >>> vote(["7", "8", "8"], [0.9, 0.3, 0.4])
    0
    """
    total: dict[str, list[float]] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            total.setdefault(answer, []).append(weight)
    if not total:
        return 0
    won = max(total, key=lambda a: math.fsum(total[a]))
    return answers.index(won)
