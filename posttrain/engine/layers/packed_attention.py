"""Attention of packed segments by compiled code: no padding, no copies of rows, forward and backward.

A layout describes its positions by runs. A run is some positions that lie side by side: each sees the positions above
the run, and those of the run up to itself. A segment alone is a run with nothing above it. Runs that share positions
above them form a tree with these positions (`prefix_tree_attention`).

The first use for a shape of heads compares outputs and gradients with the plain definition in float64.

Axis letters: N positions, H query heads, K key-value heads, D head width, R runs, A positions above all runs, C trees.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.engine.cpu import compile_native
from posttrain.engine.cpu.compile_native import addresses
from posttrain.engine.head import reference_ops
from posttrain.engine.pool.pool_waits import in_thread
from posttrain.system.errors import EngineError

PROOF = 2e-5
"""Largest difference from float64, relative to the largest number, that counts as rounding."""


class Runs:
    """All runs of one forward pass, as arrays that compiled code reads.

    Args:
        start, length: of each run.
        above: the positions above each run, in the order of their depth. The first of them is the start of the run at
            the root of the tree.
    """

    def __init__(self, start: np.ndarray, length: np.ndarray, above: Sequence[np.ndarray] = ()) -> None:
        # Threads take trees in this order, in the backward pass one head of one tree at a time. The costliest come
        # first, so that no thread begins a long one when the others are done.
        deep = np.array([len(a) for a in above], np.int64) if above else np.zeros(len(start), np.int64)
        root = np.array([a[0] if len(a) else s for a, s in zip(above, start, strict=True)]) if above else start
        cost = dict.fromkeys(root.tolist(), 0)
        # Queries times keys of a run, summed over its tree.
        for r, n in zip(root.tolist(), (length * (deep + length)).tolist(), strict=True):
            cost[r] += n
        order = sorted(range(len(start)), key=lambda r: (-cost[int(root[r])], root[r], deep[r]))
        self._start, self._length, self._deep = (
            np.ascontiguousarray(x[order], np.int64) for x in (start, length, deep)
        )
        # Run r sees above[begin[r] : begin[r] + deep[r]], and tree c holds the runs first[c] to first[c + 1] - 1.
        self._begin = np.cumsum(self._deep) - self._deep
        self._above = np.concatenate([above[r] for r in order]).astype(np.int64) if above else np.zeros(0, np.int64)
        tree = root[order]
        self._first = np.append(np.flatnonzero(np.append(True, tree[1:] != tree[:-1])), len(tree)).astype(np.int64)

    def told(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> compile_native.Segments:
        """Returns the arguments of `segments.h` for rows [N, heads, D]."""
        arrays = (self._start, self._length, self._begin, self._deep, self._above, self._first)
        sizes = (len(self._start), len(self._first) - 1, *query.shape[:2], *key.shape[1:], value.shape[2])
        return compile_native.Segments(*(x.ctypes.data for x in arrays), *sizes, window or 0, scaling)


class _Attention(torch.autograd.Function):
    """Rows of queries [N, H, D], keys and values [N, K, D] to [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float, window: int | None
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        count, heads, _ = query.shape
        out, total = query.new_empty(count, heads, value.shape[2]), query.new_empty(count, heads)
        # `total` [N, H] is log sum exp of each query's scores: with it the backward pass makes the weights again.
        arguments, rows = runs.told(query, key, value, scaling, window), (query, key, value, out, total)
        _check_memory(compile_native.library().segments_forward(ctypes.byref(arguments), *addresses(*rows)))
        ctx.save_for_backward(*rows)
        ctx.of = runs, scaling, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = saved = ctx.saved_tensors
        runs, scaling, window = ctx.of
        (count, heads, _), kv_heads = query.shape, key.shape[1]
        dquery = torch.empty_like(query)
        # One gradient for each query head, since threads may share the keys; they are summed below, in a fixed order.
        dkey, dvalue = (x.new_zeros(count, heads, x.shape[2]) for x in (key, value))
        arguments = runs.told(query, key, value, scaling, window)
        grad = grad.contiguous()
        rows = addresses(*saved, grad, dquery, dkey, dvalue)
        _check_memory(compile_native.library().segments_backward(ctypes.byref(arguments), *rows))
        if heads != kv_heads:
            dkey, dvalue = (x.view(count, kv_heads, heads // kv_heads, -1).sum(2) for x in (dkey, dvalue))
        return dquery, dkey, dvalue, None, None, None


def _check_memory(failed: int) -> None:
    """MemoryError where the compiled code returns that it had no memory for its block of scores."""
    if failed:
        raise MemoryError("attention ran out of memory: use fewer tokens a pass or shorter answers")


def attend(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float, window: int | None) -> Tensor:
    """Attention of float32 rows on the CPU: query [N, H, D], key and value [N, K, D] -> [N, H, D].

    Raises:
        EngineError: the compiled code differs from the plain definition by more than rounding, on its first use.
        MemoryError: there is no room for one block of scores.
    """
    _proved(query.shape[1], key.shape[1], query.shape[2], value.shape[2], window is not None)
    return _Attention.apply(query, key, value, runs, scaling, window)  # pyright: ignore[reportReturnType]


@functools.cache
def _proved(*shape: Any) -> None:
    """`_prove`, once for each shape, in a thread of its own: where a layer is computed again in the backward pass,
    torch counts the tensors that the thread of the forward pass saves."""
    in_thread(_prove, *shape).result()


def _prove(heads: int, kv_heads: int, width: int, out_width: int, windowed: bool) -> None:
    """EngineError where outputs or gradients of a small tree differ from the plain definition by more than rounding."""
    # Four runs: a root, two below it (the longer one is longer than a block of 32 queries), and a segment alone. Scores
    # of both kinds are met: within a run, and above it.
    length, window = np.array([5, 37, 18, 2]), 9 if windowed else None
    start = np.cumsum(length) - length
    above = [np.arange(0), np.arange(5), np.arange(4), np.arange(0)]
    runs, count = Runs(start, length, above), int(length.sum())
    sees = torch.zeros(count, count, dtype=torch.bool)
    for s, n, a in zip(start.tolist(), length.tolist(), above, strict=True):
        for i in range(n):
            # All positions above the run, then those of the run up to itself; a window keeps the last of these.
            sees[s + i, [*a.tolist(), *range(s, s + i + 1)][-(window or count) :]] = True
    generator, scaling = torch.Generator().manual_seed(0), width**-0.5
    sizes = (heads, width), (kv_heads, width), (kv_heads, out_width), (heads, out_width)
    rows = [torch.randn(count, h, d, generator=generator) for h, d in sizes]
    ours = [x.clone().requires_grad_() for x in rows[:3]]
    theirs = [x.double().requires_grad_() for x in rows[:3]]
    ours_out = _Attention.apply(*ours, runs, scaling, window)
    q, k, v = (x.transpose(0, 1)[None] for x in theirs)
    wanted = reference_ops.attention(q, k, v, sees, scaling, None)[0].transpose(0, 1)
    our_results = [ours_out, *torch.autograd.grad(ours_out, ours, rows[3])]  # pyright: ignore[reportArgumentType,reportCallIssue]
    right_results = [wanted, *torch.autograd.grad(wanted, theirs, rows[3].double())]
    for name, a, b in zip(("outputs", "dq", "dk", "dv"), our_results, right_results, strict=True):
        gap = float((a.detach() - b.detach()).abs().max() / b.detach().abs().max())
        # Written as `not <=`, so that NaN is refused as well.
        if not gap <= PROOF:
            raise EngineError(
                f"compiled attention of {heads} heads of width {width} differs from its definition by {gap:.3g} of the"
                f" largest number ({name}; bound {PROOF}): report it, and set model.kernels=torch meanwhile"
            )
