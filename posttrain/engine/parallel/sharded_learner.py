"""A learner whose weights are cut over ranks (`torch.distributed.fsdp.fully_shard`). Each rank has one part of the
rows of every weight, of its gradient and of the optimizer's state.

A layer's weights are whole only while that layer is computed; the embedding and the heads from the beginning of a pass
to its end. Gradients of all ranks are summed, not averaged: the loss is normalised over the whole minibatch.

Every rank calls the same methods in the same order. What reads no gradient (`score` and the like) is given the same
tokens on every rank; each computes a share of them and is told the others' results.

The trainer and the optimizer do not meet torch's `DTensor`: `parameters` are the rank's own parts as plain tensors,
which share memory with the model, and the gradient of a pass is put into them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.config.run import Checkpointing
from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import check_same
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.exchange.shards import Shard
from posttrain.engine.adapters.quantise import is_quantised
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.head.value_heads import REWARD_HEAD
from posttrain.engine.layers.shared_prefixes import Sharing
from posttrain.engine.learner.learner import HEADS, SCORE_TOKENS, HFLearner
from posttrain.engine.model.architecture_kinds import EXPERTS
from posttrain.engine.model.policy_model import Policy, named_tensors, served_tensors
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.shard_modules import (
    OutermostModule,
    RankLearner,
    cut,
    cut_like,
    first_row,
    giving,
    rows_of,
    shard_of,
    with_memory,
)
from posttrain.engine.parallel.sharded_proofs import prove_layers, prove_sharing
from posttrain.engine.parallel.sharded_scoring import divided
from posttrain.system.errors import ConfigError

NARROW = (torch.bfloat16, torch.float16)
"""Types of weights that are cut, summed and updated in float32, and computed in their own."""

T = TypeVar("T")
Filler = Callable[[Any, str, Tensor, int, torch.dtype], None]
"""(module, name of a weight, where to put the rows, first row, dtype of the model): reads some rows of the weight."""


def _shared(method: Callable[..., Any], per: Literal["token", "segment"] = "token") -> Any:
    """The method, done by all ranks together without gradient: each computes a share, and gets the results of all."""

    def scored(self: ShardedLearner, packed: Packed, *arguments: Any) -> Any:
        def share(part: Packed) -> Any:
            return self.inside(lambda: method(self, part, *arguments))

        self._prove_sharing()
        with torch.no_grad():
            return divided(packed, self.ranks, SCORE_TOKENS, share, per)

    return scored


class ShardedLearner(RankLearner):
    """`core.ports.Learner` of one rank. It cuts the weights of `policy.module` in place, so the policy is no longer of
    use to others.

    Weights below float32 that train are float32 here, and rounded where they are computed with or sent: `parameters`
    are the master copies of an optimizer in one process. Frozen weights beneath an adapter keep their type.

    Args:
        offload: keep this rank's part of the weights in the memory of the CPU. On a CPU it changes nothing.
        fill: reads this rank's rows of the weights of a policy without memory (`sharded_load`).
        prove: the checks at load of such a policy. It is called inside a pass, where weights are whole; then the fused
            layers are compared.

    Raises:
        ConfigError: names what is not built for ranks (docs/design/shards.md).
        InvariantError: the ranks begin with different weights.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: ProcessRanks,
        *,
        gradient_checkpointing: Checkpointing = "none",
        offload: bool = False,
        fill: Filler | None = None,
        prove: Callable[[Policy], None] | None = None,
    ) -> None:
        refuse_ranks(policy, fill is not None)
        super().__init__(policy, gradient_checkpointing=gradient_checkpointing)
        self.ranks = ranks
        heads: dict[str, nn.Module] = {"value_head": self.value_head}
        if self.reward_head is not None:
            heads[REWARD_HEAD] = self.reward_head
        # What was read by rows is compared by its files (`sharded_load`); a whole copy by its numbers.
        if fill is None:
            weights_digest = fingerprint(nn.ModuleDict({"policy": policy.module, **heads}).state_dict().items())
            advice = "Load one checkpoint, or build with one seed, on every rank"
            check_same(ranks, weights_digest, "weights at the start", advice)
        self.narrow = policy.dtype if policy.dtype in NARROW and policy.lora is None else None
        """The type that weights are rounded to where they are computed with or sent; None: they are of one type."""
        # The master copies live in the model itself and are rounded where they are gathered: one process keeps both
        # beside each other, which here would be a third of a rank's memory.
        if self.narrow is not None:
            for p in policy.module.parameters():
                p.data = p.data.float()
        self._inside = cut(policy.module, heads, ranks, compute_dtype=self.narrow, offload=offload)
        if fill is not None:
            _read_parts(self._inside, self.policy, self.narrow or policy.dtype, fill)
        trained = HFLearner.parameters(self)
        self._sharded: dict[str, DTensor] = {n: p for n, p in trained.items() if isinstance(p, DTensor)}
        # Plain tensors over the same memory: an optimizer that steps on them has stepped the model, and need not know
        # of DTensor. torch puts a gradient on its own parameter, from where a hook moves it over.
        self._own = {name: nn.Parameter(rows_of(p)) for name, p in self._sharded.items()}
        for name, p in self._sharded.items():
            p.register_post_accumulate_grad_hook(giving(self._own[name], lambda p: rows_of(p.grad)))
        if prove is not None:
            # Weights that were read by rows are whole nowhere but inside a pass, so the checks at load wait until here.
            self.inside(lambda: prove(self.policy))
            prove_layers(policy.module, self._reader.out, self.inside, self._own, ranks)

    # --- with gradient ------------------------------------------------------------------------------------------------

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        """Differentiable scores of a micro-batch of this rank. All ranks call it together, and then backward()."""
        self._prove_sharing()
        return self.inside(lambda: super(ShardedLearner, self).forward(packed, reads))

    def inside(self, function: Callable[[], T]) -> T:
        """Call a function that reads weights, where they are whole. All ranks call it at once."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views: nobody writes into scores
            return self._inside(function)

    def _prove_sharing(self) -> None:
        """Prove at the first pass that computing shared beginnings once changes nothing."""
        rows, width = self._reader._rows, self._reader.out.weight.shape[0]
        # One process proves sharing at the first batch that shares something, which may come at different times over
        # ranks. A proof needs passes that all ranks make, so it is made at the first pass of any kind.
        if isinstance(rows, Sharing) and rows.on and not rows.proved:
            prove_sharing(rows, self.inside, self._own, self.ranks, width, self.policy.context)

    # --- without ------------------------------------------------------------------------------------------------------

    score, packed_score = _shared(HFLearner.score), _shared(HFLearner.packed_score)
    entropy, energy, collision = _shared(HFLearner.entropy), _shared(HFLearner.energy), _shared(HFLearner.collision)
    examine, top, odds = _shared(HFLearner.examine), _shared(HFLearner.top), _shared(HFLearner.odds)
    rewards = _shared(HFLearner.rewards, "segment")

    # --- the weights --------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of what an engine is sent: the policy's weights, or only its adapter where it has one."""
        for name, tensor in served_tensors(self.policy.module):
            cut_up = isinstance(tensor, DTensor)
            yield shard_of(name, self._rounded(tensor)) if cut_up else Shard.of(name, tensor.detach())

    @torch.no_grad()
    def round_masters(self) -> None:
        """Begin again with rounded weights, as a new optimizer in one process makes its master copies of them."""
        for name, rows in self._own.items():
            rows.copy_(self._rows_rounded(name, rows))

    def masters(self, optimizer: StageOptimizer) -> dict[str, Tensor]:
        """The master copies that this learner has itself, named as an optimizer in one process names its own."""
        if self.narrow is None:
            return {}
        moved = optimizer.trained()
        return {f"master.{n}": p.detach() for n, p in self._own.items() if n in moved and not n.startswith(HEADS)}

    def rounded_parts(self) -> dict[str, Tensor]:
        """`parameters()` in the type that the model has."""
        return {name: self._rows_rounded(name, rows.detach()) for name, rows in self._own.items()}

    def _rows_rounded(self, name: str, rows: Tensor) -> Tensor:
        """This rank's rows of a parameter, in the type that they are computed in. Heads are never rounded."""
        return rows if self.narrow is None or name.startswith(HEADS) else rows.to(self.narrow)

    def like(self, name: str, part: Tensor) -> Tensor:
        """`part`, such as a moment, as the rank's part of a tensor with the shape and cut of parameter `name`."""
        return cut_like(part, self._sharded[name])

    def _rounded(self, tensor: Any) -> Any:
        """A cut weight in the type that the model has."""
        narrow = self.narrow is not None and isinstance(tensor, DTensor)
        return tensor.detach().to(self.narrow) if narrow else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return self._rounded(tensor).full_tensor().detach() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _read_parts(outermost: OutermostModule, policy: Policy, dtype: torch.dtype, fill: Filler) -> None:
    """Read this rank's parts of weights that have no memory yet. Those of a value head are 0."""
    blank = with_memory(outermost)
    parameters = dict(outermost.named_parameters())
    for name in blank:
        if "value_head." in name:  # no file of the model has it
            rows_of(parameters[name]).zero_()
    ids = {id(parameters[name]) for name in blank}
    for name, tensor in named_tensors(policy.module):
        # Buffers are whole on each rank.
        if not isinstance(tensor, DTensor):
            fill(policy.module, name, tensor, 0, tensor.dtype)
        # Only what had no memory is read: a new adapter has its numbers already.
        elif id(tensor) in ids:
            fill(policy.module, name, rows_of(tensor), first_row(tensor), dtype)


def refuse_ranks(policy: Policy, blank: bool = False) -> None:
    """ConfigError for what is not built, or not shown to be right, over several ranks."""
    config = policy.module.config.get_text_config(decoder=True)
    experts = next((int(n) for n in (getattr(config, e, None) for e in EXPERTS) if n), 0)
    several = "is not built for several ranks yet."
    if policy.device.type != ("meta" if blank else "cpu"):
        raise ConfigError(f"device={policy.device.type} {several} Ranks compute on CPU (gloo): set model.device=cpu")
    if is_quantised(policy.module):
        raise ConfigError(
            f"model.quantize {several} Leave it out (an adapter alone is offered), or train in one process"
        )
    if is_stateful(policy.module):
        raise ConfigError(f"a model with a recurrent state {several} Train it in one process")
    if experts > 1:
        raise ConfigError(
            f"a mixture of {experts} experts is not cut by rows. Give each rank whole experts (--parallel experts;"
            " `ExpertLearner`), or train it in one process"
        )
