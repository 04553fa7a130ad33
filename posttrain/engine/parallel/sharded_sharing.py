"""The proof of shared beginnings over ranks. Whether a rank's tokens share a beginning depends on the tokens, and a
proof makes passes, which all ranks must make together. So it is made once, on tokens that every rank makes up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import Ranks
from posttrain.core.exchange.row_gradient import square_sum
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.layers.shared_prefixes import BOUNDS, SCALES, Sharing, refusal
from posttrain.system.errors import InvariantError

SHARED, OWN = 12, 4
"""Tokens of the beginning, and behind it in each of the two segments."""


def prove(
    rows: Sharing,
    inside: Callable[[Callable[[], Any]], Any],
    own: dict[str, nn.Parameter],
    ranks: Ranks,
    vocabulary: int,
    context: int,
) -> None:
    """Compare hidden states and gradients with those of the same segments without sharing. Leaves no gradient.

    Args:
        rows: computes hidden states.
        inside: runs a function where weights are whole.
        own: the rank's part of every trainable parameter.

    Raises:
        InvariantError: they differ by more than rounding, on every rank.
    """
    packed = _made_up(vocabulary, context)
    gap, dtype = float("inf"), torch.float32
    for scale in SCALES:
        found = [_computed(rows, inside, own, packed, shared, scale) for shared in (True, False)]
        apart = [square_sum(a - b) for a, b in zip(*found, strict=True)]
        size = [square_sum(b) for b in found[1]]
        table = ranks.every((apart[0], size[0], sum(apart[1:]), sum(size[1:])))
        gap = max(*(_ratio(t[0], t[1]) for t in table), _ratio(sum(t[2] for t in table), sum(t[3] for t in table)))
        dtype = found[1][0].dtype
        if all(math.isfinite(t[3]) for t in table):
            break
    rows.proved = True
    bound = BOUNDS.get(dtype, 0.1)
    if not gap <= bound:
        raise InvariantError(refusal(gap, bound))


def _made_up(vocabulary: int, context: int) -> Packed:
    shared = min(SHARED, context - OWN)
    ids = [np.arange(shared + OWN) * 7919 + (np.arange(shared + OWN) >= shared) * s for s in (0, 1)]
    mask = np.arange(shared + OWN) >= shared
    logp, versions = np.where(mask, 0.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    return Packed.of([Segment((x % vocabulary).astype(np.int32), mask, logp, versions, Sampling()) for x in ids])


def _computed(
    rows: Sharing, inside: Callable[..., Any], own: dict[str, nn.Parameter], packed: Packed, shared: bool, scale: float
) -> list[Tensor]:
    """Hidden states, and the gradients of one weighted sum of them: this rank's parts."""
    with torch.enable_grad():
        hidden = inside(lambda: rows.either(packed, shared))
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
        if hidden.requires_grad:
            (hidden * (weights * scale)).sum().backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad.detach().clone() for p in own.values()]
    for p in own.values():
        p.grad = None
    return [hidden.detach(), *gradients]


def _ratio(apart: float, size: float) -> float:
    gap = (apart / max(size, 1e-60)) ** 0.5
    return gap if gap == gap else float("inf")
