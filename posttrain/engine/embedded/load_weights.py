"""Takes new weights: checks that all of them came as expected, and copies them into a module, all or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.engine.model.policy_model import served_tensors
from posttrain.system.errors import EngineError, nearest


def checked_tensors(
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    """The given tensors, one at a time: each name of `expected` must come exactly once, with that dtype and shape.

    EngineError names what is wrong. A missing tensor is noticed only at the end, so nothing may be served before.
    """
    names_seen = set[str]()
    for name, tensor in tensors:
        if name not in expected:
            raise EngineError(f"unknown tensor {name!r}: {nearest(name, expected)}")
        if name in names_seen:
            raise EngineError(f"tensor {name!r} is listed twice")
        dtype, shape = expected[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise EngineError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, the engine's is {dtype} {shape}: learner and"
                " engine must hold the same architecture and dtype"
            )
        names_seen.add(name)
        yield name, tensor.detach()
    if missing := [name for name in expected if name not in names_seen]:
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise EngineError(f"{len(missing)} of {len(expected)} tensors are missing: {names}")


@torch.no_grad()
def replace_weights(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> None:
    """Copy named tensors over the module's own, under the names of `served_tensors`; none where one is wrong."""
    module_tensors: dict[str, Tensor] = dict(served_tensors(module))
    expected = {n: (t.dtype, tuple(t.shape)) for n, t in module_tensors.items()}
    # The list is complete before the first copy: what is wrong may come last, and half of the weights must not be new.
    for name, tensor in list(checked_tensors(expected, tensors)):
        module_tensors[name].copy_(tensor)
