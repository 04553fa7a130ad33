"""Cuts a module's weights over ranks (`torch.distributed.fsdp.fully_shard`), and finds what a rank has of each.

Each layer is a unit; the embedding, the last norm and the heads are another one. All ranks put the weights of a unit
together when it is computed, and sum its gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.core.batch import Packed
from posttrain.core.exchange.shards import Shard
from posttrain.engine.adapters.adapter_modules import layers, loud_numbers
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.system.errors import ConfigError


class RankLearner(HFLearner):
    """The learner of one rank, which holds its own part of every trainable parameter."""

    row_gradients = False  # ranks add up, send and measure whole gradients
    _own: dict[str, nn.Parameter]

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's own part of every trainable parameter: rows, columns, all of it, or nothing."""
        return dict(self._own)

    def exact(self, packed: Packed) -> None:
        """Returns None: no rank makes a whole copy of the weights."""

    def compile(self, packed: Packed) -> str:
        raise ConfigError("model.compile=true is not built for several ranks. Set it to false")


class OutermostModule(nn.Module):
    """The outermost module. Code that reads weights runs inside its forward, where torch has put them together.

    Args:
        parts: the modules whose weights come together here, but for their layers, which are units of their own.
        inner: another outermost module inside of this one, with weights of another type.
    """

    def __init__(self, parts: dict[str, nn.Module], inner: OutermostModule | None = None) -> None:
        super().__init__()
        self.parts, self.inner = nn.ModuleDict(parts), inner

    def forward(self, function: Callable[[], Any]) -> Any:
        return function() if self.inner is None else self.inner(function)


def cut(
    module: Any, heads: dict[str, nn.Module], ranks: ProcessRanks, *, compute_dtype: torch.dtype | None, offload: bool
) -> OutermostModule:
    """Cut the weights of a model and its heads in place. Returns the module inside whose forward they are read.

    Args:
        compute_dtype: the type that the model's weights, in float32 here, are computed in; None: their own. Heads keep
            theirs.
        offload: keep each rank's part in the memory of the CPU.
    """
    away = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    # Gradients are summed over ranks in float32: sums of many ranks would lose their last bits.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layer_precision = MixedPrecisionPolicy() if compute_dtype is None else policy

    def shard(submodule: nn.Module, precision: MixedPrecisionPolicy) -> None:
        fully_shard(submodule, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=away)

    # transformers' list of the classes of a decoder's layers, the units in which weights come together.
    names = set(module._no_split_modules or ())
    # Layers before the outermost module: fully_shard takes of a module what no inner unit has taken.
    for layer in [submodule for submodule in module.modules() if type(submodule).__name__ in names]:
        shard(layer, layer_precision)
    if compute_dtype is None:
        outermost = OutermostModule({"policy": module, **heads})
    else:  # torch computes all weights of a unit in one type
        inner = OutermostModule({"policy": module})
        shard(inner, layer_precision)
        outermost = OutermostModule(heads, inner)
    shard(outermost, MixedPrecisionPolicy())
    for submodule in outermost.modules():
        if isinstance(submodule, FSDPModule):
            # By default FSDP averages over ranks. The loss is normalised over the whole minibatch: gradients add up.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return outermost


def remade(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Put other parameters in the place of those for which `make` returns one. Ties stay ties."""
    # By identity, so that ties are made once. The old ones are kept: a freed one's id could come back as a new one's.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter | None]] = {}
    for submodule in module.modules():
        for name, p in submodule._parameters.items():
            if p is None:
                continue
            if id(p) not in replaced:
                replaced[id(p)] = p, make(p)
            if (new := replaced[id(p)][1]) is not None:
                submodule._parameters[name] = new


def with_memory(outermost: OutermostModule) -> set[str]:
    """Give each cut parameter without memory that of this rank's part. Returns the names of those that had none."""
    blank = {n for n, p in outermost.named_parameters() if p.is_meta}

    def make(p: nn.Parameter) -> nn.Parameter | None:
        if not p.is_meta or not isinstance(p, DTensor):
            return None
        # to_local of a parameter on meta gives this rank's shape without any memory.
        local = torch.empty(p.to_local().shape, dtype=p.dtype)
        return nn.Parameter(cut_like(local, p), p.requires_grad)

    remade(outermost, make)
    # An empty first pass: in it FSDP takes over the parameters that were just put in.
    outermost(lambda: None)
    return blank


def cut_like(part: Tensor, like: Any) -> DTensor:
    """`part` as the rank's part of a tensor over all ranks, which has the shape and cut of `like`."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def giving(part: nn.Parameter, local: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    """Returns a hook that moves the gradient of a cut parameter to `part`, this rank's own plain tensor of it. `local`
    takes the parameter and returns this rank's part of its gradient."""

    def give(p: Any) -> None:
        # The gradient moves: the optimizer sees `part` alone, and one that stays would be added to in the next pass.
        gradient = local(p)
        part.grad = gradient if part.grad is None else part.grad.add_(gradient)
        p.grad = None

    return give


def shard_of(name: str, tensor: DTensor) -> Shard:
    """This rank's rows of a weight: ceil(rows / parts) on each rank, fewer or none on the last ones."""
    rows = rows_of(tensor)
    # A mesh of two axes has copies of the weights along axis 0. Only ranks of the first copy give rows.
    if tensor.device_mesh.ndim == 2 and tensor.device_mesh.get_local_rank(0):
        rows = rows[:0]
    return Shard(name, rows, tuple(tensor.shape), (first_row(tensor), *[0] * (tensor.ndim - 1)))


def first_row(tensor: DTensor) -> int:
    """The row with which this rank's part begins."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    # The last axis counts the parts of a copy. Like torch.chunk: ceil(rows / parts) each, so the last may have fewer.
    axis = mesh.ndim - 1
    return min(rows, -(-rows // mesh.size(axis)) * mesh.get_local_rank(axis))


def rows_of(tensor: Any) -> Tensor:
    """This rank's own part of a cut tensor, in the same memory; the tensor itself where it is not cut."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


# --- a loud adapter over ranks: each rank does to its rows what `adapter_modules.loud` does in one process -----------


@torch.no_grad()
def loud_rows(learner: RankLearner) -> dict[str, Tensor]:
    """Make every adapter add random numbers half as large as its layer's own output. Every rank calls it. Returns the
    rank's own rows as they were before, for `put_rows`. One weight is whole at a time."""
    own_rows, generator = learner.parameters(), torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in own_rows.items()}
    for name, layer in layers(learner.policy.module).items():
        # Every rank draws the numbers of the whole matrix from one seed and keeps its own rows.
        # The whole of a weight is an exchange: every rank comes here for the same weights in the same order.
        for word, b, numbers in loud_numbers(layer, generator, learner.whole):
            place, begin = own_rows[f"{name}.lora_B.{word}.weight"], first_row(b.weight)
            place.copy_(numbers[begin : begin + len(place)])
    return before


@torch.no_grad()
def put_rows(learner: HFLearner, kept: Mapping[str, Tensor]) -> None:
    """Put a copy of the rank's own rows back."""
    for name, p in learner.parameters().items():
        p.copy_(kept[name])
