"""A frozen copy of a learner over ranks that compute every token, cut as that is."""

from __future__ import annotations

import torch
from torch import nn

from posttrain.engine.model.policy_model import named_tensors
from posttrain.engine.parallel.shard_modules import remade
from posttrain.engine.parallel.sharded_reference import EmptyModule, ShardedReference
from posttrain.engine.parallel.tensor_parallel import TensorLearner


class TensorReference(ShardedReference):
    """`core.ports.Reference` of one rank. Every rank calls it, and has all of the copy until it is cut."""

    def __init__(self, learner: TensorLearner, mould: EmptyModule) -> None:
        policy, held = mould.blank(), dict(named_tensors(learner.policy.module))
        remade(policy.module, lambda p: nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False))
        with torch.no_grad():
            for name, tensor in named_tensors(policy.module):
                tensor.copy_(learner.whole(held[name]))
        self._held = learner.beside(policy)
        self._held.policy.module.eval()
        self.digest = self.fingerprint()
