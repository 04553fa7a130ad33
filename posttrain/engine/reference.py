"""The frozen model a policy is compared with. It is the policy's own model without its adapter where that computes
the same, else a copy."""

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
"""Returns a context manager inside which a model computes without its adapter."""


def freeze(learner: HFLearner) -> Reference:
    """A reference that scores as the policy does now, whatever is learned later.

    No copy is made for a module whose adapter can be switched off: it has a method `disable_adapter` that returns a
    context manager, as PEFT's models have. Two conditions must hold. The module without its adapter computes the same
    as the policy now, and none of its weights train. Otherwise the weights are copied.
    """
    off: Off | None = getattr(learner.policy.module, "disable_adapter", None)
    return (
        FrozenScorer(learner.policy)
        if off is None or not _is_the_policy(learner.policy, off)
        else AdapterOff(learner, off)
    )


class AdapterOff:
    """`core.ports.Reference`: the learner's own model with its adapter switched off. It needs no memory of its own.

    Its weights are those that do not train. They belong to the learner, so the digest shows whether
    something changed them.
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
    """Whether the model without its adapter computes the same bits as with it, and none of the
    weights it then uses train."""
    if all(t.requires_grad for _, t in named_tensors(policy.module)):
        return False
    training = policy.module.training
    policy.module.eval()
    try:
        with torch.enable_grad(), off():
            base = _canary_logits(policy)
        return not base.requires_grad and torch.equal(base, _canary_logits(policy))
    finally:
        policy.module.train(training)


def _canary_logits(policy: Policy) -> Tensor:
    out = read_out(policy.module)
    at = torch.arange(min(CANARY, policy.context), device=policy.device)
    return out.logits(out.hidden(at * 7919 % out.weight.shape[0], at, PackedLayout([len(at)])))
