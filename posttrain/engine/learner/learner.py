"""The model that trains, and frozen copies of it that only score. Both use one packed forward pass and one head.

Axis letters: N packed positions, M spoken tokens, H hidden width, S segments, E experts, K candidates of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy as copied
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.config.run import Checkpointing
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import AdapterTrial, Odds, Reads, TokenScores
from posttrain.core.exchange.shards import Shard
from posttrain.core.streams import MU
from posttrain.core.types import Top
from posttrain.engine.adapters.adapter_modules import loud, switched_off
from posttrain.engine.adapters.quantise import make_float
from posttrain.engine.files.fingerprint import digest_of, fingerprint, fingerprints
from posttrain.engine.head.logit_rules import device_ids
from posttrain.engine.head.logit_transform import logit_dtype
from posttrain.engine.head.value_heads import REWARD_HEAD, RewardHead, value_head
from posttrain.engine.layers.activation_memory import keep_less, kept_on_the_cpu
from posttrain.engine.layers.compiled_layers import warmed_up
from posttrain.engine.learner.learner_routers import LearnerRouters, refuse_replay
from posttrain.engine.learner.packed_reader import SCORE_TOKENS, PackedReader, Reading, forward_only, joined
from posttrain.engine.model.policy_model import Policy, named_tensors, served_tensors
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.system.errors import ConfigError, InvariantError

HEADS = ("value_head.", f"{REWARD_HEAD}.")
"""Beginnings of the names of parameters that no log-prob depends on."""
MAX_EXACT_PARAMETERS = 1 << 24
"""Most parameters of a model of which a float64 copy is made: 128 MiB, scored in seconds."""


class HFLearner:
    """`core.ports.Learner` over a policy's own module, whose weights it shares: an optimizer step changes both.

    Args:
        gradient_checkpointing: which activations the backward computes again, and does not keep (`activation_memory`).
        offload_activations: keep activations in the memory of the CPU until the backward.
        sampled: computes float32 [M] log-probs as the sampler does, bit for bit (`embedded.exact_replay`). With it
            log-probs have its values, and the gradients of the packed pass.
        replays: compute a token by the experts that its sampler chose, where these are known
            (`core.exchange.expert_choices`). ConfigError where the model has no routers that could follow.
    """

    row_gradients: ClassVar[bool] = True
    """Whether a gradient may hold some rows of a weight alone (`core.exchange.row_gradient`)."""

    def __init__(
        self,
        policy: Policy,
        *,
        gradient_checkpointing: Checkpointing = "none",
        offload_activations: bool = False,
        sampled: Callable[[Packed], Tensor] | None = None,
        replays: bool = False,
    ) -> None:
        self.policy = policy
        self._sampled = sampled
        self._reader = PackedReader(policy, replays=replays)
        if replays:
            refuse_replay(policy.module)
        self.value_head = value_head(self._reader.out.weight.shape[1], logit_dtype(policy.dtype), policy.device)
        self.reward_head = policy.reward_head
        self._frozen: dict[str, str] | None = None
        """Digests of the frozen weights at the first `fingerprint`; None before it."""
        self._offload = offload_activations
        keep_less(policy.module, gradient_checkpointing)

    @property
    def computes_once(self) -> bool:
        """True where a beginning that several segments of a pass share is computed once."""
        return self._reader.computes_once

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        """Differentiable scores of one micro-batch. Values come from the same hidden states, in float32 at least."""
        # All is read from one pass over the positions of all readers, so shared beginnings are shared by all of them.
        before, reader = self._reader.computed, self._reader
        reward_head = self._reward_head() if reads.rewards else None
        # The same tokens, but "spoken" are those that the policy was told.
        heard = packed.heard() if reads.heard else None
        reward_places = np.zeros(0, np.int64) if reward_head is None else reward_head.places(packed)
        heard_places = np.zeros(0, np.int64) if heard is None else heard.source_M
        # The embedding's gradient may hold a few rows only where the language-model head reads no states: a tied head
        # gives it all rows.
        headless = reader.out.headless() if self.row_gradients and not reads.logp and heard is None else nullcontext()
        with kept_on_the_cpu() if self._offload else nullcontext(), headless:
            states = reader.hidden(packed, np.concatenate([packed.source_M, reward_places, heard_places]))
        hidden, reward_states, heard_states = states.split([packed.spoken, len(reward_places), len(heard_places)])
        rewards = None if reward_head is None else reward_head.read(packed, reward_states)
        balance = None if packed.balance_E is None or reader.routing is None else reader.routing.balance(packed)
        computed = reader.computed - before
        if not reads.logp:
            return TokenScores(None, None, None, rewards=rewards, computed=computed, balance=balance)
        logp_M, entropy_M = reader.head(packed, hidden, reads.entropy)
        # A batch without MU holds words that no sampler of this run drew, so there is nothing to be equal to.
        if self._sampled is not None and not (isinstance(packed, Batch) and MU not in packed):
            # The sampler's value, bit for bit, with this pass's gradient: logp - logp.detach() is 0, and 0 + x is x.
            logp_M = logp_M - logp_M.detach() + self._sampled(packed)
        ids_MK = None if reads.candidates_MK is None else device_ids(reads.candidates_MK, hidden.device)
        # With `head_only` the states are detached: the loss of the values trains their head, and not the model.
        values_M = self._values(hidden.detach() if reads.head_only else hidden) if reads.value else None
        candidates_MK = None if ids_MK is None else reader.candidates(packed, hidden, ids_MK)
        heard_logp = None
        if heard is not None:
            heard_logp = reader.head(heard, heard_states, False)[0] if heard.spoken else logp_M.new_zeros(0)
        return TokenScores(logp_M, entropy_M, values_M, candidates_MK, rewards, heard_logp, computed, balance)

    def rewards(self, packed: Packed) -> np.ndarray:
        """float32 [S]: the reward head's score of each segment, without gradient."""
        with forward_only(self.policy.module):
            head, reader = self._reward_head(), self._reader
            return joined([head.read(p, reader.hidden(p, head.places(p))).score for p in packed.split(SCORE_TOKENS)])

    def _reward_head(self) -> RewardHead:
        """The reward head; InvariantError where there is none."""
        if self.reward_head is not None:
            return self.reward_head
        raise InvariantError("this learner has no reward head: a run with a stage of kind RewardModel gives it one")

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M] entropies, without gradient."""
        return self._reader.entropy(packed)

    def energy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: |d log pi / d logits|^2 of each spoken token."""
        return self._reader.energy(packed)

    def collision(self, packed: Packed) -> np.ndarray:
        """float32 [M]: the probability that two draws at each spoken position are the same token."""
        return self._reader.energy(packed, targeted=False)

    def top(self, packed: Packed, k: int) -> Top:
        """The `k` most probable tokens at each spoken position; 0: all of them."""
        return self._reader.top(packed, k)

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M] log-probs under `packed.sampling`, without gradient."""
        return self._reader.score(packed) if self._sampled is None else self._sampled(packed).cpu().numpy()

    def packed_score(self, packed: Packed) -> np.ndarray:
        """`score` by the learner's packed pass, also where `score` has the sampler's values."""
        return self._reader.score(packed)

    def price(self, packed: Packed) -> float | None:
        """Returns seconds of the sampler's own pass / seconds of a packed pass; None where scores are by the latter."""
        if self._sampled is None:
            return None
        seconds: list[float] = []
        for score in (self.packed_score, self.score):
            begun = time.perf_counter()
            score(packed)
            seconds.append(time.perf_counter() - begun)
        return seconds[1] / seconds[0]

    def compile(self, packed: Packed) -> str:
        """Compile the layers, compare them on these tokens, and return a line for people; see `compiled_layers`."""
        if is_stateful(self.policy.module):
            raise ConfigError("model.compile=true is not offered for models with a recurrent state. Set it to false")

        def measure() -> tuple[Tensor, dict[str, Tensor]]:
            # Training with a gradient and scoring without one are two compiled forms. Both run here, so that neither is
            # compiled within the first step.
            self.train_mode(True)
            trained = {n: p for n, p in self.parameters().items() if not n.startswith(HEADS)}
            logp = self._reader.head(packed, self._reader.hidden(packed), False)[0]
            gradients = torch.autograd.grad(logp.sum(), list(trained.values()), allow_unused=True)
            self.train_mode(False)
            self._reader.score(packed)
            return logp.detach(), {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}

        return warmed_up(self._reader.out, measure)

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        """Returns the results of `score`, `value`, `entropy` and `energy` that `names` asks for, by one pass."""
        reader = self._reader
        reading_of_name: dict[str, Reading] = {
            "score": reader.logp_of,
            "value": lambda part, hidden: self._values(hidden),
            "entropy": reader.entropy_of,
            "energy": reader.energy_of,
        }
        # The sampler's own pass gives no hidden states: the other readings need the packed pass all the same.
        sampled = {"score": self.score(packed)} if self._sampled is not None and "score" in names else {}
        readings = {name: reading_of_name[name] for name in names if name not in sampled}
        return (reader.each(packed, readings) if readings else {}) | sampled

    def value(self, packed: Packed) -> np.ndarray:
        """float32 [M] estimates before each spoken token, without gradient."""
        return self.examine(packed, ["value"])["value"]

    def odds(self, packed: Packed, temperatures: Sequence[float] = ()) -> Odds:
        """Returns the place of each spoken token in the distribution that it was drawn from; see `logprob.odds`."""
        return self._reader.odds(packed, temperatures)

    def exact(self, packed: Packed) -> np.ndarray | None:
        """float64 [M] log-probs by a float64 copy of the weights; None beyond `MAX_EXACT_PARAMETERS` parameters."""
        if sum(tensor.numel() for _, tensor in named_tensors(self.policy.module)) > MAX_EXACT_PARAMETERS:
            return None
        # Without sharing: others are judged by this number, so nothing clever computes it.
        copy = replace(self.policy.clone(), share_prefixes=False)
        make_float(copy.module, torch.float64)
        copy.module.double().eval()
        if isinstance(copy.module, PreTrainedModel) and hasattr(copy.module.config, "_experts_implementation"):
            copy.module.set_experts_implementation("eager")  # others have no float64
        return PackedReader(copy, replays=self._reader.replays).score(packed, torch.float64)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name: the policy's in the module's order, tied ones once, then those of the heads."""
        policy = {n: p for n, p in named_tensors(self.policy.module) if isinstance(p, nn.Parameter) and p.requires_grad}
        heads = {"value_head": self.value_head} | ({} if self.reward_head is None else {REWARD_HEAD: self.reward_head})
        return policy | {f"{name}.{n}": p for name, head in heads.items() for n, p in head.named_parameters()}

    def shards(self) -> Iterator[Shard]:
        """The policy's weights by state-dict name, or only its adapter's, each whole. A tied one comes once."""
        return (Shard.of(name, tensor.detach()) for name, tensor in served_tensors(self.policy.module))

    def fingerprint(self) -> str:
        """Exact digest of the weights under their state-dict names.

        Raises:
            InvariantError: a frozen weight has other bits than at the first call.
        """
        # Samplers get the adapter alone, and a reference may be this model without it: both take the frozen weights to
        # be what they were. A digest of each tensor is made anyway, so it costs nothing to see whether one has moved.
        tensors = dict(named_tensors(self.policy.module))
        digests = fingerprints((name, self.whole(tensor)) for name, tensor in tensors.items())
        frozen = {n: digests[n] for n, t in tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
        self._frozen = frozen if self._frozen is None else self._frozen
        if moved := [n for n, digest in frozen.items() if self._frozen.get(n, digest) != digest]:
            raise InvariantError(
                f"{len(moved)} frozen weights have changed, such as {moved[0]!r}: something writes into the weights"
                " beneath the adapter, such as a merge in place. Nothing trained after this could be trusted; go on"
                " from the last checkpoint"
            )
        return digest_of(digests)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of one of the learner's tensors. A sharded learner gathers the parts that its processes hold."""
        return tensor

    def adapter(self) -> AdapterTrial | None:
        """Returns the trial that shows that a sampler computes with the adapter; None where all weights train."""
        return None if self.policy.lora is None else TrialOfAdapter(self)

    def routers(self) -> LearnerRouters | None:
        """Returns the routers; None where the model is no mixture of experts, or its routers are not understood
        (`expert_routing.why_not`)."""
        modules = self._reader.routers
        if modules is None or is_stateful(self._reader.module):  # passes with a recurrent state are padded
            return None
        return LearnerRouters(
            experts=modules.experts,
            names=modules.names,
            stacked=modules.stacked,
            normalised=modules.normalised,
            reader=self._reader,
            follow=self._following,
        )

    def _following(self) -> HFLearner:
        """A learner over the same weights whose passes follow the choices of a batch."""
        if self._reader.replays:
            return self
        # Shallow copies: weights, heads and the record of sharing are the same objects, and one flag differs.
        follower, reader = copied(self), copied(self._reader)
        follower._reader, reader.replays = reader, True
        return follower

    def train_mode(self, on: bool) -> None:
        """Switch training mode. Activations are checkpointed only while it is on. It adds no noise, because noise was
        switched off at load (`model.disable_dropout`)."""
        self.policy.module.train(on)

    def _values(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M]"""
        return self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]


@dataclass(frozen=True, eq=False)
class TrialOfAdapter:
    """`core.exchange.scores.AdapterTrial` of a learner."""

    learner: HFLearner

    def loud(self) -> AbstractContextManager[None]:
        return loud(self.learner.policy.module)

    def without(self, packed: Packed) -> np.ndarray:
        with switched_off(self.learner.policy.module):
            return self.learner.packed_score(packed)


class FrozenScores:
    """The scoring methods of a reference: all of them pass on to `_scorer`, which runs a frozen model."""

    _scorer: PackedReader | HFLearner

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M] log-probs under `packed.sampling`."""
        return self._scorer.score(packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M] entropies."""
        return self._scorer.entropy(packed)

    def energy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: |d log pi / d logits|^2 of each spoken token."""
        return self._scorer.energy(packed)

    def top(self, packed: Packed, k: int) -> Top:
        """The `k` most probable tokens at each spoken position; 0: all of them."""
        return self._scorer.top(packed, k)


class FrozenScorer(FrozenScores):
    """A reference: a copy of a policy's weights as they are now. Weights that never train are shared with the policy.
    `digest` is the fingerprint at construction; a check compares it with `fingerprint()` while the scorer is used."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.twin()
        self.policy.module.requires_grad_(False).eval()
        self._scorer = PackedReader(self.policy)
        self.digest = self.fingerprint()

    def fingerprint(self) -> str:
        return fingerprint(named_tensors(self.policy.module))
