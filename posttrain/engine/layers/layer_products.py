"""Products of a layer's input with its weights, forward and backward, by the library that is faster on this processor.

Torch multiplies float32 matrices by MKL, which is slower on processors of other makers than Intel. There oneDNN, which
is a part of torch too, needs a tenth to a quarter less time (an AMD Zen 4 with AVX-512, 2 threads, 14,336 rows: 181 to
223 against 154 to 186 GFLOP/s). The gradient of a weight is a sum over rows. For it oneDNN is as fast only if one of
the two matrices is transposed before: 197 to 217 against 157 to 191 GFLOP/s. Even with the transposition it takes less
time than MKL.

Axis letters: N rows, E and F widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.engine.cpu import compile_native
from posttrain.system.machine import processor

FEW = 8
"""With at most this many rows torch's own product is taken: the bits of oneDNN's may depend on threads or rows."""
MANY, WIDE = 512, 64
"""Fewest rows, and least widths of a weight, for which a transposition makes the gradient of the weight faster."""


def _is_faster() -> bool:
    """Returns whether oneDNN is there, and this is a processor on which it was measured to be faster than MKL."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return {"AuthenticAMD", "avx512f"} <= set(processor().split())


ONE_DNN = _is_faster()


def _takes_one_dnn(x: Tensor) -> bool:
    """Returns whether oneDNN multiplies this input: it is the faster one here, and the input has enough rows."""
    return ONE_DNN and x.numel() > FEW * x.shape[-1]


def fits(*given: Tensor | None) -> bool:
    """Returns whether `linear` may multiply these tensors: plain float32 tensors on the CPU that need no gradient."""
    tensors = [t for t in given if t is not None]
    # The type itself and no subclass: a distributed or quantised tensor multiplies in its own way.
    plain = all(type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu for t in tensors)
    return plain and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + b of float32 numbers on the CPU, without a gradient: [N, E] and [F, E] -> [N, F]."""
    if not _takes_one_dnn(x):
        return F.linear(x, weight, bias)
    # This operation has no derivative, so callers are outside of autograd, or write the backward pass themselves. It
    # could apply a function to the product: "none".
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def added(total: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """total + x @ W: [N, F] and [F, E] -> [N, E]; None counts as zero. The memory of `total` may be written over."""
    if not _takes_one_dnn(x):
        return x @ weight if total is None else total.addmm_(x, weight)
    if total is None:
        return linear(x, weight.t())
    return torch.ops.mkldnn._linear_pointwise.binary(x, total, weight.t(), None, "add")


def transposed(x: Tensor) -> Tensor:
    """[N, E] -> [E, N], as a copy by the compiled code."""
    x = x.contiguous()
    out = x.new_empty(x.shape[1], x.shape[0])
    compile_native.library().transposed(x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def summed(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """g.T @ x of each of these gradients g: [N, F] and [N, E] -> [F, E]."""
    if not ONE_DNN or len(x) < MANY or min(t.shape[1] for t in (x, *grads)) < WIDE or compile_native.missing():
        return [g.t() @ x for g in grads]
    # The narrower side is transposed: g.T @ x is `linear` of g.T and x.T, or (x.T @ g).T, transposed back.
    if x.shape[1] >= sum(g.shape[1] for g in grads):
        return [linear(transposed(g), x.t()) for g in grads]
    transposed_x = transposed(x)
    return [transposed(linear(transposed_x, g.t())) for g in grads]


class Products(torch.autograd.Function):
    """x @ W.T + b for several W and b (None: no bias) of one input x. In the backward pass every product adds to the
    gradient of x in the order of the arguments, where torch makes one gradient for each and adds these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        # `needed`: who needs a gradient, x, then weight and bias of each product by turns.
        needed, weights = ctx.needs_input_grad, parts[::2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(needed[1::2]) else None, *(weights if needed[0] else ()))
        outs = tuple(linear(x, w, b) for w, b in zip(weights, parts[1::2], strict=True) if w is not None)
        # An output that depends on nothing trained asks for no gradient, so what reads it keeps nothing for one.
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outs) if not (needed[0] or any(needed[2 * i + 1 :][:2]))))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, (x, *weights) = ctx.needs_input_grad, ctx.saved_tensors
        flat = {i: g.reshape(-1, g.shape[-1]) for i, g in enumerate(grads) if g is not None}  # others led to nothing
        trained = [i for i in flat if needed[1 + 2 * i]]
        dx, of_weights, of_biases = None, dict[int, Tensor](), dict[int, Tensor]()
        for i, g in flat.items():
            if needed[0]:
                # In the order of the arguments, so the bits do not depend on the order in which gradients arrive.
                dx = added(dx, g, weights[i])
            if needed[2 + 2 * i]:
                of_biases[i] = g.sum(0)
        if trained:
            of_weights = dict(zip(trained, summed([flat[i] for i in trained], x.reshape(-1, x.shape[-1])), strict=True))
        if dx is not None:
            # x may not have been kept. Every gradient has its leading axes.
            dx = dx.view(*next(g for g in grads if g is not None).shape[:-1], -1)
        return dx, *(of_kind.get(i) for i in range(len(grads)) for of_kind in (of_weights, of_biases))


def products(x: Tensor, *modules: nn.Module) -> Sequence[Tensor]:
    """Returns the output of each of these modules for x, computed together where all are plain products."""
    if x.dtype != torch.float32 or not all(is_product(m) for m in modules):
        return [m(x) for m in modules]
    return Products.apply(x, *(t for m in modules for t in (m.weight, m.bias)))  # pyright: ignore[reportReturnType]


def is_product(module: Any) -> bool:
    """Returns whether a module is `nn.Linear` itself, with whole float32 weights, and calling it does nothing else."""
    # A module that is wrapped, hooked or compiled does more in its call than multiply.
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    parameters = (module.weight,) if module.bias is None else (module.weight, module.bias)
    return all(type(t) is nn.Parameter and t.dtype == torch.float32 for t in parameters)
