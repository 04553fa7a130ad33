"""Bugs around adapters: left out, merged wrongly, or written into the weights beneath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]
SHOWS = ("model.lora.rank=4",)


@fault(
    "adapter_merged_twice",
    seam="posttrain.engine.embedded.cache.fused_decoder:effective",
    what="the engine adds the adapter to weights that hold it already",
    harm="the policy that answers has moved twice as far as the one that learns",
    source="pain 5, trl#6688",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def effective(layer: Any) -> Any:
        weight, bias = real(layer)
        base = getattr(layer, "base_layer", layer).weight.detach()
        return 2 * weight - base, bias

    return effective


@fault(
    "adapter_of_the_last_step",
    seam="posttrain.engine.embedded.cache.fused_decoder:FusedDecoder.refresh",
    what="the engine goes on with what it merged at its start",
    harm="the sampler never learns, while both sides hold the same adapter",
    source="pain 5, unsloth PR#8701",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    return lambda self: None


@fault(
    "base_merged_in_place",
    seam="posttrain.engine.learner.learner:HFLearner.shards",
    what="every push merges the adapter into the weights beneath and takes it out again",
    harm="rounding stays behind each time; the weights beneath drift, and no checkpoint holds them",
    source="trap 18, trl#6688",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def shards(self: Any) -> Any:
        from posttrain.engine.adapters.adapter_modules import layers

        for layer in layers(self.policy.module).values():
            layer.merge()
            layer.unmerge()
        return real(self)

    return shards


@fault(
    "base_not_frozen",
    seam="posttrain.engine.model.policy_model:attach",
    what="the weights beneath the adapter train too",
    harm="only the adapter travels and is kept, so the sampler and every checkpoint lack most of what was learned",
    source="pain 5",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def attach(module: Any, lora: Any, seed: int) -> None:
        real(module, lora, seed)
        module.requires_grad_(True)

    return attach
