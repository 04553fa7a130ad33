"""Products of a layer's input with its weights, forward and backward, by the library that is faster on this processor.

Torch multiplies float32 matrices by MKL, which on processors that are not Intel's takes slower ways. There oneDNN,
which torch holds too, needs a tenth to a quarter less time (an AMD Zen 4 with AVX-512, 2 threads, 14,336 rows: 181 to
223 against 154 to 186 GFLOP/s). Sums over rows, as gradients of weights are, stay with MKL, which is faster at them.

Axis letters: N rows, E and F widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.core.machine import processor

FEW = 8
"""Up to so many rows oneDNN's sums may depend on the number of threads or rows; torch's own way is taken."""


def _is_faster() -> bool:
    """Whether oneDNN is there, and this is a processor on which it was measured to be faster than MKL."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return {"AuthenticAMD", "avx512f"} <= set(processor().split())


ONE_DNN = _is_faster()


def _takes_one_dnn(x: Tensor) -> bool:
    return ONE_DNN and x.numel() > FEW * x.shape[-1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + b of float32 numbers on the CPU, without a gradient: [N, E] and [F, E] -> [N, F]."""
    if not _takes_one_dnn(x):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _added(total: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """`total` (None: zero) and x @ W: [N, F] and [F, E] -> [N, E]. `total` is no longer of use."""
    if not _takes_one_dnn(x):
        return x @ weight if total is None else total.addmm_(x, weight)
    if total is None:
        return linear(x, weight.t())
    return torch.ops.mkldnn._linear_pointwise.binary(x, total, weight.t(), None, "add")


class Products(torch.autograd.Function):
    """x @ W.T + b for several W and b (None: no bias) of one input x.

    Torch makes a gradient of x for each product and then adds these. Here every product after the first adds to the
    gradient that there is, in the order of the arguments.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        needed, weights = ctx.needs_input_grad, parts[::2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(needed[1::2]) else None, *(weights if needed[0] else ()))
        outs = tuple(linear(x, w, b) for w, b in zip(weights, parts[1::2], strict=True) if w is not None)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outs) if not (needed[0] or any(needed[2 * i + 1 :][:2]))))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, (x, *weights) = ctx.needs_input_grad, ctx.saved_tensors
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dx, lead, found = None, (), list[Tensor | None]()
        for i, grad in enumerate(grads):
            if grad is None:  # nothing was made of this product
                found += [None, None]
                continue
            g, lead = grad.reshape(-1, grad.shape[-1]), grad.shape[:-1]
            if needed[0]:
                dx = _added(dx, g, weights[i])
            found.append(g.t() @ rows if needed[1 + 2 * i] and rows is not None else None)
            found.append(g.sum(0) if needed[2 + 2 * i] else None)
        return None if dx is None else dx.view(*lead, -1), *found


def products(x: Tensor, *modules: nn.Module) -> Sequence[Tensor]:
    """What each of these modules makes of x, together where all are plain products."""
    if x.dtype != torch.float32 or not all(is_product(m) for m in modules):
        return [m(x) for m in modules]
    return Products.apply(x, *(t for m in modules for t in (m.weight, m.bias)))  # pyright: ignore[reportReturnType]


def is_product(module: Any) -> bool:
    """Whether a module is `nn.Linear` itself, with whole float32 weights, and calling it does nothing else."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    held = (module.weight,) if module.bias is None else (module.weight, module.bias)
    return all(type(t) is nn.Parameter and t.dtype == torch.float32 for t in held)
