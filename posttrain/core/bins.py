"""Which sequences of a minibatch share a micro-batch: first-fit decreasing, with sequences that begin alike together.

What begins alike is computed once where it lies in one micro-batch: the prompt of siblings, earlier turns of an
episode, the question of a pair. So sequences are first joined to families, and the families are packed.

Worked example: room for 10 tokens, sequences [p p p a], [q q q b], [p p p c] and [d d d d d]. The first and the third
are a family of 8 tokens. In order of size: (p..a, p..c), (d d d d d), (q..b) -> the bins are {1st, 3rd} and {4th, 2nd}.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

LEAST = 8
"""Fewest tokens that are worth to be shared."""


def bins(keys: Sequence[np.ndarray], sizes: Sequence[int], room: int) -> list[list[int]]:
    """Indices of each bin, ascending. A bin holds at most `room` tokens, or one item that is larger than that.

    Args:
        keys: the tokens with which each item begins.
        sizes: tokens of each item.
    """
    found = families(keys, sizes, room)
    total = [sum(sizes[i] for i in family) for family in found]
    order = sorted(range(len(found)), key=lambda f: (-total[f], found[f][0]))
    out, free = list[list[int]](), np.zeros(len(found), np.int64)
    for f in order:
        fits = np.flatnonzero(free[: len(out)] >= total[f])
        at = int(fits[0]) if len(fits) else len(out)
        if at == len(out):
            out.append([])
            free[at] = room
        out[at] += found[f]
        free[at] -= total[f]
    return [sorted(b) for b in out]


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of each part, ascending: the largest item first, each into the part that is lightest so far.

    A part may be empty. The heaviest part is at most 4/3 - 1/(3 parts) times as heavy as it must be (Graham 1969).

    Example: sizes 2, 5, 3, 4 in two parts: 5 to the first, 4 to the second, 3 to the second, 2 to the first: 7 and 7.
    """
    out, total = [list[int]() for _ in range(parts)], [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = min(range(parts), key=total.__getitem__)
        out[lightest].append(i)
        total[lightest] += sizes[i]
    return [sorted(part) for part in out]


def families(keys: Sequence[np.ndarray], sizes: Sequence[int], room: int) -> list[list[int]]:
    """Items that begin with the same tokens, as far as a family fits into `room`; those that share most are joined
    first."""
    order = sorted(range(len(keys)), key=lambda i: keys[i].astype(">u4").tobytes())
    shared = [alike(keys[a], keys[b]) for a, b in pairwise(order)]
    parts = [[i] for i in order]
    where = list(range(len(order)))
    """The family of each place in the order: the place at which it begins."""
    size = [int(sizes[i]) for i in order]
    for border in sorted((b for b, n in enumerate(shared) if n >= LEAST), key=lambda b: -shared[b]):
        left, right = where[border], border + 1
        if size[left] + size[right] <= room:
            begin = left + len(parts[left])
            where[begin : begin + len(parts[right])] = [left] * len(parts[right])
            size[left] += size[right]
            parts[left], parts[right] = parts[left] + parts[right], []
    return [sorted(p) for p in parts if p]


def alike(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
