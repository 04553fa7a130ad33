"""A learner whose layers are cut over ranks by columns and rows (tensor parallelism), by the plan that transformers has
for the architecture (`base_model_tp_plan`) and PyTorch's `parallelize_module`. It is built for the CPU alone, in
float32 or float64, and trains all weights (`check_can_be_cut`).

Every rank computes every token, with its attention heads and its part of the feed-forward layers; their results are
summed over ranks twice in a layer. So all ranks are given the same micro-batches, and each has the trainer of a single
process. Embedding, norms and the output head are whole on each rank. Beside the sums ranks exchange the gradients of
what is whole (`agree` gives all of them those of rank 0) and the squares of the gradient's norm
(`StageOptimizer(parts=...)`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posttrain.config.run import Checkpointing
from posttrain.core.exchange.ranks import check_same, joint_norm
from posttrain.core.exchange.shards import Shard
from posttrain.engine.adapters.quantise import is_quantised
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.shard_modules import RankLearner, cut_like, giving, rows_of
from posttrain.system.errors import ConfigError, InvariantError

WHOLE = ("replicated_with_grad_allreduce",)
"""Styles of a plan whose weights are whole on each rank and read by its own heads, so their gradients are summed."""

ROUNDING, NOISE = 1e-3, 1e-6
"""Largest distance between two ranks' gradients of the same weights that counts as rounding: ROUNDING times their norm,
plus NOISE, for gradients that are nothing but rounding."""


class TensorLearner(RankLearner):
    """`core.ports.Learner` of one rank, which is given what one process would be. It cuts the layers of `policy.module`
    in place, so the policy is no longer of use to others. Beginnings that segments share are computed for each of them.

    Raises:
        ConfigError: the architecture has no plan of columns and rows, its heads do not divide, or `check_can_be_cut`
            refuses the policy.
        InvariantError: the ranks begin with different weights.
    """

    every_part_is_used = True
    """Whether every rank's part of a weight computes each token, so that each must get a gradient (`rank_gradient`)."""

    def __init__(
        self,
        policy: Policy,
        ranks: ProcessRanks,
        *,
        gradient_checkpointing: Checkpointing = "none",
        replays: bool = False,
    ) -> None:
        plan = self._plan(policy, ranks.world)
        policy = replace(policy, share_prefixes=False)
        super().__init__(policy, gradient_checkpointing=gradient_checkpointing, replays=replays)
        self.holders = ranks
        """The ranks that hold a part of the weights each."""
        check_same(ranks, super().fingerprint(), "weights at the start", "Load one checkpoint on every rank")
        # The first `fingerprint` records the digests of frozen weights, with which later ones compare. The one above is
        # there to compare ranks, so its record is dropped: the record begins with the first call after the cut.
        self._frozen = None
        self._cut(policy.module.get_decoder(), plan)
        self._held: dict[str, nn.Parameter] = HFLearner.parameters(self)
        # A cut parameter's own part, over the same memory; what is whole is the parameter itself.
        self._own = {n: nn.Parameter(rows_of(p)) if isinstance(p, DTensor) else p for n, p in self._held.items()}
        for name, p in self._held.items():
            if isinstance(p, DTensor):
                p.register_post_accumulate_grad_hook(giving(self._own[name], _own_gradient))

    def _plan(self, policy: Policy, world: int) -> dict[str, str]:
        """The plan of the decoder's layers."""
        return columns_and_rows(policy, world)

    def beside(self, policy: Policy) -> TensorLearner:
        """A learner of another policy, cut as this one is."""
        return TensorLearner(policy, self.holders)

    def _cut(self, decoder: Any, plan: dict[str, str]) -> None:
        """Cut the weights that the plan names, in place."""
        styles = {name: ColwiseParallel() if style == "colwise" else RowwiseParallel() for name, style in plan.items()}
        parallelize_module(decoder, self.holders.mesh, {n: s for n, s in styles.items() if plan[n] not in WHOLE})
        # Weights such as the norms of queries and keys are whole on each rank and read by its own heads only, so each
        # rank has a part of their gradient.
        shared = [n for n, style in plan.items() if style in WHOLE]
        for name, p in decoder.named_parameters():
            if p.requires_grad and any(fnmatch.fnmatch(name.rpartition(".")[0], pattern) for pattern in shared):
                p.register_hook(self._summed)

    def _summed(self, gradient: Tensor) -> Tensor:
        """The sum of a gradient over all ranks."""
        # A hook must not write into its argument: autograd may still need it elsewhere.
        out = gradient.clone()
        dist.all_reduce(out, group=self.holders.group)
        return out

    def rounded_parts(self) -> dict[str, Tensor]:
        """`parameters()` as tensors. They have the type of the model already, so nothing is rounded."""
        return {name: part.detach() for name, part in self._own.items()}

    def masters(self, optimizer: StageOptimizer) -> dict[str, Tensor]:
        """Empty: these weights are float32 at least (`check_can_be_cut`) and need no master copies."""
        return {}

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole gradient. Weights that every rank holds whole count once, with the first rank's
        gradients. InvariantError where these differ by more than rounding."""
        cut = [g for n, g in gradients.items() if self._is_cut(n)]
        uncut = [g for n, g in gradients.items() if not self._is_cut(n)]
        # Squares of the cut parts add up over ranks. Of the whole weights only the first rank's are added.
        cut_norm, whole_norm = (float(torch.nn.utils.get_total_norm(part)) for part in (cut, uncut))
        table = self.holders.every((cut_norm, whole_norm))
        self._of_one_way(table[0][1], [abs(w - table[0][1]) for _, w in table])
        return joint_norm([*(x for x, _ in table), table[0][1]])

    def agree(self, gradients: Mapping[str, Tensor]) -> None:
        """Overwrite the gradients of weights that every rank holds whole with those of the first rank: rounding may
        differ between processes, and the copies would drift apart. InvariantError where they differ by more."""
        apart = size = 0.0
        for name, gradient in gradients.items():
            if not self._is_cut(name):
                first = gradient.clone()
                dist.broadcast(first, group=self.holders.group, group_src=0)
                size = math.hypot(size, float(torch.linalg.vector_norm(first)))
                # sub_ overwrites this rank's gradient, which the next line replaces: the difference needs no memory.
                apart = math.hypot(apart, float(torch.linalg.vector_norm(gradient.sub_(first))))
                gradient.copy_(first)
        self._of_one_way(size, self.holders.every(apart))

    def _of_one_way(self, size: float, apart: Sequence[float]) -> None:
        """InvariantError where gradients of weights that every rank holds whole differ between ranks.

        Args:
            size: the norm of the first rank's gradients.
            apart: for each rank, the distance of its gradients from the first rank's.
        """
        far = int(np.argmax(apart))  # argmax finds a NaN where there is one
        # Where the first rank's norm is not finite, the optimizer's own check reports it.
        if math.isfinite(size) and not apart[far] <= ROUNDING * size + NOISE:
            raise InvariantError(
                f"ranks have gone different ways: the gradient of what each has whole has the norm {size:.6g} on rank"
                f" 0, and that of rank {far} is {apart[far]:.3g} from it. Give every rank the same minibatches, and go"
                " on from the last checkpoint"
            )

    def _is_cut(self, name: str) -> bool:
        """Returns whether each rank holds a part of this parameter."""
        parameter = self._held[name]
        return isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Cut)

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the policy's weights. `engine.parallel.gather` joins the parts of all ranks."""
        return (self._placed(n, rows_of(t), t) for n, t in named_tensors(self.policy.module))

    def _placed(self, name: str, part: Tensor, like: Any) -> Shard:
        """A part with its place in the whole tensor, which is cut as `like` is."""
        if not isinstance(like, DTensor) or not isinstance(like.placements[0], Cut):
            return Shard.of(name, part)
        axis, at = like.placements[0].dim, [0] * like.ndim
        # torch cuts as torch.chunk does: ceil(size / ranks) on each rank, fewer or none on the last ones.
        at[axis] = min(like.shape[axis], -(-like.shape[axis] // self.holders.world) * self.holders.rank)
        return Shard(name, part, tuple(like.shape), tuple(at))

    def place(self, name: str, part: Tensor) -> Shard:
        """`part`, the rank's part of a tensor with the shape of parameter `name`, with its place in the whole."""
        return self._placed(name, part, self._held[name])

    def like(self, name: str, part: Tensor) -> Tensor:
        """`part` as the rank's part of a tensor over all ranks, which has the shape and cut of parameter `name`."""
        parameter: Any = self._held[name]
        return cut_like(part, parameter) if isinstance(parameter, DTensor) else part

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def _own_gradient(p: Any) -> Tensor:
    """This rank's part of a cut parameter's gradient."""
    # torch may leave a gradient as parts that are still to be summed; redistributing it as the weight is does that.
    return rows_of(p.grad.redistribute(placements=p.placements)).clone()


def check_can_be_cut(policy: Policy, cutting: str) -> None:
    """ConfigError unless a policy is on a CPU, in float32 or float64, without LoRA, not quantised, and without a
    recurrent state: only these can be trained where every rank computes every token. `cutting` names the way of it."""
    name = type(policy.module).__name__
    if policy.device.type != "cpu" or policy.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"{cutting} computes on CPU in float32 here, and {name} is {policy.dtype} on {policy.device}")
    if policy.lora is not None or is_quantised(policy.module) or is_stateful(policy.module):
        raise ConfigError(f"{cutting} trains all weights of models without a recurrent state, and {name} is none")


def columns_and_rows(policy: Policy, world: int) -> dict[str, str]:
    """The plan of the decoder's layers. ConfigError for what it cannot do here."""
    config, name = policy.module.config.get_text_config(decoder=True), type(policy.module).__name__
    check_can_be_cut(policy, "tensor parallelism")
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    known = ("colwise", "rowwise", *WHOLE)
    if not plan or any(style not in known for style in plan.values()):
        raise ConfigError(
            f"{name} has no plan of columns and rows for tensor parallelism in transformers. Cut its weights by rows"
            " instead (`ShardedLearner`, --parallel rows), which is offered for every architecture"
        )
    # A head cannot be cut, and key-value heads may be fewer than query heads, so both must divide. A config without one
    # of the numbers asks for nothing here.
    heads = {int(getattr(config, n, None) or world) for n in ("num_attention_heads", "num_key_value_heads")}
    if uneven := [n for n in heads if n % world]:
        raise ConfigError(f"{world} ranks cannot share {min(uneven)} heads of {name} evenly: give a divisor of them")
    return plan
