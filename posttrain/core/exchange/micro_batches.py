"""Decides which sequences of a minibatch share a micro-batch: first-fit decreasing, over families of sequences.

A family is a set of sequences with the same beginning: siblings with one prompt, later turns of an episode, a pair with
one question. A learner may compute a shared beginning once in one micro-batch, so families are packed. With `Room.once`
it also takes room once, and more sequences fit.

Worked example, where each letter stands for 4 tokens: room for 40 tokens, sequences [p p p a], [q q q b], [p p p c] and
[d d d d d]. The first and the third share 12 tokens: they are a family of 32. In order of size: family (p..a, p..c) of
32, (d d d d d) of 20, (q..b) of 16. The bins are {1st, 3rd} with 32 tokens and {4th, 2nd} with 36.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

LEAST = 8
"""Smallest number of tokens that sequences share as a beginning; shorter ones are not shared."""
SLACK = 8
"""Beginnings whose lengths differ by fewer tokens than this may be computed as the shortest of them: a call of
attention for each length would cost more than to compute a few tokens twice (`engine.layers.prefix_tree_attention`)."""
WORTH = 0.1
"""Smallest share of a micro-batch's positions that sharing must save; below it nothing is shared."""
PACKED = 2
"""A micro-batch that shares beginnings may hold at most this many times `Room.tokens` packed tokens: the hidden states
that are read, and on some devices keys and values, need memory for every packed token."""


@dataclass(frozen=True)
class Room:
    """The capacity of a micro-batch."""

    tokens: int
    """Positions that are computed at once."""
    once: bool = False
    """Whether what several sequences begin with is computed once."""

    def holds(self, packed: Any, computed: Any) -> Any:
        """Returns whether a micro-batch fits: `packed` tokens in all, `computed` positions where beginnings are shared.
        Both are numbers or arrays."""
        # Either all tokens fit, or they fit because beginnings are computed once. Then the
        # tokens in memory have a bound of their own, and sharing must save enough (`WORTH`).
        shared = (computed <= self.tokens) & (packed <= PACKED * self.tokens) & (computed <= (1 - WORTH) * packed)
        return (packed <= self.tokens) | (shared if self.once else False)


def saved(shared: int) -> int:
    """Positions that a sequence saves for certain if it shares a beginning of `shared` tokens with another one."""
    # The shared beginning may be cut by up to SLACK - 1 tokens (see SLACK). Only the rest is certain,
    # and it is above 0 because LEAST is not below SLACK.
    return shared - SLACK + 1 if shared >= LEAST else 0


def bins(keys: Sequence[np.ndarray], sizes: Sequence[int], room: Room, computed: Sequence[int]) -> list[list[int]]:
    """Indices of the items in each bin, ascending. A bin holds items that fit into `room`, or one larger item alone.

    Args:
        keys: the tokens with which each item begins.
        sizes: tokens of each item.
        computed: computed positions of each item: equal to `sizes` where no beginning inside an item is shared.
    """
    members_F, packed_F, computed_F = families(keys, sizes, room, computed)
    # First-fit decreasing: large families first, each into the first bin with room, so small ones
    # fill the gaps. The last sort key, the first index, makes the order a function of the batch alone.
    order = sorted(range(len(members_F)), key=lambda f: (-computed_F[f], -packed_F[f], members_F[f][0]))
    out, filled = list[list[int]](), np.zeros((2, len(members_F)), np.int64)
    for f in order:
        # filled[0]: packed tokens of each bin; filled[1]: its computed positions. All bins are compared at once.
        fits = np.flatnonzero(room.holds(filled[0, : len(out)] + packed_F[f], filled[1, : len(out)] + computed_F[f]))
        # A family that fits nowhere gets a new bin.
        at = int(fits[0]) if len(fits) else len(out)
        if at == len(out):
            out.append([])
        out[at] += members_F[f]
        filled[:, at] += packed_F[f], computed_F[f]
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
    keys: Sequence[np.ndarray], sizes: Sequence[int], room: Room, computed: Sequence[int]
) -> tuple[list[list[int]], list[int], list[int]]:
    """(items of each family, its packed tokens, its computed positions). Items that begin with the same tokens are a
    family, as long as it has room; those that share most are joined first."""
    # Sorted by tokens (big-endian bytes sort as the numbers do), items that begin alike are neighbours.
    # Any two items share the least of what the neighbours between them share.
    order = sorted(range(len(keys)), key=lambda i: keys[i].astype(">u4").tobytes())
    shared = [alike(keys[a], keys[b]) for a, b in pairwise(order)]
    members = [[i] for i in order]
    # A family is a run of this order. As in Kruskal's algorithm, the border over which most is shared is tried first.
    family_at = list(range(len(order)))
    """The family of each place in the order: the place at which it begins."""
    packed_at = [int(sizes[i]) for i in order]
    computed_at = [int(computed[i]) for i in order]
    for border in sorted((b for b, n in enumerate(shared) if n >= LEAST), key=lambda b: -shared[b]):
        # The families on both sides. Each border is tried once, so it still lies between two.
        left, right = family_at[border], border + 1
        together = computed_at[left] + computed_at[right] - (saved(shared[border]) if room.once else 0)
        # Without room the border stays. Both families may still grow on their other sides.
        if room.holds(packed_at[left] + packed_at[right], together):
            # `begin` is `right`: the left family ends at the border.
            begin = left + len(members[left])
            family_at[begin : begin + len(members[right])] = [left] * len(members[right])
            packed_at[left] += packed_at[right]
            computed_at[left] = together
            members[left], members[right] = members[left] + members[right], []
    # A family that was joined to the one before it is empty.
    kept = [f for f, p in enumerate(members) if p]
    return [sorted(members[f]) for f in kept], [packed_at[f] for f in kept], [computed_at[f] for f in kept]


def alike(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens that both share at their beginning."""
    n = min(len(a), len(b))
    # argmax gives the place of the first True, and 0 where there is none: so `any` is asked first.
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
