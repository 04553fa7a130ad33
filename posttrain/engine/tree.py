"""Segments that begin alike, computed once: siblings of a prompt, the two sides of a pair, turns of one episode.

A token's hidden state depends only on the tokens before it. So where segments begin with the same tokens, these
positions are computed once, and each segment adds only what is its own: a run, which attends to the positions above it
and to itself. Everything after the hidden states is as without sharing.

Worked example: segments [a b c d], [a b c e f], [g h] have the unique positions a b c d e f g h (8 of 11). Their runs
are [a b c d] below nothing, [e f] below (a b c), and [g h] below nothing.

Axis letters: N packed positions, U unique ones, S segments, R padded rows; of a bucket B runs, L positions of a run, A
positions above it; H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.bins import LEAST, alike
from posttrain.core.engines import KernelChoice
from posttrain.core.errors import EngineError
from posttrain.engine.attention import WASTE, CollectRows, SpreadRows, buckets
from posttrain.engine.kernels import kernel

SLACK = 8
"""Runs whose shared beginnings differ by fewer tokens share the shortest of these, so that one call computes them."""


@dataclass(frozen=True, eq=False)
class TreeRun:
    """Positions that one segment adds: `length` unique positions from `start`, below those of `above` [A]."""

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

    @property
    def saving(self) -> float:
        """Share of the packed positions that need not be computed."""
        return 1 - len(self.first_U) / len(self.place_N)

    @staticmethod
    def of(ids_N: np.ndarray, lengths_S: np.ndarray) -> SharedTree:
        """The tree of these segments. The order of the segments changes only the order of the unique positions."""
        ends = np.cumsum(lengths_S)
        starts = ends - lengths_S
        parts = [ids_N[a:b] for a, b in zip(starts, ends, strict=True)]
        order = sorted(range(len(parts)), key=lambda s: parts[s].astype(">u4").tobytes())
        place_N, first, runs = np.empty(len(ids_N), np.int64), list[np.ndarray](), list[TreeRun]()
        count, before = 0, -1
        for s, shared in zip(order, _rounded([parts[s] for s in order]), strict=True):
            above = place_N[starts[before] : starts[before] + shared] if shared else np.zeros(0, np.int64)
            own = int(lengths_S[s]) - shared
            place_N[starts[s] : starts[s] + shared] = above
            place_N[starts[s] + shared : ends[s]] = np.arange(count, count + own)
            first.append(np.arange(starts[s] + shared, ends[s]))
            if own:
                runs.append(TreeRun(count, own, above.copy()))
            count, before = count + own, s
        return SharedTree(np.concatenate(first), place_N, tuple(runs))


def _rounded(parts: Sequence[np.ndarray]) -> list[int]:
    """How many tokens each of these sorted segments shares with the one before it; 0 where it is not worth it."""
    found = [0, *(alike(a, b) for a, b in pairwise(parts))]
    out, tree = list[int](), list[int]()
    for i, shared in enumerate([*found, 0]):
        if shared < LEAST:
            out += _clustered(tree, parts[i - len(tree) : i])
            tree = []
            if i < len(parts):
                out.append(0)
        else:
            tree.append(shared)
    return out


def _clustered(tree: Sequence[int], parts: Sequence[np.ndarray]) -> list[int]:
    """Lengths that differ by less than `SLACK` become the smallest of them. A segment that is the one before it, whole,
    stays so."""
    begin: dict[int, int] = {}
    for shared in sorted(set(tree)):
        least = next((b for b in begin.values() if shared - b < SLACK), shared)
        begin[shared] = least
    return [n if n == len(part) else begin[n] for n, part in zip(tree, parts, strict=True)]


class _Above(torch.autograd.Function):
    """Rows [U, ...] to the rows above each run of every bucket [B, A, ...].

    Runs below the same positions are summed by one product in the backward, since adding row by row is slow. All
    buckets add to one gradient, since one of its own for each would be mostly zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, below: Sequence[_Bucket]) -> tuple[Tensor, ...]:
        ctx.below, ctx.rows = below, rows.shape[0]
        return tuple(rows.index_select(0, b.above).unflatten(0, (b.count, b.deep)) for b in below)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].new_zeros(ctx.rows, *grads[0].shape[2:])
        for bucket, grad in zip(ctx.below, grads, strict=True):
            summed = (bucket.parents.to(grad.dtype) @ grad.flatten(1)).view(-1, bucket.deep, *grad.shape[2:])
            if bucket.apart:
                flat = bucket.places.flatten()
                out.index_copy_(0, flat, out.index_select(0, flat) + summed.flatten(0, 1))
                continue
            for places, part in zip(bucket.places, summed, strict=True):
                out[places] += part
        return out, None


@dataclass(eq=False)
class _Bucket:
    """Runs of similar length below equally many positions, which one call computes."""

    count: int
    longest: int
    deep: int
    above: Tensor
    """int64 [B * A]: unique positions above each run."""
    parents: Tensor
    """[P, B]: 1 where a run is below the P-th distinct list of positions."""
    places: Tensor
    """int64 [P, A]: these lists."""
    apart: bool
    """Whether no position is in two lists."""

    @classmethod
    def of(cls, runs: Sequence[TreeRun]) -> _Bucket:
        above = np.stack([r.above for r in runs])
        places, which = np.unique(above, axis=0, return_inverse=True)
        parents = (np.arange(len(places))[:, None] == which.reshape(1, -1)).astype(np.float32)
        return cls(
            count=len(runs),
            longest=runs[0].length,
            deep=above.shape[1],
            above=torch.from_numpy(above.ravel()),
            parents=torch.from_numpy(parents),
            places=torch.from_numpy(places),
            apart=len(np.unique(places)) == places.size,
        )

    def to(self, device: torch.device) -> None:
        self.above, self.parents, self.places = (x.to(device) for x in (self.above, self.parents, self.places))


class TreeLayout:
    """An attention layout over the unique positions of a `SharedTree`: each run attends to what is above it, and to
    itself causally. It is differentiable, and exact for every tree."""

    def __init__(self, tree: SharedTree, *, waste: float = WASTE, kernels: KernelChoice = "auto") -> None:
        self.positions = len(tree.first_U)
        self._kernels: KernelChoice = kernels
        to, back, row = list[np.ndarray](), np.empty(self.positions, np.int64), 0
        self._buckets: list[_Bucket] = []
        for runs in _alike_runs(tree.runs, waste):
            self._buckets.append(_Bucket.of(runs))
            longest = runs[0].length
            for run in runs:
                to.append(run.start + np.minimum(np.arange(longest), run.length - 1))
                back[run.start : run.start + run.length] = row + np.arange(run.length)
                row += longest
        self.computed = row
        """Positions a layer's attention computes, padding included."""
        self._to, self._back = torch.from_numpy(np.concatenate(to)), torch.from_numpy(back)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [1, H, U, D], key and value [1, K, U, D] -> [1, U, H, D]."""
        if query.shape[0] != 1 or query.shape[2] != self.positions:
            raise EngineError(
                f"a tree of {self.positions} positions met queries of shape {tuple(query.shape)}, not [1, H, U, D]"
            )
        if self._to.device != query.device:
            self._to, self._back, self._masks = self._to.to(query.device), self._back.to(query.device), {}
            for bucket in self._buckets:
                bucket.to(query.device)
        keys, values = (x[0].transpose(0, 1) for x in (key, value))
        q, k, v = (SpreadRows.apply(x, self._to, self._back) for x in (query[0].transpose(0, 1), keys, values))
        attention = kernel("attention", query.device, query.dtype, self._kernels).function
        out, below = list[Tensor](), [b for b in self._buckets if b.deep]
        above = iter(zip(*(_Above.apply(x, below) for x in (keys, values)), strict=True) if below else ())
        parts = (x.split([b.count * b.longest for b in self._buckets]) for x in (q, k, v))
        for b, *rows_qkv in zip(self._buckets, *parts, strict=True):
            q_BLHD, k_BLKD, v_BLKD = (x.unflatten(0, (b.count, b.longest)) for x in rows_qkv)
            if b.deep:
                k_BLKD, v_BLKD = (torch.cat(pair, 1) for pair in zip(next(above), (k_BLKD, v_BLKD), strict=True))
            q_BHLD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
            mask = self._mask(b.longest, b.deep, sliding_window)
            attended = attention(q_BHLD, k_BKTD, v_BKTD, mask, scaling, softcap)
            out.append(attended.transpose(1, 2).flatten(0, 1))
        return CollectRows.apply(torch.cat(out), self._back).unsqueeze(0)

    def _mask(self, longest: int, deep: int, window: int | None) -> Tensor | None:
        """bool [L, A + L]: key j, at depth j, is seen by query i, at depth A + i; None: plainly causal."""
        window = window if window is not None and window < deep + longest else None
        if not deep and window is None:
            return None
        if (longest, deep, window) not in self._masks:
            device = self._to.device
            depth = torch.arange(deep + longest, device=device)
            distance = depth[deep:, None] - depth
            self._masks[longest, deep, window] = (distance >= 0) & (distance < (window or deep + longest))
        return self._masks[longest, deep, window]


def _alike_runs(runs: Sequence[TreeRun], waste: float) -> Iterator[list[TreeRun]]:
    """Runs with equally many positions above them and similar lengths, longest first."""
    by_depth: dict[int, list[TreeRun]] = {}
    for run in runs:
        by_depth.setdefault(len(run.above), []).append(run)
    for _, same in sorted(by_depth.items()):
        for chosen in buckets(np.array([r.length for r in same]), waste):
            yield [same[i] for i in chosen]
