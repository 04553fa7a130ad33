"""The frozen reference of a learner over ranks: a copy that is cut as the learner is, so each rank has its part of it.

Where the learner's adapter does nothing yet, the reference is the learner with its adapter off, as in one process.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.ports import Reference
from posttrain.engine.learner.frozen_reference import AdapterOff, only_an_idle_adapter_trains
from posttrain.engine.learner.learner import FrozenScores, HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.shard_modules import remade, rows_of
from posttrain.engine.parallel.sharded_learner import Filler, ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner


class EmptyModule:
    """A policy's module without the values of its parameters, copied before the policy is cut. Buffers keep theirs."""

    def __init__(self, policy: Policy) -> None:
        module = policy.module
        # deepcopy puts a parameter without memory in place of each: the copy costs nothing, and ties stay ties.
        blank = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
        self._policy = replace(policy, module=copy.deepcopy(module, {**blank}), reward_head=None)

    def blank(self) -> Policy:
        """A new policy over a copy of that module. None of its weights trains."""
        module = copy.deepcopy(self._policy.module).requires_grad_(False)
        return replace(self._policy, module=module)


def rows_now(learner: ShardedLearner) -> Filler:
    """Returns a filler that copies a rank's rows from the learner, in the type that they are computed in."""
    learner_tensors = dict(named_tensors(learner.policy.module))

    def fill(module: Any, name: str, into: Tensor, begin: int, dtype: torch.dtype) -> None:
        tensor = learner_tensors[name]
        # The reference is cut as the learner is, so the rank's rows are the same ones, whatever `begin` says.
        into.copy_(rows_of(tensor).to(learner.narrow or into.dtype))

    return fill


class ShardedReference(FrozenScores):
    """`core.ports.Reference` of one rank. Every rank calls the same methods with the same tokens."""

    _scorer: HFLearner

    def __init__(self, learner: ShardedLearner, mould: EmptyModule, ranks: ProcessRanks) -> None:
        self._scorer = ShardedLearner(mould.blank(), ranks, fill=rows_now(learner))
        self._scorer.policy.module.eval()
        self.digest = self.fingerprint()

    def fingerprint(self) -> str:
        return self._scorer.fingerprint()


def frozen_rows(learner: ShardedLearner, mould: EmptyModule, ranks: ProcessRanks) -> Reference:
    """A reference that scores as the policy does now, whatever is learned later. Every rank calls it."""
    if learner.policy.lora is not None and only_an_idle_adapter_trains(learner.policy, learner.inside):
        return AdapterOff(learner)
    return ShardedReference(learner, mould, ranks)


class TensorReference(ShardedReference):
    """`core.ports.Reference` of one rank of a `TensorLearner`. Every rank holds the whole copy until it is cut."""

    def __init__(self, learner: TensorLearner, mould: EmptyModule) -> None:
        policy, learner_tensors = mould.blank(), dict(named_tensors(learner.policy.module))
        remade(policy.module, lambda p: nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False))
        with torch.no_grad():
            for name, tensor in named_tensors(policy.module):
                # `whole` is an exchange, so every rank reads the weights in the order of the module.
                tensor.copy_(learner.whole(learner_tensors[name]))
        self._scorer = learner.beside(policy)
        self._scorer.policy.module.eval()
        self.digest = self.fingerprint()
