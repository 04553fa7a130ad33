"""A learner whose weights are cut over ranks (`torch.distributed.fsdp.fully_shard`). Each rank has one part of the
rows of every weight, of its gradient and of the optimizer's state.

Whole weights exist only while they are computed with: those of one layer at a time, and those of the embedding and the
heads from the beginning of a pass to its end. Gradients of all ranks are summed, not averaged, because the weights of
the loss are normalised over the whole minibatch.

Every rank calls the same methods in the same order. What reads no gradient (`score` and the like) is given the same
tokens on every rank and computed by each.

The trainer and the optimizer do not meet torch's `DTensor`: `parameters` are the rank's own parts as plain tensors,
which share memory with the model, and the gradient of a pass is put into them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ByRows

from posttrain.core.batch import Packed
from posttrain.core.errors import ConfigError
from posttrain.core.ranks import check_same
from posttrain.core.scores import Odds, TokenScores
from posttrain.core.shards import Shard
from posttrain.core.types import Top
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.heads import NAME
from posttrain.engine.learner import HFLearner
from posttrain.engine.models import Policy, named_tensors
from posttrain.engine.process_ranks import ProcessRanks
from posttrain.engine.quantise import is_quantised
from posttrain.engine.stateful import is_stateful

EXACT = (torch.float32, torch.float64)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config fields that say how many experts a layer has."""

T = TypeVar("T")


class ShardedLearner(HFLearner):
    """`core.ports.Learner` of one rank. It cuts the weights of `policy.module` in place, so the policy is no longer of
    use to others. Shared beginnings are computed for each segment again.

    Raises:
        ConfigError: names what is not built for ranks (docs/shards.md).
        InvariantError: the ranks begin with different weights.
    """

    def __init__(self, policy: Policy, ranks: ProcessRanks) -> None:
        refuse_ranks(policy)
        super().__init__(replace(policy, share_prefixes=False))
        self.ranks = ranks
        heads: dict[str, nn.Module] = {"value_head": self.value_head}
        if self.reward_head is not None:
            heads[NAME] = self.reward_head
        begun = fingerprint(nn.ModuleDict({"policy": policy.module, **heads}).state_dict().items())
        check_same(ranks, begun, "weights at the start", "Load one checkpoint, or build with one seed, on every rank")
        self._inside = _Inside(policy.module, heads)
        _cut(self._inside, policy.module, ranks)
        self._sharded: dict[str, DTensor] = {n: p for n, p in super().parameters().items() if isinstance(p, DTensor)}
        self._own = {name: nn.Parameter(_rows(p)) for name, p in self._sharded.items()}
        for name, p in self._sharded.items():
            p.register_post_accumulate_grad_hook(self._giving(self._own[name]))

    @staticmethod
    def _giving(own: nn.Parameter) -> Callable[[Tensor], None]:
        """What adds a gradient of the model to the rank's own part of it."""

        def give(p: Tensor) -> None:
            assert isinstance(p.grad, DTensor)
            found = _rows(p.grad)
            own.grad = found if own.grad is None else own.grad.add_(found)
            p.grad = None

        return give

    # --- with gradient ------------------------------------------------------------------------------------------------

    def forward(self, packed: Packed, **asked: Any) -> TokenScores:
        """Differentiable scores of one micro-batch of this rank. All ranks call it together, each with its own, and
        then backward()."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views: nobody writes into scores
            return self._inside(lambda: super(ShardedLearner, self).forward(packed, **asked))

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's own part of every trainable parameter: rows of it, which may be none."""
        return dict(self._own)

    # --- without ------------------------------------------------------------------------------------------------------

    def _together(self, function: Callable[[], T]) -> T:
        with torch.no_grad():
            return self._inside(function)

    def score(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).score(packed))

    def packed_score(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).packed_score(packed))

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        return self._together(lambda: super(ShardedLearner, self).examine(packed, names))

    def rewards(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).rewards(packed))

    def entropy(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).entropy(packed))

    def energy(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).energy(packed))

    def collision(self, packed: Packed) -> np.ndarray:
        return self._together(lambda: super(ShardedLearner, self).collision(packed))

    def top(self, packed: Packed, k: int) -> Top:
        return self._together(lambda: super(ShardedLearner, self).top(packed, k))

    def odds(self, packed: Packed, temperatures: Sequence[float] = ()) -> Odds:
        return self._together(lambda: super(ShardedLearner, self).odds(packed, temperatures))

    def exact(self, packed: Packed) -> np.ndarray | None:
        """None: no rank makes a whole copy of the weights."""
        return None

    def compile(self, packed: Packed) -> str:
        raise ConfigError("model.compile=true is not built for several ranks. Set it to false")

    # --- the weights --------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the policy's weights. `engine.gather` brings those of all ranks together."""
        for name, tensor in named_tensors(self.policy.module):
            yield shard_of(name, tensor) if isinstance(tensor, DTensor) else Shard.of(name, tensor.detach())

    def held(self) -> dict[str, Tensor]:
        """All tensors of policy and heads as torch has them, cut or not, by name."""
        return dict(named_tensors(self.policy.module)) | self._sharded

    def like(self, name: str, own: Tensor) -> Tensor:
        """The rank's own part `own` of something as large as parameter `name`, as a part of the whole: a moment, a
        gradient."""
        whole = self._sharded[name]
        return DTensor.from_local(
            own, self.ranks.mesh, [ByRows(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


class _Inside(nn.Module):
    """The outermost module: whatever reads weights runs inside its forward, where torch has put them together."""

    def __init__(self, policy: nn.Module, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.policy, self.heads = policy, nn.ModuleDict(heads)

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def _cut(outermost: nn.Module, module: Any, ranks: ProcessRanks) -> None:
    """Cut each layer, then what is left: the embedding, the last norm and the heads."""
    names = set(module._no_split_modules or ())
    for layer in [part for part in module.modules() if type(part).__name__ in names]:
        fully_shard(layer, mesh=ranks.mesh, reshard_after_forward=True)
    fully_shard(outermost, mesh=ranks.mesh, reshard_after_forward=True)
    for part in outermost.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def shard_of(name: str, tensor: DTensor) -> Shard:
    """This rank's rows of a weight: ceil(rows / world) on each rank, fewer or none on the last ones."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    begin = min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())
    return Shard(name, _rows(tensor), tuple(tensor.shape), (begin, *[0] * (tensor.ndim - 1)))


def _rows(tensor: DTensor) -> Tensor:
    """This rank's own part, in the same memory."""
    with torch.no_grad():
        return tensor.to_local().detach()


def refuse_ranks(policy: Policy) -> None:
    """ConfigError for what is not built, or not shown to be right, over several ranks."""
    config = policy.module.config.get_text_config(decoder=True)
    experts = next((int(n) for n in (getattr(config, e, None) for e in EXPERTS) if n), 0)
    several = "is not built for several ranks yet."
    if policy.device.type != "cpu":
        raise ConfigError(f"device={policy.device.type} {several} Ranks compute on CPU (gloo): set model.device=cpu")
    if policy.dtype not in EXACT:
        word = str(policy.dtype).removeprefix("torch.")
        raise ConfigError(f"model.dtype={word} {several} Set model.dtype=float32")
    if policy.lora is not None or is_quantised(policy.module):
        raise ConfigError(f"model.lora {several} Train all weights (leave model.lora out), or train in one process")
    if is_stateful(policy.module):
        raise ConfigError(f"a model with a recurrent state {several} Train it in one process")
    if experts > 1:
        raise ConfigError(f"a mixture of {experts} experts {several} Train it in one process")
