"""Proofs of a learner over ranks: fused layers, and shared beginnings, compute what the plain ones do.

One process proves the same of a whole model (`fused_layers`, `shared_prefixes`). Here weights come together only in a
pass of all ranks, so they make a proof together, of the same tokens, and each compares the gradients of its own rows.
`inside` runs a function where weights are whole; `rank_parts` are the rank's parts of every trainable parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import Ranks
from posttrain.core.exchange.row_gradient import square_sum
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.head.readout import CANARY, ReadOut, read_out
from posttrain.engine.layers.attention import PackedLayout, using
from posttrain.engine.layers.fused_layers import BOUND, FusedReadOut, sample_states
from posttrain.engine.layers.shared_prefixes import BOUNDS, SCALES, Sharing, ratio, refusal
from posttrain.system.errors import EngineError, InvariantError

Inside = Callable[[Callable[[], Any]], Any]


def prove_layers(
    module: PreTrainedModel,
    out: ReadOut,
    inside: Inside,
    rank_parts: dict[str, nn.Parameter],
    ranks: Ranks,
) -> None:
    """Compare fused layers with the model's own: hidden states, and the first layer's output and gradients. Every rank
    calls it. Leaves no gradient.

    Args:
        inside: runs a function where weights are whole.
        rank_parts: the rank's part of every trainable parameter.

    Raises:
        EngineError: they differ by more than rounding, on every rank.
    """
    if not isinstance(out, FusedReadOut):
        return
    # The first layer's arguments are recorded in a pass of the whole model, so that it can be run alone afterwards.
    first_layer_input = dict[str, Any]()
    hook = out.layers[0].register_forward_pre_hook(
        lambda layer, given, named: first_layer_input.update(given=given, named=named), with_kwargs=True
    )
    try:
        with torch.no_grad():
            hidden = [inside(lambda read=read: sample_states(read)) for read in (out, read_out(module))]
    finally:
        hook.remove()
    # Each: hidden states, the first layer's output, this rank's parts of its gradients.
    fused, plain = (
        [states, *_first_layer(out, inside, rank_parts, first_layer_input, replaced)]
        for states, replaced in zip(hidden, (True, False), strict=True)
    )
    # A rank may have no row of a weight, and max of nothing is an error.
    gaps = [float((a.double() - b.double()).abs().max()) if len(a) else 0.0 for a, b in zip(fused, plain, strict=True)]
    sizes = [float(b.abs().max()) if len(b) else 0.0 for b in plain]
    # The largest numbers of all ranks, so that every rank takes the same decision: one that raised alone would leave
    # the others waiting. The first layer's output counts with its gradients, on one scale.
    largest = (max(numbers[1:], key=_badness, default=0.0) for numbers in (gaps, sizes))
    table = ranks.every((gaps[0], sizes[0], *largest))
    states_gap, states_size, layer_gap, layer_size = (max(column, key=_badness) for column in zip(*table, strict=True))
    states_size = max(states_size, 1e-30)
    # Numbers that are nothing but rounding are compared with the size of the states, or 0 / 0 would decide.
    gap = max(states_gap / states_size, layer_gap / max(layer_size, 1e-6 * states_size), key=_badness)
    if not gap <= BOUND:
        raise EngineError(
            f"fused layers of {type(module).__name__} differ from its own by {gap:.3g} (bound {BOUND}): report it, and"
            " set model.kernels=reference meanwhile"
        )


def _badness(x: float) -> float:
    """The number to compare by: NaN, which `max` may pass over, counts as infinity."""
    return x if math.isfinite(x) else math.inf


def _first_layer(
    out: FusedReadOut,
    inside: Inside,
    rank_parts: dict[str, nn.Parameter],
    layer_input: dict[str, Any],
    replaced: bool,
) -> list[Tensor]:
    """Returns the output of the first layer for the recorded input, and this rank's parts of the gradients of one
    weighted sum of that output. A pass of all layers would need memory for the gradients of all."""

    def layer() -> Tensor:
        with using(PackedLayout([CANARY])), out.replaced() if replaced else nullcontext():
            output = out.layers[0](*layer_input["given"], **layer_input["named"])
        return output[0] if isinstance(output, tuple) else output

    with torch.enable_grad():
        output = inside(layer)
        if output.requires_grad:
            # A sum with different factors: by a plain sum, errors that cancel would not be seen.
            factors = torch.arange(output.numel(), dtype=output.dtype).sin().view_as(output)
            (output * factors).sum().backward()
    return [output.detach(), *_take_gradients(rank_parts)]


def _take_gradients(rank_parts: dict[str, nn.Parameter]) -> list[Tensor]:
    """The gradients of this rank's parts, which then have none."""
    gradients = [torch.zeros(0) if p.grad is None else p.grad for p in rank_parts.values()]
    for p in rank_parts.values():
        p.grad = None
    return gradients


# --- shared beginnings ------------------------------------------------------------------------------------------------

SHARED, OWN = 12, 4
"""Tokens that the two segments of the proof share, and tokens of each behind these."""


def prove_sharing(
    rows: Sharing,
    inside: Inside,
    rank_parts: dict[str, nn.Parameter],
    ranks: Ranks,
    vocabulary: int,
    context: int,
) -> None:
    """Compare hidden states and gradients of two segments with sharing and without. Leaves no gradient.

    Raises:
        InvariantError: they differ by more than rounding, on every rank.
    """
    packed = _two_segments(vocabulary, context)

    def states_and_gradients(shared: bool, scale: float) -> list[Tensor]:
        """Hidden states, and the gradients of one weighted sum of them: this rank's parts."""
        with torch.enable_grad():
            hidden = inside(lambda: rows.either(packed, shared))
            weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
            if hidden.requires_grad:
                (hidden * (weights * scale)).sum().backward()
        return [hidden.detach(), *_take_gradients(rank_parts)]

    gap, dtype = float("inf"), torch.float32
    for scale in SCALES:
        results = [states_and_gradients(shared, scale) for shared in (True, False)]
        apart = [square_sum(a - b) for a, b in zip(*results, strict=True)]
        size = [square_sum(b) for b in results[1]]
        # Hidden states are whole on each rank. Gradients are cut: their squares are added before the ratio is taken.
        table = ranks.every((apart[0], size[0], sum(apart[1:]), sum(size[1:])))
        gap = max(*(ratio(t[0], t[1]) for t in table), ratio(sum(t[2] for t in table), sum(t[3] for t in table)))
        dtype = results[1][0].dtype
        # In float16 the gradients may overflow. All ranks look at the same table, so all try the next scale or none.
        if all(math.isfinite(t[3]) for t in table):
            break
    rows.proved = True
    bound = BOUNDS.get(dtype, 0.1)
    if not gap <= bound:
        raise InvariantError(refusal(gap, bound))


def _two_segments(vocabulary: int, context: int) -> Packed:
    """Two segments of made-up ids with the same `shared` first ones."""
    shared = min(SHARED, context - OWN)
    # Multiples of a prime. Behind the shared tokens the second segment's ids are one larger.
    ids = [np.arange(shared + OWN) * 7919 + (np.arange(shared + OWN) >= shared) * s for s in (0, 1)]
    mask = np.arange(shared + OWN) >= shared
    # A token that was not said has the log-prob nan and the version -1.
    logp, versions = np.where(mask, 0.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    return Packed.of([Segment((x % vocabulary).astype(np.int32), mask, logp, versions, Sampling()) for x in ids])
