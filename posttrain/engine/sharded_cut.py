"""How a module's weights are cut over ranks (`torch.distributed.fsdp.fully_shard`), and what a rank has of each.

Each layer is a unit, and what is left another one: the embedding, the last norm and the heads. Weights of a unit come
together when it is computed, and its gradients are summed over ranks when they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.core.shards import Shard
from posttrain.engine.process_ranks import ProcessRanks


class Inside(nn.Module):
    """The outermost module: whatever reads weights runs inside its forward, where torch has put them together.

    Args:
        parts: whose weights come together, layers aside.
        inner: another one, whose weights come together beside.
    """

    def __init__(self, parts: dict[str, nn.Module], inner: Inside | None = None) -> None:
        super().__init__()
        self.parts, self.inner = nn.ModuleDict(parts), inner

    def forward(self, function: Callable[[], Any]) -> Any:
        return function() if self.inner is None else self.inner(function)


def cut(
    module: Any, heads: dict[str, nn.Module], ranks: ProcessRanks, *, computes: torch.dtype | None, offload: bool
) -> Inside:
    """Cut the weights of a model and its heads in place, and return what they are read inside.

    Args:
        computes: the type that the model's weights, in float32 here, are computed in; None: their own. Heads keep
            theirs.
        offload: keep each rank's part in the memory of the CPU.
    """
    away = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32, cast_forward_inputs=False)
    own = MixedPrecisionPolicy() if computes is None else policy

    def shard(part: nn.Module, precision: MixedPrecisionPolicy) -> None:
        fully_shard(part, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=away)

    names = set(module._no_split_modules or ())
    for layer in [part for part in module.modules() if type(part).__name__ in names]:
        shard(layer, own)
    if computes is None:
        outermost = Inside({"policy": module, **heads})
    else:  # torch computes all weights of a unit in one type
        inner = Inside({"policy": module})
        shard(inner, own)
        outermost = Inside(heads, inner)
    shard(outermost, MixedPrecisionPolicy())
    for part in outermost.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return outermost


def shard_of(name: str, tensor: DTensor) -> Shard:
    """This rank's rows of a weight: ceil(rows / parts) on each rank, fewer or none on the last ones. Of copies only the
    first one counts: ranks of the others give none."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    axis = mesh.ndim - 1
    begin = min(rows, -(-rows // mesh.size(axis)) * mesh.get_local_rank(axis))
    own = rows_of(tensor)
    if axis and mesh.get_local_rank(0):
        own = own[:0]
    return Shard(name, own, tuple(tensor.shape), (begin, *[0] * (tensor.ndim - 1)))


def rows_of(tensor: DTensor) -> Tensor:
    """This rank's own part, in the same memory."""
    with torch.no_grad():
        return tensor.to_local().detach()
