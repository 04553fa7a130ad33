"""Bugs of mixtures of experts: choices that are lost, moved or old, experts and routers that do not learn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.faults.planting import fault

Real = Callable[..., Any]
REPLAYS = ("model.router_replay=sampler",)


@fault(
    "router_not_replayed",
    seam="posttrain.engine.learner.packed_reader:PackedReader.hidden",
    what="the learner's passes are given no choices, and every router chooses anew",
    harm="where rounding or staleness changes a choice, ratios are those of another model than the sampler's",
    source="pain 23, paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda self, packed, at=None: real(self, replace(packed, routed_N=None), at)


@fault(
    "choices_shifted",
    seam="posttrain.core.transcript:filled",
    what="each token has the experts of the one before it",
    harm="every token is computed by experts that were chosen for another one",
    source="pain 23, paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda routed, tokens: real(np.concatenate([routed[:1], routed[:-1]]), tokens)


@fault(
    "choices_of_another_version",
    seam="posttrain.engine.embedded.engine_step:Stepper._with_experts",
    what="the engine reports the choices of the weights it began with, not of those it serves",
    harm="the learner follows a router that nothing is sampled with any more",
    source="pain 23, pain 4",
    shows=(*REPLAYS, "rl.optimizer.lr=0.003"),
    needs="experts",
)
def _(real: Real) -> Real:
    def with_experts(self: Any, s: int, said: Any) -> Any:
        from posttrain.engine.layers.attention import PackedLayout
        from posttrain.engine.layers.expert_routing import Routing, as_array

        first = self.__dict__.setdefault("first", copy.deepcopy(self.served.module))
        ids = self.scheduler.slots.sequence(s)
        layout, served = PackedLayout([len(ids)]), self.served.read_out
        layout.routing = routing = Routing()
        own = replace(served, decoder=first.get_decoder(), head=first.get_output_embeddings(), look_up=None)
        own.hidden(self.served._to(ids.astype(np.int64)), self.served._to(np.arange(len(ids))), layout)
        return replace(real(self, s, said), routed=as_array(routing.stacked(routing.used)))

    return with_experts


@fault(
    "choices_of_other_layers",
    seam="posttrain.engine.layers.expert_routing:Routing.stacked",
    what="the choices of the layers are joined in the reverse order",
    harm="each layer is given the experts of another one",
    source="paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda self, of: real(self, of).flip(1)


@fault(
    "prompt_without_experts",
    seam="posttrain.engine.embedded.cache.key_value_cache:RoutedPool.keep",
    what="the engine records choices of the tokens that it generates, and none of prompts",
    harm="the learner chooses for every prompt by itself, and computes answers from other hidden states",
    source="paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    def keep(self: Any, rows: np.ndarray, routing: Any) -> None:
        real(self, rows, routing)
        if len(rows) > 2 * self.__dict__.setdefault("fewest", len(rows)) or self.fewest == len(rows):
            self._routed[rows] = -1
        self.fewest = min(self.fewest, len(rows))

    return keep


@fault(
    "replayed_weights_unnormalised",
    seam="posttrain.engine.layers.expert_routing:weights_of",
    what="the weights of replayed experts are their probabilities among all experts, not among the chosen ones",
    harm="every layer's output is too small in the learner",
    source="paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda logits, chosen, normalised, dtype: real(logits, chosen, False, dtype)


@fault(
    "replayed_weights_detached",
    seam="posttrain.engine.layers.expert_routing:weights_of",
    what="the weights of replayed experts are taken over as numbers, like the choice",
    harm="no router ever learns",
    source="paper D01",
    shows=REPLAYS,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda *given: real(*given).detach()


@fault(
    "expert_never_updated",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.gather",
    what="the gradient of the first expert of each layer is lost where gradients are gathered",
    harm="tokens go on being sent to an expert that stays as it was",
    source="pain 23, OpenRLHF#1258",
    needs="experts",
)
def _(real: Real) -> Real:
    def gather(self: Any) -> None:
        real(self)
        for p in self.trained().values():
            if p.ndim == 3 and p.grad is not None:
                p.grad[0] = 0

    return gather


@fault(
    "expert_left_out_of_the_step",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.step",
    what="the optimizer's step leaves the first expert of each layer as it was",
    harm="an expert that tokens are sent to never learns",
    source="pain 23, Megatron#4168",
    needs="experts",
)
def _(real: Real) -> Real:
    def step(self: Any, *given: Any) -> float:
        kept = {n: p.detach()[0].clone() for n, p in self.trained().items() if p.ndim == 3}
        norm = real(self, *given)
        for n, p in self.trained().items():
            if n in kept:
                p.data[0] = kept[n]
        return norm

    return step


BALANCED = ("rl.router_aux_loss_coef=0.01", "rl.micro_tokens=64")


@fault(
    "balance_over_unknown_tokens",
    seam="posttrain.engine.layers.expert_routing:PackedRouting.balance",
    what="the load-balance loss also counts tokens that no sampler chose experts for, as padding would be",
    harm="routers are moved by tokens that are not there, the more the shorter answers are",
    source="pain 23",
    shows=BALANCED,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda self, packed: real(self, replace(packed, routed_N=np.maximum(packed.routed_N, 0)))


@fault(
    "balance_of_each_micro_batch",
    seam="posttrain.engine.layers.expert_routing:PackedRouting.balance",
    what="each micro-batch balances its own shares of choices",
    harm="the loss depends on how the minibatch is cut, and asks each few tokens to use all experts",
    source="pain 10",
    shows=BALANCED,
    needs="experts",
)
def _(real: Real) -> Real:
    def balance(self: Any, packed: Any) -> Any:
        from posttrain.algorithm.loss.load_balance_loss import balance_weights

        return real(self, replace(packed, balance_E=balance_weights(packed.routed_N, len(packed.balance_E))))

    return balance


@fault(
    "balance_never_learned",
    seam="posttrain.engine.layers.expert_routing:PackedRouting.balance",
    what="the load-balance loss is added to the loss as a number",
    harm="it is in every log, and experts are given up all the same",
    source="pain 23",
    shows=BALANCED,
    needs="experts",
)
def _(real: Real) -> Real:
    return lambda self, packed: real(self, packed).detach()
