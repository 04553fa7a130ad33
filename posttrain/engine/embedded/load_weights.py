"""Copies new weights into a module, in place: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.engine.model.policy_model import served_tensors
from posttrain.system.errors import EngineError, nearest


def replace_weights(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> None:
    """Copy named tensors over the module's own. Names are those of `served_tensors`, each exactly once.

    Raises:
        EngineError: an unknown, missing or repeated name, or another shape or dtype. Nothing is copied then.
    """
    own: dict[str, Tensor] = dict(served_tensors(module))
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name not in own:
            raise EngineError(f"unknown tensor {name!r}: {nearest(name, own)}")
        if name in given:
            raise EngineError(f"tensor {name!r} is listed twice")
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise EngineError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, the engine's is {own[name].dtype}"
                f" {tuple(own[name].shape)}: learner and engine must hold the same architecture and dtype"
            )
        given[name] = tensor
    if missing := [name for name in own if name not in given]:
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise EngineError(f"{len(missing)} of {len(own)} tensors are missing: {names}")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)
