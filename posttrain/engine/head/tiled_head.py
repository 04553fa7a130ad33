"""The head's autograd function over tiles of scores (`engine.head.tiles`), and the forms in which it is computed.

Axis letters: M spoken tokens, V vocabulary, H hidden width, C tokens and B ids of one tile, K named ids of a token.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.engine.head import reference_ops
from posttrain.engine.head.kernel_table import Kernel, add_forms, in_c
from posttrain.engine.head.logit_transform import LogitSlope, LogitTransform, logit_dtype
from posttrain.engine.head.tiles import NATIVE_BOUND, TORCH, RunningSoftmax, Tile, TileForm, native, within


def block_of(
    weight: Tensor, bias: Tensor | None, first: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The rows of weight and bias for the ids `first` to `first + width`, converted to `dtype`."""
    return weight[first : first + width].to(dtype), None if bias is None else bias[first : first + width].to(dtype)


def picked(x: Tensor, named: Tensor) -> Tensor:
    """[C, K]: the numbers of the named ids in a block [C, B]; 0 for an id outside of it."""
    place, inside = within(named, x.shape[1])
    return x.gather(1, place).masked_fill_(~inside, 0)


class TiledHead(torch.autograd.Function):
    """The head's autograd function. It saves its inputs, the normaliser and the entropy [M], and the backward computes
    each tile's scores again unless they were kept. The outer loop is over the vocabulary, so a block of the weight is
    converted once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        named: Tensor,
        transform: LogitTransform,
        want_entropy: bool,
        tile: Tile,
        form: TileForm,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs in the shape of `named`, [M] or [M, K], and the entropy [M]; empty where it is not wanted."""
        # The vocabulary is the outer loop: a block of a bfloat16 head is converted once, and serves all tokens.
        dtype, scores = logit_dtype(weight.dtype), list[Tensor]()
        named_MK = named if named.ndim == 2 else named[:, None]
        named_logits = torch.zeros(named_MK.shape, dtype=dtype, device=hidden.device)
        running = RunningSoftmax(hidden.new_empty(len(named), dtype=dtype), want_entropy)
        for first in range(0, weight.shape[0], tile.ids):
            w, b = block_of(weight, bias, first, tile.ids, dtype)
            for at in range(0, len(hidden), tile.rows):
                rows = slice(at, min(at + tile.rows, len(hidden)))
                z = transform.scores(hidden[rows].to(dtype), w, b, at, None, first)
                scores += [z] if tile.kept else []
                # A named id lies in one block, and the others add 0 for it.
                named_logits[rows] += picked(z, named_MK[rows] - first)
                running.add(rows, *form.fold(z, want_entropy, transform.masked))
        norm, entropy = running.norm(), running.entropy()
        entropy = norm.new_empty(0) if entropy is None else entropy
        ctx.save_for_backward(hidden, weight, bias, named_MK, norm, entropy, *scores)
        ctx.transform, ctx.tile, ctx.form = transform, tile, form
        ctx.set_materialize_grads(False)  # an entropy that no loss reads costs nothing in the backward
        return named_logits.sub_(norm[:, None]).view(named.shape), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, named_MK, norm, entropy, *kept_scores = ctx.saved_tensors
        transform, tile, dtype = ctx.transform, ctx.tile, logit_dtype(weight.dtype)
        # Temperature and scale multiply all numbers of a tile, so both are one factor, whatever stands between them.
        factor, scores = transform.beta * transform.scale, iter(kept_scores)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        of_logp, of_entropy = grads
        by_logp = norm.new_zeros(named_MK.shape) if of_logp is None else of_logp.reshape(named_MK.shape)
        grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if bias is not None and need_bias else None
        # The same tiles in the same order, so that scores kept by the forward pass come as they are needed. Where none
        # are kept, the gradient is written over the scores (`to`): a tile is all the memory there is.
        for first in range(0, weight.shape[0], tile.ids):
            w, b = block_of(weight, bias, first, tile.ids, dtype)
            sum_w = None if grad_weight is None else _sum_for(grad_weight, first, tile.ids, dtype)
            sum_b = None if grad_bias is None else _sum_for(grad_bias, first, tile.ids, dtype)
            for at in range(0, len(hidden), tile.rows):
                rows = slice(at, min(at + tile.rows, len(hidden)))
                h, slopes = hidden[rows].to(dtype), list[LogitSlope]()
                z = next(scores) if tile.kept else transform.scores(h, w, b, at, slopes, first)
                by = by_logp[rows], None if of_entropy is None else of_entropy[rows], entropy[rows]
                to = torch.empty_like(z) if tile.kept else z
                d = ctx.form.cotangent(z, norm[rows], named_MK[rows] - first, *by, transform.masked, to)
                # the chain rule through what made z, from the softmax back to the product: penalties, then the soft-cap
                for slope in reversed(slopes):
                    slope.times(d)
                if factor != 1:
                    d.mul_(factor)
                # The first block writes and the others add, so the memory need not be zero before.
                if grad_hidden is not None and first == 0:
                    torch.mm(d, w, out=grad_hidden[rows])
                elif grad_hidden is not None:
                    grad_hidden[rows].addmm_(d, w)
                if sum_w is not None:
                    sum_w.addmm_(d.t(), h)
                if sum_b is not None:
                    sum_b.add_(d.sum(0))
            for gradient, part in ((grad_weight, sum_w), (grad_bias, sum_b)):
                # A narrower gradient is rounded once for all tokens, not once a tile.
                if gradient is not None and part is not None and gradient.dtype != dtype:
                    gradient[first : first + tile.ids] = part
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *(None,) * 5


def _sum_for(grad: Tensor, first: int, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros to add a block's gradient to: its part of `grad`, or numbers of more precision, to be copied into it."""
    part = grad[first : first + width]
    return part.zero_() if grad.dtype == dtype else torch.zeros_like(part, dtype=dtype)


def _triton_head(hidden: Tensor, weight: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """The head by tiles with Triton's kernels. EngineError where they do not agree with torch's operations on this
    device; they are compared before they are first used."""
    from posttrain.engine.head.triton_tiles import proved

    return TiledHead.apply(hidden, weight, *inputs, proved(hidden.device, logit_dtype(weight.dtype)))


def _no_triton() -> str:
    """Returns why Triton cannot be used; '' where it is installed."""
    return "" if find_spec("triton") else "triton is not installed"


_BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}
add_forms(
    "head",
    in_c(lambda *inputs: TiledHead.apply(*inputs, native()), NATIVE_BOUND),
    Kernel("compiled", _triton_head, devices=("cuda",), bounds=_BOUNDS, missing=_no_triton),
    Kernel("torch", lambda *inputs: TiledHead.apply(*inputs, TORCH), bounds=_BOUNDS),
    Kernel("reference", reference_ops.head),
)
