"""One gradient of a weight that both turns tokens into vectors and vectors into scores.

Where embedding and head share a weight [V, H], autograd makes a gradient of that size for each of them and adds the
two. The embedding's is zero but for the tokens that were read. At 151,936 ids and 896 columns it is half a gigabyte.
Here both uses are outputs of one node of the graph, which adds the few rows to the head's gradient in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LookedUp(torch.autograd.Function):
    """(rows [..., H] of a weight [V, H] at `ids`, the weight itself, for the head to read). The gradient of the row
    `padding` gets nothing from the look-up, as in `nn.Embedding`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = weight.shape[0], padding
        ctx.set_materialize_grads(False)  # a pass whose head is not read has no gradient of it
        return nn.functional.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        of_rows, of_weight = grads
        if of_rows is None:
            return of_weight, None, None
        padding = -1 if ctx.padding is None else ctx.padding
        if of_weight is None:
            return torch.ops.aten.embedding_dense_backward(of_rows, ids, ctx.rows, padding, False), None, None
        found, place = torch.unique(ids, return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(of_rows, place, len(found), -1, False)
        if ctx.padding is not None:
            rows.masked_fill_((found == ctx.padding)[:, None], 0)
        # the head made this gradient for this node alone
        return of_weight.index_add_(0, found, rows.to(of_weight.dtype)), None, None


class TiedWeight:
    """The look-up of an embedding whose weight is the head's too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding
        self._for_head: Tensor | None = None

    @staticmethod
    def of(decoder: nn.Module, head: nn.Module) -> TiedWeight | None:
        """None where embedding and head have weights of their own, or the embedding is not torch's plain one."""
        find: Any = getattr(decoder, "get_input_embeddings", None)
        try:
            found = None if find is None else find()
        except NotImplementedError:  # transformers' answer for an architecture without one
            return None
        if type(found) is not nn.Embedding or found.weight is not getattr(head, "weight", None):
            return None
        plain = found.max_norm is None and not found.sparse and not found.scale_grad_by_freq
        return TiedWeight(found) if plain else None

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Inside, the embedding's look-up is `LookedUp`, where a gradient is computed."""
        module, self._for_head = self._embedding, None
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        if hooked or not (torch.is_grad_enabled() and module.weight.requires_grad):
            yield
            return
        module.__dict__["forward"] = self._look_up
        try:
            yield
        finally:
            del module.__dict__["forward"]

    def take(self) -> Tensor | None:
        """The weight for the head that reads the hidden states computed last; None where it has none of its own. It is
        given once."""
        weight, self._for_head = self._for_head, None
        return weight

    def _look_up(self, ids: Tensor) -> Tensor:
        out: Any = LookedUp.apply(self._embedding.weight, ids, self._embedding.padding_idx)
        rows, self._for_head = out
        return rows
