"""The frozen model a policy is compared with: its own model without its adapter where that is the same, a copy of it
elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Packed
from posttrain.core.ports import Reference
from posttrain.core.types import Top
from posttrain.engine.attention import PackedLayout
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.learner import FrozenScorer, HFLearner
from posttrain.engine.models import Policy, named_tensors
from posttrain.engine.readout import CANARY, read_out

Off = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a model computes without its adapter."""


def freeze(learner: HFLearner) -> Reference:
    """A reference that scores as the policy does now, whatever is learned later.

    A module whose adapter can be switched off (a method `disable_adapter` that gives a context, as PEFT's models have)
    needs no second copy, where what is then left is the policy as it is now and nothing of it trains. Else the weights
    are copied.
    """
    off: Off | None = getattr(learner.policy.module, "disable_adapter", None)
    return (
        FrozenScorer(learner.policy)
        if off is None or not _is_the_policy(learner.policy, off)
        else AdapterOff(learner, off)
    )


class AdapterOff:
    """`core.ports.Reference`: the learner's own model with its adapter switched off. It takes no memory.

    Its weights are those that do not train. They belong to the learner, so the digest shows whether something moves
    them.
    """

    def __init__(self, learner: HFLearner, off: Off) -> None:
        self._learner, self._off = learner, off
        self.digest = self.fingerprint()

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M] log-probs under `packed.sampling`."""
        with self._off():
            return self._learner.score(packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M] entropies."""
        with self._off():
            return self._learner.entropy(packed)

    def energy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: |d log pi / d logits|^2 of each spoken token."""
        with self._off():
            return self._learner.energy(packed)

    def top(self, packed: Packed, k: int) -> Top:
        """The `k` most probable tokens at each spoken position; 0: all of them."""
        with self._off():
            return self._learner.top(packed, k)

    def fingerprint(self) -> str:
        return fingerprint((n, t) for n, t in named_tensors(self._learner.policy.module) if not t.requires_grad)


def _is_the_policy(policy: Policy, off: Off) -> bool:
    """Whether the model without its adapter computes what it computes with it, bit for bit, and from nothing that
    trains."""
    training = policy.module.training
    policy.module.eval()
    try:
        with off():
            base = _canary_logits(policy)
        return not base.requires_grad and torch.equal(base, _canary_logits(policy))
    finally:
        policy.module.train(training)


def _canary_logits(policy: Policy) -> Tensor:
    out = read_out(policy.module)
    at = torch.arange(min(CANARY, policy.context), device=policy.device)
    return out.logits(out.hidden(at * 7919 % out.weight.shape[0], at, PackedLayout([len(at)])))
