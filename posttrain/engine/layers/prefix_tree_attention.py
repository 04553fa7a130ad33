"""Segments that begin alike, computed once: siblings of a prompt, the two sides of a pair, turns of one episode.

A token's hidden state depends only on the tokens before it, so equal beginnings are computed once. Each segment adds
only the positions that are its own: a run, which attends to the positions above it and to itself.

Worked example: segments [a b c d], [a b c e f], [g h] have the unique positions a b c d e f g h (8 of 11). Their runs
are [a b c d] below nothing, [e f] below (a b c), and [g h] below nothing.

Axis letters: N packed positions, U unique ones, S segments, R padded rows; of a bucket B runs, L positions of a run, A
positions above it; H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.exchange.micro_batches import LEAST, SLACK, alike
from posttrain.engine.head.kernel_table import kernel
from posttrain.engine.layers.attention import WASTE, AttentionCall, RunsLayout, buckets
from posttrain.engine.layers.packed_attention import Runs


@dataclass(frozen=True, eq=False)
class TreeRun:
    """Positions that one segment adds: `length` unique ones from `start`. They see the positions `above` [A], too."""

    start: int
    length: int
    above: np.ndarray


@dataclass(frozen=True, eq=False)
class SharedTree:
    """The unique positions of packed segments."""

    first_U: np.ndarray
    """int64: a packed position at which each unique one stands."""
    place_N: np.ndarray
    """int64: the unique position of every packed one."""
    runs: tuple[TreeRun, ...]
    """In the order of the unique positions: by how many positions are above them, then longest first."""

    @property
    def saving(self) -> float:
        """Share of the packed positions that need not be computed."""
        return 1 - len(self.first_U) / len(self.place_N)

    @staticmethod
    def of(ids_N: np.ndarray, lengths_S: np.ndarray) -> SharedTree:
        """The tree of these segments. The order of the segments changes only the order of the unique positions."""
        # Sorted as byte strings of their ids, segments with a common beginning are neighbours, and what a segment
        # shares with any one before it, it shares with the one just before. So one comparison per segment finds the
        # tree.
        ends = np.cumsum(lengths_S)
        starts = ends - lengths_S
        parts = [ids_N[a:b] for a, b in zip(starts, ends, strict=True)]
        order = sorted(range(len(parts)), key=lambda s: parts[s].astype(">u4").tobytes())
        place_N, first, runs = np.empty(len(ids_N), np.int64), list[np.ndarray](), list[TreeRun]()
        count, before = 0, -1
        for s, shared in zip(order, _shared_lengths([parts[s] for s in order]), strict=True):
            # Shared tokens have the places of the segment before, which may have shared some: `above` reaches the root.
            above = place_N[starts[before] : starts[before] + shared] if shared else np.zeros(0, np.int64)
            added = int(lengths_S[s]) - shared
            place_N[starts[s] : starts[s] + shared] = above
            place_N[starts[s] + shared : ends[s]] = np.arange(count, count + added)
            first.append(np.arange(starts[s] + shared, ends[s]))
            if added:
                # A segment that lies wholly in the one before adds no position, and so no run.
                runs.append(TreeRun(count, added, above.copy()))
            count, before = count + added, s
        return _renumbered(np.concatenate(first), place_N, runs)


def _renumbered(first_U: np.ndarray, place_N: np.ndarray, runs: Sequence[TreeRun]) -> SharedTree:
    """The tree with its unique positions in the order that `SharedTree.runs` says."""
    order = sorted(runs, key=lambda r: (len(r.above), -r.length, r.start))
    # old_U[new] is the number before the renumbering, and new_U is its inverse.
    old_U = np.concatenate([np.arange(r.start, r.start + r.length) for r in order])
    new_U = np.empty_like(old_U)
    new_U[old_U] = np.arange(len(old_U))
    moved = tuple(TreeRun(int(new_U[r.start]), r.length, new_U[r.above]) for r in order)
    return SharedTree(first_U[old_U], new_U[place_N], moved)


def _shared_lengths(parts: Sequence[np.ndarray]) -> list[int]:
    """Returns how many tokens each sorted segment shares with the one before it (`_cluster_lengths`); 0: too few."""
    shared_lengths = [0, *(alike(a, b) for a, b in pairwise(parts))]
    out, tree = list[int](), list[int]()
    # `tree` gathers the shared lengths of one tree. A segment that shares too little begins the next one.
    for i, shared in enumerate([*shared_lengths, 0]):
        if shared < LEAST:
            out += _cluster_lengths(tree, parts[i - len(tree) : i])
            tree = []
            if i < len(parts):
                out.append(0)
        else:
            tree.append(shared)
    return out


def _cluster_lengths(tree: Sequence[int], parts: Sequence[np.ndarray]) -> list[int]:
    """Shared lengths that differ by less than `SLACK` become the smallest of them, which is always valid. A segment
    that the one before it contains whole keeps its length, and so adds no run."""
    # Siblings share a prompt to the token, but some also begin alike by chance: 40, 41 or 43 tokens. Each length would
    # be a call of attention of its own, which costs more than computing up to `SLACK` tokens twice.
    kept_length: dict[int, int] = {}
    # From the shortest length on: the first kept length that is less than `SLACK` shorter, or itself.
    for shared in sorted(set(tree)):
        kept = next((b for b in kept_length.values() if shared - b < SLACK), shared)
        kept_length[shared] = kept
    return [n if n == len(part) else kept_length[n] for n, part in zip(tree, parts, strict=True)]


@dataclass(eq=False)
class _Bucket:
    """Runs of similar length below equally many positions, which one call of attention computes: `count` runs, padded
    to `longest`, below `deep` positions. Their unique positions are `begin` to `begin + own`."""

    count: int
    longest: int
    deep: int
    begin: int
    own: int
    read: Tensor
    """int64 [B * L]: the unique position of each padded row. Padding repeats the last one of its run."""
    real: Tensor
    """int64 [own]: the padded row of each unique position."""
    below: Tensor
    """int64 [B * (A + L)]: for each run the positions above it, then its padded rows."""
    real_below: Tensor
    """int64 [own]: the place of each unique position in `below`."""
    parents: Tensor
    """[P, B]: 1 where a run is below the P-th distinct list of positions."""
    places: Tensor
    """int64 [P, A]: these lists."""
    apart: bool
    """Whether no position is in two lists."""

    @classmethod
    def of(cls, runs: Sequence[TreeRun]) -> _Bucket:
        """The bucket of these runs, longest first. All have equally many positions above them."""
        longest, begin = runs[0].length, runs[0].start
        length_B = np.array([r.length for r in runs])
        above_BA = np.stack([r.above for r in runs])
        deep = above_BA.shape[1]
        # Rows behind a run's end repeat its last position.
        read_BL = np.array([r.start for r in runs])[:, None] + np.minimum(np.arange(longest), length_B[:, None] - 1)
        row, column = np.nonzero(np.arange(longest) < length_B[:, None])
        # Siblings lie below the same positions: P distinct lists of them, and a matrix [P, B] of who is below which.
        places, list_of_run = np.unique(above_BA, axis=0, return_inverse=True)
        parents = (np.arange(len(places))[:, None] == list_of_run.reshape(1, -1)).astype(np.float32)
        return cls(
            count=len(runs),
            longest=longest,
            deep=deep,
            begin=begin,
            own=int(length_B.sum()),
            read=torch.from_numpy(read_BL.ravel()),
            real=torch.from_numpy(row * longest + column),
            below=torch.from_numpy(np.concatenate([above_BA, read_BL], 1).ravel()),
            real_below=torch.from_numpy(row * (deep + longest) + deep + column),
            parents=torch.from_numpy(parents),
            places=torch.from_numpy(places),
            apart=len(np.unique(places)) == places.size,
        )

    def to(self, device: torch.device) -> None:
        """Move the index tensors to a device."""
        for name in ("read", "real", "below", "real_below", "parents", "places"):
            setattr(self, name, getattr(self, name).to(device))

    @property
    def whole(self) -> bool:
        """True where there is no padding, so that the padded rows are the unique positions as they lie."""
        return self.own == self.count * self.longest

    def of_rows(self, rows: Tensor) -> Tensor:
        """The rows of this bucket's unique positions, out of rows [U, ...]."""
        return rows[self.begin : self.begin + self.own]

    def collect(self, out: Tensor, padded: Tensor, deep: int) -> None:
        """Write the rows of its runs, which come after `deep` others in `padded`, to `out` [U, ...]."""
        if self.whole:
            self.of_rows(out).unflatten(0, (self.count, self.longest)).copy_(padded[:, deep:])
        else:
            self.of_rows(out).copy_(padded.flatten(0, 1).index_select(0, self.real_below if deep else self.real))


class _Padded(torch.autograd.Function):
    """Rows [U, ...] to the padded rows of every bucket, [B, L, ...] each. With `above` the rows above each run come
    before its own: [B, A + L, ...].

    All buckets write to one gradient, since one of its own for each would be mostly zeros. Runs below the same
    positions are summed by one product, since adding row by row is slow. No real position attends to padding, so the
    gradient of padding is exactly zero and is left out.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Sequence[_Bucket], above: bool) -> tuple[Tensor, ...]:
        ctx.of, ctx.above, ctx.rows = of, above, rows.shape[0]

        def part(b: _Bucket) -> Tensor:
            if above and b.deep:
                return rows.index_select(0, b.below).unflatten(0, (b.count, b.deep + b.longest))
            padded = b.of_rows(rows) if b.whole else rows.index_select(0, b.read)
            return padded.unflatten(0, (b.count, b.longest))

        return tuple(part(b) for b in of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # First every position gets the gradient of its own run, which writes all of `out`: buckets partition it. Then
        # the runs below it add theirs.
        out = grads[0].new_empty(ctx.rows, *grads[0].shape[2:])
        for b, grad in zip(ctx.of, grads, strict=True):
            b.collect(out, grad, b.deep if ctx.above else 0)
        for b, grad in zip(ctx.of, grads, strict=True):
            if not (ctx.above and b.deep):
                continue
            # [P, B] @ [B, A * K * D]: gradients of all runs below one list, summed by one product.
            summed = (b.parents.to(grad.dtype) @ grad[:, : b.deep].flatten(1)).view(-1, b.deep, *grad.shape[2:])
            # No position twice: one copy writes all lists. Others go one by one, or `index_put` would lose a part.
            if b.apart:
                flat = b.places.flatten()
                out.index_copy_(0, flat, out.index_select(0, flat) + summed.flatten(0, 1))
                continue
            for places, part in zip(b.places, summed, strict=True):
                out[places] += part
        return out, None, None


class _Joined(torch.autograd.Function):
    """Rows [B, L, ...] of every bucket to rows [U, ...]. Padding gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, of: Sequence[_Bucket], *parts: Tensor) -> Tensor:
        ctx.of = of
        out = parts[0].new_empty(sum(b.own for b in of), *parts[0].shape[2:])
        for b, part in zip(of, parts, strict=True):
            b.collect(out, part, 0)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]

        def part(b: _Bucket) -> Tensor:
            rows = b.of_rows(grad)
            if not b.whole:
                rows = grad.new_zeros(b.count * b.longest, *grad.shape[1:]).index_copy_(0, b.real, rows)
            return rows.unflatten(0, (b.count, b.longest))

        return None, *(part(b) for b in ctx.of)


class TreeLayout(RunsLayout):
    """Attention over the unique positions of a `SharedTree`: each run sees what is above it, and itself causally."""

    def __init__(self, tree: SharedTree, *, waste: float = WASTE, kernels: KernelChoice = "auto") -> None:
        super().__init__(len(tree.first_U), kernels)
        self._runs, self._waste = tree.runs, waste
        self._device = torch.device("cpu")

    @cached_property
    def runs(self) -> Runs:
        start, length = (np.array(x, np.int64) for x in zip(*((r.start, r.length) for r in self._runs), strict=True))
        return Runs(start, length, [r.above for r in self._runs])

    @cached_property
    def _buckets(self) -> list[_Bucket]:
        """Runs with equally many positions above them and similar lengths, longest first."""
        by_depth: dict[int, list[TreeRun]] = {}
        for run in self._runs:
            by_depth.setdefault(len(run.above), []).append(run)
        out: list[_Bucket] = []
        for _, equally_deep in sorted(by_depth.items()):
            groups = buckets(np.array([r.length for r in equally_deep]), self._waste)
            out += [_Bucket.of([equally_deep[i] for i in group]) for group in groups]
        return out

    def by_buckets(self, call: AttentionCall) -> Tensor:
        """Runs of similar length below equally many positions by one call of dense attention each."""
        query = call.query
        if self._device != query.device:
            self._device = query.device
            for bucket in self._buckets:
                bucket.to(query.device)
        # Queries are a run's own positions; keys and values are those above it too. Each is one node for all buckets.
        q, k, v = (
            _Padded.apply(x[0].transpose(0, 1), self._buckets, above)
            for x, above in ((query, False), (call.key, True), (call.value, True))
        )
        attention = kernel("attention", query.device, query.dtype, self._kernels).function
        out = list[Tensor]()
        for b, *rows_qkv in zip(self._buckets, q, k, v, strict=True):
            q_BHLD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in rows_qkv)
            mask = self._mask(b.longest, b.deep, call.window, query.device)
            out.append(attention(q_BHLD, k_BKTD, v_BKTD, mask, call.scaling, call.softcap).transpose(1, 2))
        return _Joined.apply(self._buckets, *out).unsqueeze(0)
