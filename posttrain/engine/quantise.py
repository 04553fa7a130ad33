"""Frozen weights in 8 bits beneath an adapter. Learner, reference and engine multiply with the same 8-bit numbers.

Row r of a weight W is held as whole numbers q between -127 and 127 and one float32 scale s, the largest size in the row
divided by 127: W is about s q. torchao's weight-only int8 is the same but for its divisor, 127.5. Its product keeps a
float copy of every weight for the backward pass, so training would take more memory than without it. This one keeps
the 8-bit numbers, and makes the float form of one layer at a time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.core.errors import ConfigError
from posttrain.engine.readout import read_out

LARGEST = 127
"""Largest size of a stored number."""
LEAST = torch.finfo(torch.float32).eps
"""Scale of a row of zeros."""


class Int8Linear(nn.Linear):
    """A linear layer whose weight is 8-bit numbers, and never trains."""

    scale: nn.Parameter

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias)

    @staticmethod
    def of(layer: nn.Linear) -> Int8Linear:
        """The nearest 8-bit layer. Its bias is the layer's own."""
        codes, scale = rounded(layer.weight.detach())
        layer.requires_grad_(False)
        return Int8Linear(codes, scale, cast("nn.Parameter | None", layer.bias))

    def forward(self, input: Tensor) -> Tensor:
        y = cast("Tensor", _Product.apply(input, self.weight, self.scale))
        return y if self.bias is None else y + self.bias

    def float_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: s q, computed in float64."""
        return (self.weight.double() * self.scale.double()[:, None]).to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


class _Product(torch.autograd.Function):
    """x W', with W = s q. Only the codes and the scales are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return ((x @ codes.to(x.dtype).t()) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        (grad,) = grads
        return (grad * scale).to(grad.dtype) @ codes.to(grad.dtype), None, None


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], float32 [out]): the nearest multiples of each row's scale."""
    w = weight.float()
    scale = (w.abs().amax(1) / LARGEST).clamp(min=LEAST)
    return (w / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def quantise(module: PreTrainedModel) -> None:
    """Put 8-bit layers in the place of the decoder's linear layers, in place. The head, embeddings and norms stay.

    Raises:
        ConfigError: it has linear layers of another kind, or none.
    """
    head = read_out(module).head
    if strange := [n for n, part in module.named_modules() if isinstance(part, Conv1D)]:
        raise ConfigError(
            f"model.quantize=int8: {type(module).__name__} computes with Conv1D ({strange[0]}), which is not offered in"
            " 8 bits. Leave model.quantize out"
        )
    found = [n for n, part in module.named_modules() if type(part) is nn.Linear and part is not head]
    if not found and not is_quantised(module):
        raise ConfigError(
            f"model.quantize=int8: {type(module).__name__} has no linear layers but its head. Leave model.quantize out"
        )
    for name in found:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        _put(module, name, Int8Linear.of(layer))


def is_quantised(module: nn.Module) -> bool:
    return any(isinstance(part, Int8Linear) for part in module.modules())


def float_layer(layer: Any, dtype: torch.dtype) -> Any:
    """The plain layer that multiplies with the same numbers; the layer itself where it is not an 8-bit one."""
    if not isinstance(layer, Int8Linear):
        return layer
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(layer.float_weight(dtype), requires_grad=False)
    plain.register_parameter("bias", layer.bias)
    return plain


def make_float(module: nn.Module, dtype: torch.dtype) -> None:
    """Put plain layers in the place of 8-bit ones, in place: the numbers that they stand for, rounded to `dtype`."""
    for name in [n for n, part in module.named_modules() if isinstance(part, Int8Linear)]:
        _put(module, name, float_layer(module.get_submodule(name), dtype))


def saved_bytes(module: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes that its 8-bit layers take, bytes that they would take in `dtype`)."""
    parts = [part for part in module.modules() if isinstance(part, Int8Linear)]
    return (
        sum(p.weight.nbytes + p.scale.nbytes for p in parts),
        sum(p.weight.numel() * dtype.itemsize for p in parts),
    )


def _put(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
