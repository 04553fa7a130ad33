"""The proof of fused layers over ranks: what `training_layers` compares of a whole model, where its weights come
together a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.core.errors import EngineError
from posttrain.core.ranks import Ranks
from posttrain.engine.attention import PackedLayout
from posttrain.engine.readout import ReadOut, read_out
from posttrain.engine.training_layers import BOUND, CANARY, FusedReadOut


def prove_layers(
    module: PreTrainedModel,
    out: ReadOut,
    inside: Callable[[Callable[[], Any]], Any],
    own: dict[str, nn.Parameter],
    ranks: Ranks,
) -> None:
    """Compare hidden states, and gradients of the first layer, of fused layers with those of the model's own. Every
    rank calls it. Leaves no gradient.

    Args:
        inside: runs a function where weights are whole.
        own: the rank's part of every trainable parameter.

    Raises:
        EngineError: they differ by more than rounding, on every rank.
    """
    if not isinstance(out, FusedReadOut):
        return
    ids = {id(p) for p in out.layers[0].parameters()}
    first = {name for name, p in module.named_parameters() if id(p) in ids}
    found = [_computed(read, inside, own, first) for read in (out, read_out(module))]
    apart = [float((a.double() - b.double()).abs().max()) if len(a) else 0.0 for a, b in zip(*found, strict=True)]
    size = [float(b.abs().max()) if len(b) else 0.0 for b in found[1]]
    table = ranks.every((apart[0], size[0], max(apart[1:], default=0.0), max(size[1:], default=0.0)))
    far, states, off, gradients = (max(column, key=_badness) for column in zip(*table, strict=True))
    states = max(states, 1e-30)
    gap = max(far / states, off / max(gradients, 1e-6 * states), key=_badness)
    if not gap <= BOUND:
        raise EngineError(
            f"fused layers of {type(module).__name__} differ from its own by {gap:.3g} (bound {BOUND}): report it, and"
            " set model.kernels=reference meanwhile"
        )


def _badness(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def _computed(read: ReadOut, inside: Callable[..., Any], own: dict[str, nn.Parameter], kept: set[str]) -> list[Tensor]:
    """Hidden states of one sequence, and the gradients of these weights, as far as they train, of one weighted sum of
    them: this rank's parts."""
    at = torch.arange(CANARY)
    with torch.enable_grad():
        hidden = inside(lambda: read.hidden(at * 7919 % read.weight.shape[0], at, PackedLayout([CANARY])))
        if hidden.requires_grad:
            by = torch.arange(hidden.numel(), dtype=hidden.dtype).sin().view_as(hidden)
            (hidden * by).sum().backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad for name, p in own.items() if name in kept]
    for p in own.values():
        p.grad = None
    return [hidden.detach(), *gradients]
