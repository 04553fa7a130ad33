"""Decides which sequences of a minibatch share a micro-batch: first-fit decreasing, with sequences that begin alike
together.

What begins alike is computed once where it lies in one micro-batch: the prompt of siblings, earlier turns of an
episode, the question of a pair. So sequences are first joined to families, and the families are packed.

Where a learner computes such beginnings once, they take room once, and more fits into a micro-batch.

Worked example: room for 10 tokens, sequences [p p p a], [q q q b], [p p p c] and [d d d d d]. The first and the third
are a family of 8 tokens. In order of size: (p..a, p..c), (d d d d d), (q..b) -> the bins are {1st, 3rd} and {4th, 2nd}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

LEAST = 8
"""Fewest tokens that are worth to be shared."""
SLACK = 8
"""Beginnings that differ by fewer tokens may be computed as the shortest of them."""
WORTH = 0.1
"""Least share of a micro-batch's positions that must be saved; below it all are computed as they are."""
PACKED = 2
"""Most tokens of a micro-batch whose beginnings are computed once, in rooms: hidden states that are read, and on some
devices keys and values, lie in memory once for every token."""


@dataclass(frozen=True)
class Room:
    """The capacity of a micro-batch."""

    tokens: int
    """Positions that are computed at once."""
    once: bool = False
    """Whether what several sequences begin with is computed once."""

    def holds(self, packed: Any, own: Any) -> Any:
        """Returns whether items of `packed` tokens fit, of which `own` positions are computed where beginnings are
        shared. Numbers or arrays."""
        # Either everything fits as it is, or it fits because beginnings are computed once. Then the
        # tokens in memory have a bound of their own, and the saving must be worth it (`WORTH`).
        shared = (own <= self.tokens) & (packed <= PACKED * self.tokens) & (own <= (1 - WORTH) * packed)
        return (packed <= self.tokens) | (shared if self.once else False)


def saved(shared: int) -> int:
    """Positions that a sequence saves for certain, of which this many tokens are those of another's beginning."""
    # A beginning may be cut to one that is up to SLACK - 1 tokens shorter. Room is promised only for what is certain.
    return shared - SLACK + 1 if shared >= LEAST else 0


def bins(keys: Sequence[np.ndarray], sizes: Sequence[int], room: Room, own: Sequence[int]) -> list[list[int]]:
    """Indices of each bin, ascending. A bin holds what has room, or one item that is larger than that.

    Args:
        keys: the tokens with which each item begins.
        sizes: tokens of each item.
        own: positions of each that are computed: `sizes` where nothing is computed once, or of one sequence each.
    """
    found, packed_F, own_F = families(keys, sizes, room, own)
    # First-fit decreasing: large items first, each into the first bin that has room, so the
    # small ones fill the gaps. The last key makes the order a function of the batch alone.
    order = sorted(range(len(found)), key=lambda f: (-own_F[f], -packed_F[f], found[f][0]))
    out, held = list[list[int]](), np.zeros((2, len(found)), np.int64)
    for f in order:
        # held[0] packed tokens and held[1] computed positions of each bin, compared for all bins at once.
        fits = np.flatnonzero(room.holds(held[0, : len(out)] + packed_F[f], held[1, : len(out)] + own_F[f]))
        # An item that is larger than the room fits nowhere, and gets a bin of its own.
        at = int(fits[0]) if len(fits) else len(out)
        if at == len(out):
            out.append([])
        out[at] += found[f]
        held[:, at] += packed_F[f], own_F[f]
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


def families(
    keys: Sequence[np.ndarray], sizes: Sequence[int], room: Room, own: Sequence[int]
) -> tuple[list[list[int]], list[int], list[int]]:
    """Items that begin with the same tokens, as far as a family has room; those that share most are joined first. With
    the tokens of each family, and the positions of it that are computed."""
    # Big-endian bytes sort as the tokens do. In this order items that begin alike are
    # neighbours, and what any two share is the least of what the neighbours between them share.
    order = sorted(range(len(keys)), key=lambda i: keys[i].astype(">u4").tobytes())
    shared = [alike(keys[a], keys[b]) for a, b in pairwise(order)]
    parts = [[i] for i in order]
    # Families are runs of this order, so joining moves only borders, as
    # in Kruskal's algorithm: the border over which most is shared first.
    where = list(range(len(order)))
    """The family of each place in the order: the place at which it begins."""
    size = [int(sizes[i]) for i in order]
    alone = [int(own[i]) for i in order]
    for border in sorted((b for b, n in enumerate(shared) if n >= LEAST), key=lambda b: -shared[b]):
        # The family that ends at this border, and the one that begins behind it: a
        # border that is still there is the end of one run and the begin of the next.
        left, right = where[border], border + 1
        both = alone[left] + alone[right] - (saved(shared[border]) if room.once else 0)
        # Without room the border stays. Both families may still grow to their other sides.
        if room.holds(size[left] + size[right], both):
            begin = left + len(parts[left])
            where[begin : begin + len(parts[right])] = [left] * len(parts[right])
            size[left] += size[right]
            alone[left] = both
            parts[left], parts[right] = parts[left] + parts[right], []
    kept = [f for f, p in enumerate(parts) if p]
    return [sorted(parts[f]) for f in kept], [size[f] for f in kept], [alone[f] for f in kept]


def alike(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    n = min(len(a), len(b))
    # argmax finds the first True; it would give 0 where there is none.
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
