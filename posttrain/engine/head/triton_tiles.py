"""The two operations on a tile of scores (`engine.head.tiles`) as Triton kernels, for a GPU. Each reads the scores
once, where torch's operations read them about ten times.

Import this module only where triton is installed. With TRITON_INTERPRET=1 the kernels run on a CPU, for tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.engine.head import tiles
from posttrain.engine.head.tiles import TileForm
from posttrain.system.errors import EngineError, first_line

COLUMNS = 4096
"""Scores of a row that a program reads at once. A power of 2."""
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}
"""Largest difference from torch's operations, relative to the largest number."""


@triton.jit
def _fold_rows(z, most, mass, spread, width, stride, LOWEST: tl.constexpr, SPREAD: tl.constexpr, COLUMNS: tl.constexpr):
    """One program reads one row; m, S and U as in `engine.head.tiles`. Columns beyond the row count as -inf."""
    # int64, because row times stride passes 2^31 in a large tile.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(z + row * stride + columns, mask=columns < width, other=float("-inf"))
    # The first piece stands before the loop, so that m is finite when the loop subtracts it.
    m = tl.maximum(tl.max(x, 0), LOWEST)
    q = x - m
    p = tl.exp(q)
    s = tl.sum(p, 0)
    u = tl.sum(tl.where(q == float("-inf"), 0.0, p * q), 0)
    for first in range(COLUMNS, width, COLUMNS):
        x = tl.load(z + row * stride + first + columns, mask=first + columns < width, other=float("-inf"))
        new = tl.maximum(tl.max(x, 0), m)
        old_factor = tl.exp(m - new)
        q = x - new
        p = tl.exp(q)
        if SPREAD:
            # U before S, because it reads the old S; see `RunningSoftmax.add`.
            u = old_factor * (u + (m - new) * s) + tl.sum(tl.where(q == float("-inf"), 0.0, p * q), 0)
        s = old_factor * s + tl.sum(p, 0)
        m = new
    tl.store(most + row, m)
    tl.store(mass + row, s)
    if SPREAD:
        tl.store(spread + row, u)


@triton.jit
def _cotangent_rows(
    z, out, norm, total, by_entropy, entropy, width, stride, to, SPREAD: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program writes -(g_logp + g_H (q + H)) p of `COLUMNS` scores of one row. `stride`, `to`: numbers from one row
    of z and of out to the next."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    q = tl.load(z + row * stride + columns, mask=columns < width, other=float("-inf")) - tl.load(norm + row)
    by = tl.load(total + row)
    if SPREAD:
        known = tl.where(q == float("-inf"), 0.0, q)
        d = -(by + tl.load(by_entropy + row) * (known + tl.load(entropy + row))) * tl.exp(q)
    else:
        d = -by * tl.exp(q)
    tl.store(out + row * to + columns, d, mask=columns < width)


def fold(z: Tensor, want_entropy: bool, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `TileForm.fold`. Masked scores need no other path."""
    rows, width = z.shape
    most, mass, spread = z.new_empty(3, rows)
    if rows:
        lowest = torch.finfo(z.dtype).min
        _launch(_fold_rows, (rows,), z, most, mass, spread, width, z.stride(0), lowest, want_entropy, _columns(width))
    return most, mass, spread if want_entropy else None


def cotangent(
    z: Tensor,
    norm: Tensor,
    named: Tensor,
    by_logp: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor,
    masked: bool,
    out: Tensor,
) -> Tensor:
    """See `TileForm.cotangent`."""
    rows, width = z.shape
    total, spread = by_logp.sum(1), by_entropy is not None
    if rows:
        # Without an entropy the kernel reads neither of the last two. They need some address, and `norm` has one.
        row_numbers = (total, norm if by_entropy is None else by_entropy.contiguous(), entropy if spread else norm)
        size = _columns(width)
        sizes = width, z.stride(0), out.stride(0), spread, size
        _launch(_cotangent_rows, (rows, triton.cdiv(width, size)), z, out, norm, *row_numbers, *sizes)
    return tiles.with_named(out, named, by_logp)


TRITON = TileForm(fold, cotangent)


def _columns(width: int) -> int:
    """Scores that a program reads at once, for rows of this width."""
    return min(COLUMNS, triton.next_power_of_2(width))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Runs a Triton kernel on a grid of programs."""
    kernel[grid](*arguments, num_warps=8)


@cache
def proved(device: torch.device, dtype: torch.dtype) -> TileForm:
    """The Triton form, after it agreed with torch's operations on a small case on this device, or EngineError."""
    try:
        # More than one piece of columns and a ragged last one, so that the loop and the masks are compared too.
        gap = tiles.largest_gap(TRITON, device, dtype, COLUMNS + 37)
    except Exception as error:  # a compiler and a driver raise errors of any kind
        raise EngineError(
            f"the head's Triton kernels do not run on {device} ({type(error).__name__}: {first_line(error)}). Set"
            " model.kernels=torch to compute without them"
        ) from error
    # Written as `not <=`, so that NaN is refused as well.
    if not gap <= BOUNDS[dtype]:
        raise EngineError(
            f"the head's Triton kernels differ from torch's operations on {device} by {gap:.2g} of the largest number,"
            f" and {BOUNDS[dtype]:.0e} is allowed. Set model.kernels=torch to compute without them, and report it with"
            f" the versions of torch ({torch.__version__}) and triton ({triton.__version__})"
        )
    return TRITON
