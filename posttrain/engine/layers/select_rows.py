"""Rows of hidden states at some positions, with a gradient that costs one pass over these rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


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
        once = torch.ones(len(at), dtype=torch.bool, device=at.device)
        once[again] = False
        out.index_copy_(0, at[once], grad[once])
        return out.index_add_(0, at[again], grad[again]), None, None


def rows_at(rows: Tensor, at_M: np.ndarray) -> Tensor:
    """[M, H]: rows [N, H] at these places, of which some may come again."""
    _, first = np.unique(at_M, return_index=True)
    again = np.setdiff1d(np.arange(len(at_M)), first)
    return SelectRows.apply(
        rows,
        torch.from_numpy(at_M.astype(np.int64)).to(rows.device),
        torch.from_numpy(again).to(rows.device) if len(again) else None,
    )  # pyright: ignore[reportReturnType]
