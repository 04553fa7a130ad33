"""Less memory for what a forward pass leaves for its backward: computed again, or kept in the memory of the CPU.

The settings of `model.gradient_checkpointing` other than none:

full         of each layer only its input is kept, and the layer is computed again
selective    results of matrix products and of torch's attention are kept too, but not of compiled attention

Figures: docs/help/out-of-memory.md. On a processor in float32 layers that are not computed again are faster and keep
less (`fused_layers`); layers that are computed again are the plain ones.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from posttrain.config.run import Checkpointing
from posttrain.engine.layers import attention
from posttrain.system.errors import ConfigError

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations of torch whose results a selective pass keeps."""
SMALL = 1 << 14
"""Tensors with fewer numbers stay on the device."""


def keep_less(module: Any, setting: Checkpointing) -> None:
    """Make layers compute again, in training, what the setting does not keep. ConfigError where they cannot."""
    if setting == "none":
        return
    if not hasattr(module, "activation_checkpointing_enable"):
        raise ConfigError(
            f"model.gradient_checkpointing={setting} needs transformers >= 5.23, and {transformers.__version__} is"
            " installed. Set it to none, or install a newer one (vLLM 0.32 asks for an older one: sample with"
            " another engine, or with a vLLM server)"
        )
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _decide)} if setting == "selective" else {}
    try:
        module.activation_checkpointing_enable({"use_reentrant": False, **contexts})
        # Only reentrant checkpoints need inputs with gradients, and the fused decoder takes no model with hooks.
        module.disable_input_require_grads()
        attention.keep_layout_in_recomputation(module)
    except ValueError as error:
        raise ConfigError(
            f"model.gradient_checkpointing={setting}: {type(module).__name__} does not support it. Set it to none and"
            " lower micro_tokens"
        ) from error


@cache
def _products() -> frozenset[Any]:
    """The operations of `PRODUCTS` that this version of torch has."""
    operations = (getattr(torch.ops.aten, name, None) for name in PRODUCTS)
    return frozenset(op.default for op in operations if op is not None)


def _decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decides for selective checkpointing whether the result of `op` is kept or computed again."""
    return CheckpointPolicy.MUST_SAVE if op in _products() else CheckpointPolicy.PREFER_RECOMPUTE


def kept_on_the_cpu() -> AbstractContextManager[Any]:
    """Inside: what is kept for the backward is kept in the CPU's pinned memory, but for weights and small tensors."""
    return torch.autograd.graph.saved_tensors_hooks(_move_to_cpu, _move_back)


def _move_to_cpu(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Called with each tensor that autograd saves: its device and a copy on the CPU, or the tensor itself."""
    # Autograd saves weights too, often as a transposed view. They live on the device anyway.
    root = x if x._base is None else x._base
    if isinstance(root, nn.Parameter) or (root.is_leaf and root.requires_grad) or x.numel() < SMALL:
        return x
    on_cpu = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")
    return x.device, on_cpu.copy_(x)


def _move_back(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """The tensor that `_move_to_cpu` took, on its device again."""
    return saved if isinstance(saved, Tensor) else saved[1].to(saved[0], non_blocking=True)
