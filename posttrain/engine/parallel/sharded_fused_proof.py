"""The proof of fused layers over ranks: what `training_layers` compares of a whole model, where its weights come
together a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.core.exchange.ranks import Ranks
from posttrain.engine.head.readout import ReadOut, read_out
from posttrain.engine.layers.attention import PackedLayout, using
from posttrain.engine.layers.fused_layers import BOUND, CANARY, FusedReadOut, sample_states
from posttrain.system.errors import EngineError


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
    asked = dict[str, Any]()
    hook = out.layers[0].register_forward_pre_hook(
        lambda layer, given, named: asked.update(given=given, named=named), with_kwargs=True
    )
    try:
        found = [[_states(read, inside)] for read in (out, read_out(module))]
    finally:
        hook.remove()
    for parts, replaced in zip(found, (True, False), strict=True):
        parts += _gradients(out, inside, own, asked, replaced)
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


@torch.no_grad()
def _states(read: ReadOut, inside: Callable[..., Any]) -> Tensor:
    """Hidden states of one sequence, of all layers."""
    return inside(lambda: sample_states(read))


def _gradients(
    out: FusedReadOut, inside: Callable[..., Any], own: dict[str, nn.Parameter], asked: dict[str, Any], replaced: bool
) -> list[Tensor]:
    """Returns the output of the first layer for the input that it was given, and the gradients of one weighted sum of
    this output: this rank's parts. A pass of all layers would need the gradients of all."""

    def layer() -> Tensor:
        with using(PackedLayout([CANARY])), out.replaced() if replaced else nullcontext():
            made = out.layers[0](*asked["given"], **asked["named"])
        return made[0] if isinstance(made, tuple) else made

    with torch.enable_grad():
        made = inside(layer)
        if made.requires_grad:
            by = torch.arange(made.numel(), dtype=made.dtype).sin().view_as(made)
            (made * by).sum().backward()
    gradients = [p.grad for p in own.values() if p.grad is not None]
    for p in own.values():
        p.grad = None
    return [made.detach(), *gradients]
