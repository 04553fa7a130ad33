"""The two operations on a tile of scores (`engine.head.tiles`) by compiled code, in float32 on the CPU. Each reads the
scores once from memory, where torch's operations read or write them three to eight times."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from posttrain.engine.cpu import compile_native
from posttrain.engine.head import tiles
from posttrain.engine.head.tiles import TileForm
from posttrain.system.errors import EngineError

BOUND = 1e-5
"""Largest difference from torch's operations, relative to the largest number."""
WIDTH = 83
"""Ids of the small tile on which both are compared: no multiple of the width of a vector."""


def fold(z: Tensor, want_entropy: bool, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `TileForm.fold`. Masked scores need no other path."""
    z = z.contiguous()
    most, mass, spread = z.new_empty(3, len(z))
    to = spread.data_ptr() if want_entropy else None
    compile_native.library().fold_rows(z.data_ptr(), most.data_ptr(), mass.data_ptr(), to, *z.shape)
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
    z, rows = z.contiguous(), [norm.contiguous(), by_logp.sum(1)]
    if by_entropy is not None:
        rows += [by_entropy.contiguous(), entropy.contiguous()]
    assert out.is_contiguous() and all(x.dtype == torch.float32 for x in (z, out, *rows))
    addresses = [x.data_ptr() for x in rows] if by_entropy is not None else [*(x.data_ptr() for x in rows), None, None]
    compile_native.library().cotangent_rows(z.data_ptr(), *addresses, out.data_ptr(), *z.shape)
    return tiles.with_named(out, named, by_logp)


NATIVE = TileForm(fold, cotangent)


@cache
def proved() -> TileForm:
    """The compiled form, after it agreed with torch's operations on a small case.

    Raises:
        EngineError: it does not agree.
    """
    gap = tiles.largest_gap(NATIVE, torch.device("cpu"), torch.float32, WIDTH)
    if not gap <= BOUND:
        raise EngineError(
            f"the head's compiled code differs from torch's operations by {gap:.2g} of the largest number, and"
            f" {BOUND:.0e} is allowed: report it, and set model.kernels=torch meanwhile"
        )
    return NATIVE
