"""Faults of the machinery: reference, weight sync, parameters, optimizer, resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.recipe.faults.registry import fault

Real = Callable[..., Any]
REFERENCE = ("algorithm=grpo",)


@fault(
    "reference_trained",
    seam="posttrain.engine.learner:FrozenScorer.__init__",
    what="the reference shares its tensors with the learner",
    harm="the KL to the reference is 0 for ever: nothing holds the policy",
    source="pain 11; trl#6688",
    shows=REFERENCE,
)
def _(real: Real) -> Real:
    def init(self: Any, policy: Any) -> None:
        real(self, policy)
        self.policy, self._reader = policy, type(self._reader)(policy)

    return init


@fault(
    "reference_refreshed",
    seam="posttrain.engine.learner:FrozenScorer.score",
    what="the reference quietly takes weights that are not its own before it scores",
    harm="the pull is towards a moving target that nobody chose",
    source="pain 11",
    shows=REFERENCE,
)
def _(real: Real) -> Real:
    def score(self: Any, packed: Any) -> Any:
        _scale(self.policy.module, 1.001)
        return real(self, packed)

    return score


@fault(
    "reference_of_other_weights",
    seam="posttrain.engine.learner:FrozenScorer.__init__",
    what="the reference is not the policy the stage starts from",
    harm="the KL starts far from 0 and pulls towards another model",
    source="pain 11",
    shows=REFERENCE,
)
def _(real: Real) -> Real:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        _scale(self.policy.module, 1.1)
        self.digest = self.fingerprint()

    return init


@fault(
    "sync_skipped",
    seam="posttrain.role.sync:Sync.push",
    what="the push of new weights does nothing after the first one",
    harm="the engine samples from old weights while training goes on",
    source="pain 4, prime-rl PR#1617",
)
def _(real: Real) -> Real:
    async def push(self: Any, version: int) -> str:
        return await real(self, version) if not self.sampler.version else self.learner.fingerprint()

    return push


@fault(
    "sync_says_it_did",
    seam="posttrain.engine.embedded.engine:replace_weights",
    what="the engine takes the new version number and keeps the old weights",
    harm="every token is stamped with weights that did not say it",
    source="pain 4, slime#2091",
)
def _(real: Real) -> Real:
    return lambda module, tensors: None


@fault(
    "sync_one_tensor_stale",
    seam="posttrain.engine.embedded.engine:replace_weights",
    what="one tensor of every push keeps its old value",
    harm="sampler and learner drift apart slowly, and nobody knows why",
    source="pain 4, SkyRL#1680",
)
def _(real: Real) -> Real:
    def replace_weights(module: Any, tensors: Any) -> None:
        name, tensor = list(module.state_dict(keep_vars=True).items())[1]
        kept = tensor.detach().clone()
        real(module, tensors)
        module.state_dict()[name].copy_(kept)

    return replace_weights


@fault(
    "frozen_layers",
    seam="posttrain.engine.learner:HFLearner.parameters",
    what="the first layer's parameters never reach the optimizer",
    harm="most of the model may stay as it was: 390 of 417 tensors did on one architecture",
    source="trap 14, OpenRLHF#1258",
)
def _(real: Real) -> Real:
    return lambda self: {n: p for n, p in real(self).items() if ".layers.0." not in n}


@fault(
    "gradient_cut",
    seam="posttrain.engine.learner:_Pick.backward",
    what="the gradient stops at the head: hidden states are detached on the way back",
    harm="only the last layer learns",
    source="pain 23",
)
def _(real: Real) -> Real:
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, nothing = real(ctx, *grads)
        return grad.new_zeros(grad.shape), nothing

    return backward


@fault(
    "weight_decay_on",
    seam="posttrain.recipe.build:AdamW",
    what="the optimizer is built with a weight decay nobody asked for",
    harm="weights shrink by themselves, most where no gradient speaks against it",
    source="pain 25: opinionated defaults",
)
def _(real: Real) -> Real:
    return lambda parameters, config: real(parameters, replace(config, weight_decay=0.1))


@fault(
    "gradient_clip_lost",
    seam="posttrain.recipe.build:AdamW",
    what="the global gradient clip of the configuration never reaches the optimizer",
    harm="one spike undoes days of training",
    source="pain 25: opinionated defaults",
    shows=("rl.optimizer.clip=0.05",),
)
def _(real: Real) -> Real:
    return lambda parameters, config: real(parameters, replace(config, clip=float("inf")))


@fault(
    "random_numbers_repeat_after_resume",
    seam="posttrain.role.prompts:Prompts.__post_init__",
    what="a resumed run begins again with the random numbers and prompts it began with",
    harm="the same samples are learned twice, and the run is not the one that was interrupted",
    source="pain 8, NeMo#3238",
    needs="resume",
)
def _(real: Real) -> Real:
    def post_init(self: Any) -> None:
        self.cursor = 0
        real(self)

    return post_init


@fault(
    "optimizer_lost_at_resume",
    seam="posttrain.controller.stages:load_optimizer",
    what="a resumed run starts with a new optimizer: moments and warm-up begin again",
    harm="entropy and score jump after every restart",
    source="pain 8, open-instruct#1823",
    needs="resume",
)
def _(real: Real) -> Real:
    return lambda folder, optimizer: None


def _scale(module: Any, by: float) -> None:
    """Every weight times `by`, behind the optimizer's back."""
    for tensor in module.state_dict().values():
        tensor.mul_(by)
