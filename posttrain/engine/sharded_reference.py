"""A frozen copy of a learner over ranks, cut as that is: each rank has its own rows of it. Where the learner has an
adapter that does nothing yet it is the learner itself with the adapter switched off, as in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from posttrain.core.batch import Packed
from posttrain.core.ports import Reference
from posttrain.core.types import Top
from posttrain.engine.models import Policy
from posttrain.engine.process_ranks import ProcessRanks
from posttrain.engine.reference import AdapterOff, begins
from posttrain.engine.sharded import ShardedLearner


class Mould:
    """The module of a policy without its numbers, taken before the policy is cut. Buffers are kept."""

    def __init__(self, policy: Policy) -> None:
        module = policy.module
        blank = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
        self._policy = replace(policy, module=copy.deepcopy(module, {**blank}), reward_head=None)

    def filled(self, learner: ShardedLearner) -> Policy:
        """A policy with the weights of the learner as they are now. Every rank calls it, and has all of it until it is
        cut."""
        module: Any = self._policy.module
        own = dict(learner.policy.module.named_parameters())
        whole = {
            id(blank): nn.Parameter(
                (p.full_tensor() if isinstance(p := own[name], DTensor) else p).detach().to(blank.dtype, copy=True),
                requires_grad=False,
            )
            for name, blank in module.named_parameters()
        }
        return replace(self._policy, module=copy.deepcopy(module, {**whole}))


class ShardedReference:
    """`core.ports.Reference` of one rank. Every rank calls the same methods with the same tokens."""

    def __init__(self, learner: ShardedLearner, mould: Mould, ranks: ProcessRanks) -> None:
        with torch.random.fork_rng(devices=[]):  # heads that nobody reads are drawn
            self._held = ShardedLearner(mould.filled(learner), ranks)
        self._held.policy.module.eval()
        self.digest = self.fingerprint()

    def score(self, packed: Packed) -> np.ndarray:
        return self._held.score(packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        return self._held.entropy(packed)

    def energy(self, packed: Packed) -> np.ndarray:
        return self._held.energy(packed)

    def top(self, packed: Packed, k: int) -> Top:
        return self._held.top(packed, k)

    def fingerprint(self) -> str:
        return self._held.fingerprint()


def frozen_rows(learner: ShardedLearner, mould: Mould, ranks: ProcessRanks) -> Reference:
    """A reference that scores as the policy does now, whatever is learned later. Every rank calls it."""
    if learner.policy.lora is not None and begins(learner.policy, learner.inside):
        return AdapterOff(learner)
    return ShardedReference(learner, mould, ranks)
