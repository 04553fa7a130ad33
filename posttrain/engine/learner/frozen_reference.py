"""The frozen model a policy is compared with: the policy's own without its adapter, or else a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import Packed
from posttrain.core.ports import Reference
from posttrain.core.types import Top
from posttrain.engine.adapters.adapter_modules import adapter_tensors, switched_off, without_adapters
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.head.readout import CANARY, canary, read_out
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.learner.packed_reader import forward_only
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.system.errors import EngineError


def freeze(learner: HFLearner) -> Reference:
    """A reference that scores as the policy does now. A policy whose adapter does nothing yet is its own reference with
    the adapter off. Any other policy is not what it is without its trained weights, so these are copied."""
    return AdapterOff(learner) if only_an_idle_adapter_trains(learner.policy) else FrozenScorer(learner.policy)


def frozen_module(reference: Reference) -> PreTrainedModel:
    """A module that computes what `reference` does, for an engine. It shares the reference's weights.

    Raises:
        EngineError: the reference is of another kind than those made here.
    """
    if isinstance(reference, FrozenScorer):
        return reference.policy.twin().module
    if isinstance(reference, AdapterOff):
        return without_adapters(reference.module)
    raise EngineError(f"an engine cannot sample from a {type(reference).__name__}: it has no module of its own")


class AdapterOff:
    """`core.ports.Reference`: the learner's own model with its adapter switched off. It needs no memory of its own.

    Its weights are those that do not train. They belong to the learner, so the digest shows whether something changed
    them.
    """

    def __init__(self, learner: HFLearner) -> None:
        self._learner = learner
        self.digest = self.fingerprint()

    @property
    def module(self) -> PreTrainedModel:
        """The learner's module, adapter included."""
        return self._learner.policy.module

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M] log-probs under `packed.sampling`."""
        # Not `score`: that may run the sampler's copy of the model (`exact_replay`), whose adapter nobody switches off.
        return self._off(self._learner.packed_score, packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M] entropies."""
        return self._off(self._learner.entropy, packed)

    def energy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: |d log pi / d logits|^2 of each spoken token."""
        return self._off(self._learner.energy, packed)

    def top(self, packed: Packed, k: int) -> Top:
        """The `k` most probable tokens at each spoken position; 0: all of them."""
        return self._off(self._learner.top, packed, k)

    def _off(self, method: Callable[..., Any], packed: Packed, *arguments: Any) -> Any:
        """The result of a learner's method with the adapter switched off."""
        # The routers choose for themselves here: the choices in a batch were made by the policy's sampler, with the
        # adapter.
        unrouted = packed if packed.routed_N is None else replace(packed, routed_N=None)
        with switched_off(self.module):
            return method(unrouted, *arguments)

    def fingerprint(self) -> str:
        """Digest of the weights that do not train."""
        tensors = named_tensors(self.module)
        return fingerprint((n, self._learner.whole(t)) for n, t in tensors if not t.requires_grad)


def only_an_idle_adapter_trains(
    policy: Policy, inside: Callable[[Callable[[], Tensor]], Tensor] = lambda compute: compute()
) -> bool:
    """Returns whether the policy has an adapter, trains nothing else, and computes the same bits without it. `inside`
    calls a function where the weights can be computed with: sharded ones are gathered for it."""
    module = policy.module
    adapter = adapter_tensors(module)
    # If more than the adapter trains, the weights beneath it move, and they would no longer be a reference.
    if not adapter or any(t.requires_grad for n, t in named_tensors(module) if n not in adapter):
        return False

    def canary_logits() -> Tensor:
        out = read_out(module)
        ids, at = canary(out.weight, min(CANARY, policy.context))
        return out.logits(out.hidden(ids, at, PackedLayout([len(at)])))

    with forward_only(module):
        with switched_off(module):
            # All bits and no bound: an adapter that begins as nothing adds exact zeros.
            base = inside(canary_logits)
        return torch.equal(base, inside(canary_logits))
