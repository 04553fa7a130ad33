"""Faults of what an optimizer is asked for beside its step: schedules, groups, frozen parameters, averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "frozen_group_trained",
    seam="posttrain.build.build_optimizers:StageOptimizer",
    what="the optimizer holds the parameters that were to be frozen",
    harm="what was to stay as it was is trained with the rest",
    source="pain 23",
    shows=("rl.optimizer.freeze=layers.0",),
)
def _(real: Real) -> Real:
    return lambda parameters, config, *rest: real(parameters, replace(config, freeze=()), *rest)


@fault(
    "frozen_group_drifts",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.step",
    what="weight decay reaches parameters that are frozen",
    harm="frozen weights shrink a little at every step, and no gradient says so",
    source="pain 23",
    shows=("rl.optimizer.freeze=layers.0",),
)
def _(real: Real) -> Real:
    def step(self: Any) -> float:
        norm = real(self)
        for p in self._frozen:
            p.detach().mul_(1 - 1e-5)
        return norm

    return step


@fault(
    "group_rate_lost",
    seam="posttrain.build.build_optimizers:StageOptimizer",
    what="the learning rates of groups never reach the optimizer",
    harm="embeddings or a value head train many times too fast or too slowly",
    source="pain 25: opinionated defaults",
    shows=("rl.optimizer.rates=embed_tokens:0.1",),
)
def _(real: Real) -> Real:
    return lambda parameters, config, *rest: real(parameters, replace(config, rates=()), *rest)


@fault(
    "schedule_restarted",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.lr",
    what="the schedule does not know how many steps were taken: every step is its first after the warm-up",
    harm="the learning rate never falls, and the end of the run is as noisy as its middle",
    source="pain 8, open-instruct#1823",
    shows=("rl.optimizer.schedule=linear", "rl.optimizer.horizon=10"),
)
def _(real: Real) -> Real:
    return lambda self: self.config.lr * self.config.share(min(self.steps, self.config.warmup) + 1)


@fault(
    "average_served",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer._follow_average",
    what="the moving average of the weights takes the place of the weights",
    harm="the policy follows its own past, and every update is shortened to a fraction",
    source="pain 4",
    shows=("rl.optimizer.ema=0.9",),
)
def _(real: Real) -> Real:
    def follow(self: Any) -> None:
        real(self)
        for name, average in self._average.items():
            self._moved[name].detach().copy_(average)

    return follow
