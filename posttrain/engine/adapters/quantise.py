"""Frozen weights in 8 or 4 bits beneath an adapter. Learner, reference and engine multiply with the same numbers.

int8: row r of a weight W is held as whole numbers q between -127 and 127 and one float32 scale s, the largest size in
the row divided by 127: W is about s q. torchao's weight-only int8 is the same but for its divisor, 127.5. torchao's
product keeps a float copy of every weight for the backward pass, so training would take more memory than without
rounding. The product here keeps the 8-bit numbers, and makes the float form of one layer at a time.

nf4: the 4-bit numbers of QLoRA (2305.14314) by torchao, with scales in 8 bits. Its product keeps the 4-bit numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.engine.head.readout import read_out
from posttrain.system.errors import ConfigError

LARGEST = 127
"""Largest absolute value of a stored 8-bit number."""
NF4_BLOCK, NF4_SCALES = 64, 256
"""Numbers that share a scale of nf4, and scales that share a scale of their own (at most)."""
LEAST = torch.finfo(torch.float32).tiny
"""Scale of a row of zeros."""


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is held in few bits, and never trains."""

    @staticmethod
    def of(layer: nn.Linear) -> QuantisedLinear:
        """The nearest such layer. Its bias is the layer's own."""
        raise NotImplementedError

    def float_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: what the held numbers stand for."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {quantised_as(self)}"


class Int8Linear(QuantisedLinear):
    """A weight of 8-bit numbers, with a scale for each row."""

    scale: nn.Parameter

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        # nn.Linear's own __init__ would allocate a float weight of full size. The class stays a linear layer, so that
        # PEFT takes it for one.
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias)

    @staticmethod
    def of(layer: nn.Linear) -> Int8Linear:
        # The bias is shared with the layer that is replaced, and frozen with it.
        codes, scale = rounded(layer.weight.detach())
        layer.requires_grad_(False)
        return Int8Linear(codes, scale, cast("nn.Parameter | None", layer.bias))

    def forward(self, input: Tensor) -> Tensor:
        y = cast("Tensor", _Product.apply(input, self.weight, self.scale))
        return y if self.bias is None else y + self.bias

    def float_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """s q, computed in float64, where it is exact: the type that is asked for is rounded to once."""
        return (self.weight.double() * self.scale.double()[:, None]).to(dtype)


class Nf4Linear(QuantisedLinear):
    """A weight of 4-bit numbers, two in a byte, in the parts of torchao's tensor. The codes are `weight`."""

    def __init__(self, layer: nn.Linear, blocks: int) -> None:
        from torchao.quantization import to_nf4

        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        tensor: Any = to_nf4(layer.weight.detach().contiguous(), NF4_BLOCK, blocks)
        # torchao's weight is a tensor subclass. Its parts become plain parameters, which fingerprints, safetensors and
        # copies between devices can read (`_nf4_tensor`).
        self._names, self._context = tensor.__tensor_flatten__()
        for name in self._names:
            part = getattr(tensor, name).clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(part, requires_grad=False)
            self.register_parameter("weight" if name == "quantized_data" else name, parameter)
        self.register_parameter("bias", cast("nn.Parameter | None", layer.bias))

    @staticmethod
    def of(layer: nn.Linear) -> Nf4Linear:
        """ConfigError where the weight cannot be cut into blocks."""
        count, remainder = divmod(layer.weight.numel(), NF4_BLOCK)
        if remainder:
            raise ConfigError(
                f"model.quantize=nf4 holds weights in blocks of {NF4_BLOCK}, and a layer of this model has"
                f" {layer.out_features} x {layer.in_features} numbers. Take int8"
            )
        layer.requires_grad_(False)
        # The scales are cut into blocks of equal size too, so the block size must divide their number.
        return Nf4Linear(layer, math.gcd(count, NF4_SCALES))

    def forward(self, input: Tensor) -> Tensor:
        y = nn.functional.linear(input, self._nf4_tensor())
        return y if self.bias is None else y + self.bias

    def float_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that torchao makes of the 4-bit numbers, rounded to `dtype`."""
        return self._nf4_tensor().get_original_weight().to(dtype)

    def _nf4_tensor(self) -> Any:
        """torchao's tensor over the parts."""
        from torchao.quantization import NF4Tensor

        parts = {n: getattr(self, "weight" if n == "quantized_data" else n).detach() for n in self._names}
        return NF4Tensor.__tensor_unflatten__(parts, self._context, None, None)


class _Product(torch.autograd.Function):
    """x W', with W = s q. Only the codes and the scales are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        # An int8 code is exact in bfloat16 and float16 (127 < 2**8), so the codes are multiplied as they are and the
        # scale, one for each output, is applied to the product: no float form of s q is kept. The inputs are not kept
        # either, because no weight here has a gradient.
        ctx.save_for_backward(codes, scale)
        return ((x @ codes.to(x.dtype).t()) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        (grad,) = grads
        # dL/dx = (dL/dy s) q.
        return (grad * scale).to(grad.dtype) @ codes.to(grad.dtype), None, None


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], float32 [out]): the nearest multiples of each row's scale."""
    w = weight.float()
    # A row of zeros gets a scale above 0, or the quotient below would be 0 / 0.
    scale = (w.abs().amax(1) / LARGEST).clamp(min=LEAST)
    return (w / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


KINDS: Mapping[str, type[QuantisedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}


def quantise(module: PreTrainedModel, kind: str) -> None:
    """Put layers of this kind in the place of the decoder's linear layers, in place. The head, embeddings and norms
    stay, and so do layers that are quantised already.

    Raises:
        ConfigError: it has linear layers of another kind, or none, or ones that do not fit; or torchao is missing.
    """
    if kind == "nf4" and find_spec("torchao") is None:
        raise ConfigError("model.quantize=nf4: torchao is not installed: pip install 'posttrain[nf4]', or take int8")
    head = read_out(module).head
    if strange := [n for n, part in module.named_modules() if isinstance(part, Conv1D)]:
        raise ConfigError(
            f"model.quantize={kind}: {type(module).__name__} computes with Conv1D ({strange[0]}), which is not offered"
            " in few bits. Leave model.quantize out"
        )
    # In an adapted module the matrices A and B are linear layers as well. They train, so they stay float.
    parts = [(n, part) for n, part in module.named_modules() if ".lora_" not in n]
    # The exact class: a quantised layer is a subclass, and is left as it is.
    names = [n for n, part in parts if type(part) is nn.Linear and part is not head]
    if not names and not is_quantised(module):
        raise ConfigError(
            f"model.quantize={kind}: {type(module).__name__} has no linear layers but its head. Leave it out"
        )
    for name in names:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        put(module, name, KINDS[kind].of(layer))


def quantised_as(module: nn.Module) -> str | None:
    """The kind of its quantised layers; None where it has none."""
    classes = {type(part) for part in module.modules()}
    return next((name for name, kind in KINDS.items() if kind in classes), None)


def is_quantised(module: nn.Module) -> bool:
    """Returns whether some of the module's layers hold their weights in few bits."""
    return quantised_as(module) is not None


def float_layer(layer: Any, dtype: torch.dtype) -> Any:
    """The plain layer that multiplies with the same numbers; the layer itself where it is not a quantised one."""
    if not isinstance(layer, QuantisedLinear):
        return layer
    # On meta nothing is allocated for a weight that is replaced on the next line.
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(layer.float_weight(dtype), requires_grad=False)
    plain.register_parameter("bias", layer.bias)
    return plain


def make_float(module: nn.Module, dtype: torch.dtype) -> None:
    """Put plain layers of `dtype` in the place of quantised ones, in place."""
    for name in [n for n, part in module.named_modules() if isinstance(part, QuantisedLinear)]:
        put(module, name, float_layer(module.get_submodule(name), dtype))


def saved_bytes(module: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes that its quantised layers take, bytes that they would take in `dtype`), without biases."""
    parts = [part for part in module.modules() if isinstance(part, QuantisedLinear)]
    in_few_bits = sum(t.nbytes for p in parts for n, t in p.named_parameters() if n != "bias")
    return in_few_bits, sum(p.in_features * p.out_features * dtype.itemsize for p in parts)


def weights_of(module: nn.Module) -> int:
    """Number of weights, ties counted once, and quantised ones as what they stand for."""
    quantised = [part for part in module.modules() if isinstance(part, QuantisedLinear)]
    # nf4 holds two weights in a byte, and scales are no weights.
    quantised_ids = {id(p) for part in quantised for n, p in part.named_parameters() if n != "bias"}
    plain = sum(p.numel() for p in module.parameters() if id(p) not in quantised_ids)
    return plain + sum(part.in_features * part.out_features for part in quantised)


def put(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the module's part of that name."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
