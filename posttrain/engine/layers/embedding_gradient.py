"""Gradients that hold few rows: of hidden states at some positions, and of the weight that turns tokens into vectors.

`SelectRows` selects hidden states at some positions. Its backward costs one pass over the rows that are read.

For an embedding autograd makes a gradient of all V rows, mostly zeros: half a gigabyte at 151,936 ids and 896 columns.
Where the head shares the weight, it makes two and adds them. Here the look-up is a node of its own (`LookedUp`), which
adds its few rows to the head's gradient in place. Where no head reads the hidden states, the gradient holds the rows
that were read and nothing else (`core.exchange.row_gradient`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class SelectRows(torch.autograd.Function):
    """Select rows [N, H] at positions [M]. The backward writes the first gradient of a row and adds further ones, which
    are few: only segments that begin alike read a row twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor, again: Tensor | None) -> Tensor:
        """`again` [J]: the indices into `at` that repeat an earlier one; None: there are none."""
        ctx.save_for_backward(at, again)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        at, again = ctx.saved_tensors
        grad = grads[0]
        out = grad.new_zeros(ctx.rows, grad.shape[1])
        if again is None:
            return out.index_copy_(0, at, grad), None, None
        # `index_copy_` may not meet a row twice: which gradient stays would be left to chance. Firsts are copied, which
        # is quicker than adding to zeros, and only repeats are added.
        is_first = torch.ones(len(at), dtype=torch.bool, device=at.device)
        is_first[again] = False
        out.index_copy_(0, at[is_first], grad[is_first])
        return out.index_add_(0, at[again], grad[again]), None, None


def rows_at(rows: Tensor, at_M: np.ndarray) -> Tensor:
    """[M, H]: rows [N, H] at these places, in which a place may stand twice."""
    _, first = np.unique(at_M, return_index=True)
    again = np.setdiff1d(np.arange(len(at_M)), first)
    return SelectRows.apply(
        rows,
        torch.from_numpy(at_M.astype(np.int64)).to(rows.device),
        torch.from_numpy(again).to(rows.device) if len(again) else None,
    )  # pyright: ignore[reportReturnType]


WORTH = 1 << 22
"""Least size of a weight, in numbers, whose gradient may hold some rows alone."""
PART = 4
"""Such a gradient is made where at most 1 / PART of the rows were read."""


class LookedUp(torch.autograd.Function):
    """(rows [..., H] of a weight [V, H] at `ids`, the weight itself, for the head). The row `padding` gets nothing from
    the look-up, as in `nn.Embedding`. `by_rows`: the gradient may be one of rows, where no head read the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, by_rows: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.by_rows = weight.shape, padding, by_rows
        ctx.set_materialize_grads(False)  # a pass whose head is not read has no gradient of it
        # The second output is the weight, as a view of this node: so the head's gradient arrives here too.
        return nn.functional.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (ids,) = ctx.saved_tensors
        of_rows, of_weight = grads
        if of_rows is None:
            return of_weight, None, None, None
        if of_weight is None and not ctx.by_rows:
            return _whole(of_rows, ids, ctx.shape, ctx.padding), None, None, None
        # The gradient of the F distinct ids that were read, [F, H], by torch's own sum over equal ids.
        read_ids, place = torch.unique(ids, return_inverse=True)
        if of_weight is None and len(read_ids) * PART > ctx.shape[0]:
            return _whole(of_rows, ids, ctx.shape, ctx.padding), None, None, None
        rows = torch.ops.aten.embedding_dense_backward(of_rows, place, len(read_ids), -1, False)  # -1: no padding
        if ctx.padding is not None:
            rows.masked_fill_((read_ids == ctx.padding)[:, None], 0)
        if of_weight is None:
            sparse = torch.sparse_coo_tensor(read_ids[None], rows, ctx.shape, check_invariants=False, is_coalesced=True)
            return sparse, None, None, None
        # the head made this gradient for this node alone
        return of_weight.index_add_(0, read_ids, rows.to(of_weight.dtype)), None, None, None


class LookUp:
    """The look-up of a model's embedding: inside `looked_up` it is `LookedUp`, and `take` gives its weight to the head.

    Args:
        shared: whether the head reads the same weight.
    """

    def __init__(self, embedding: nn.Embedding, shared: bool) -> None:
        self._embedding, self._shared = embedding, shared
        self._for_head: Tensor | None = None
        self._by_rows = False

    @staticmethod
    def of(decoder: nn.Module, head: nn.Module) -> LookUp | None:
        """Returns the look-up of the decoder's embedding; None where the embedding is not torch's plain one."""
        find: Any = getattr(decoder, "get_input_embeddings", None)
        try:
            embedding = None if find is None else find()
        except NotImplementedError:  # transformers' answer for an architecture without one
            return None
        if type(embedding) is not nn.Embedding:
            return None
        plain = embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq
        return LookUp(embedding, embedding.weight is getattr(head, "weight", None)) if plain else None

    @contextmanager
    def headless(self) -> Iterator[None]:
        """Inside, no head reads the hidden states, and the gradient of a large weight may be one of rows."""
        before, self._by_rows = self._by_rows, self._embedding.weight.numel() >= WORTH
        try:
            yield
        finally:
            self._by_rows = before

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Inside, the embedding's look-up is `LookedUp`, if the pass computes a gradient and this makes it smaller."""
        module, self._for_head = self._embedding, None
        # A forward that somebody else has put there must run, and hooks may change the rows: both are left as they are.
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        trains = torch.is_grad_enabled() and module.weight.requires_grad
        if hooked or not trains or not (self._shared or self._by_rows):
            yield
            return
        module.__dict__["forward"] = self._look_up
        try:
            yield
        finally:
            del module.__dict__["forward"]

    def take(self) -> Tensor | None:
        """Returns the weight as an output of the last pass's look-up, for the head; None where there is none."""
        # Given once, so that no later head reads a node of a graph that is gone.
        weight, self._for_head = self._for_head, None
        return weight

    def _look_up(self, ids: Tensor) -> Tensor:
        """Stands in place of the embedding's forward. Keeps the weight for the head where both share it."""
        out: Any = LookedUp.apply(self._embedding.weight, ids, self._embedding.padding_idx, self._by_rows)
        rows, weight = out
        self._for_head = weight if self._shared else None
        return rows


def _whole(of_rows: Tensor, ids: Tensor, shape: torch.Size, padding: int | None) -> Tensor:
    """The gradient of all rows."""
    return torch.ops.aten.embedding_dense_backward(of_rows, ids, shape[0], -1 if padding is None else padding, False)
