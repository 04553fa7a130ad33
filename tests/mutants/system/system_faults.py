"""Faults of the training system: reference, weight sync, parameters, optimizer, resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]
REFERENCE = ("algorithm=grpo",)


@fault(
    "reference_refreshed",
    seam="posttrain.engine.learner.learner:FrozenScorer.score",
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
    seam="posttrain.engine.learner.learner:FrozenScorer.__init__",
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
    "sync_says_it_did",
    seam="posttrain.engine.embedded.cache.cached_model:replace_weights",
    what="the engine takes the new version number and keeps the old weights",
    harm="every token is stamped with weights that did not say it",
    source="pain 4, slime#2091",
)
def _(real: Real) -> Real:
    return lambda module, tensors: None


@fault(
    "weight_decay_on",
    seam="posttrain.build.build_optimizers:StageOptimizer",
    what="the optimizer is built with a weight decay nobody asked for",
    harm="weights shrink by themselves, most where no gradient speaks against it",
    source="pain 25: opinionated defaults",
)
def _(real: Real) -> Real:
    return lambda parameters, config, *rest: real(parameters, replace(config, weight_decay=0.1), *rest)


@fault(
    "gradient_clip_lost",
    seam="posttrain.build.build_optimizers:StageOptimizer",
    what="the global gradient clip of the configuration never reaches the optimizer",
    harm="one spike undoes days of training",
    source="pain 25: opinionated defaults",
    shows=("rl.optimizer.clip=0.05",),
)
def _(real: Real) -> Real:
    return lambda parameters, config, *rest: real(parameters, replace(config, clip=float("inf")), *rest)


@fault(
    "random_numbers_repeat_after_resume",
    seam="posttrain.role.prompt_order:Prompts.__post_init__",
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


def _scale(module: Any, by: float) -> None:
    """Multiply every weight by `by`, without the optimizer."""
    for tensor in module.state_dict().values():
        tensor.mul_(by)


@fault(
    "evaluation_of_old_weights",
    seam="posttrain.stages.run_parts:RunParts.publish",
    what="evaluation does not wait for the newest weights to reach the engine",
    harm="held-out accuracy is that of another policy",
    source="pain 4",
    shows=("sft.eval=true",),
    needs="sft",
)
def _(real: Real) -> Real:
    async def publish(self: Any) -> None:
        return None

    return publish


@fault(
    "moments_lost_at_resume",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.load_state_tensors",
    what="a resumed optimizer knows how many steps it took and has forgotten its moments",
    harm="the first steps after a restart are too large",
    source="pain 8, open-instruct#1823",
    needs="resume",
)
def _(real: Real) -> Real:
    def load(self: Any, tensors: Any) -> None:
        real(self, {n: t * 0 if n.startswith("exp_avg") else t for n, t in tensors.items()})

    return load


@fault(
    "second_moment_forgets",
    seam="posttrain.build.build_optimizers:StageOptimizer",
    what="the optimizer is built with another beta2 than configured",
    harm="steps are noisier than they should be, for no visible reason",
    source="pain 25: opinionated defaults",
)
def _(real: Real) -> Real:
    return lambda parameters, config, *rest: real(parameters, replace(config, beta2=0.5), *rest)


@fault(
    "prompts_not_shuffled",
    seam="posttrain.role.prompt_order:Prompts._walk",
    what="prompts are asked in the order of the file, epoch after epoch",
    harm="neighbouring rows are learned together, and the last ones of the file weigh most",
    source="pain 8",
    needs="chat",
)
def _(real: Real) -> Real:
    def walk(self: Any) -> Any:
        count, at = self.source.count, self.cursor
        task, visit = real(self)
        return (task, visit) if count is None else (self.source.task(at % count), visit)

    return walk


@fault(
    "seed_ignored",
    seam="posttrain.role.rollout:Rollout.episode",
    what="the run's seed has no part in the random numbers of the rollout",
    harm="runs of different seeds agree more than they should: error bars are too small",
    source="pain 25: seeds; G19",
    shows=("seed=1",),
)
def _(real: Real) -> Real:
    async def episode(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await real(replace(self, seed=0), *args, **kwargs)

    return episode
