"""The supervised stage: imitate what the environment demonstrates, one minibatch of maximum likelihood a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.run import Supervised
from posttrain.core.gauge import Step
from posttrain.core.ports import TaskSource
from posttrain.role.learning.demonstrations import demonstrations
from posttrain.role.prompt_order import RevisitingTasks
from posttrain.role.roles import SupervisedRoles
from posttrain.stages.loop import Driver
from posttrain.stages.progress import StageState
from posttrain.stages.role_parts import data_parts
from posttrain.stages.training_step import DataBatch, learn_from

MANY = 20
"""More passes over the same rows are told as too many: SFT usually takes 1 to 3."""


@dataclass
class SupervisedState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing of the data is remembered."""


class SupervisedDriver(Driver[Supervised, SupervisedState, DataBatch], stage=Supervised, state=SupervisedState):
    """Imitates texts of one style."""

    async def open(
        self, checkpoint: Path | None
    ) -> tuple[Callable[[int], Awaitable[DataBatch]], Callable[[DataBatch], Awaitable[Step]]]:
        parts, stage = self.parts, self.stage
        bound = (
            f"{stage.steps} steps" if self.limit is None else f"as long as {stage.time_of} took ({self.limit:.0f} s)"
        )
        bound += "" if stage.wall_time is None else f" or {stage.wall_time:g} s"
        wrong = f", {stage.wrong:.0%} of them wrong" if stage.wrong else ""
        source = self.setting.environment.train
        passes = "" if self.limit is not None else passes_words(source, stage)
        parts.say(f"{stage.name}: imitate '{stage.style}' texts{wrong}; {stage.batch} a step, {bound}{passes}")
        if passes and many_passes(source, stage):
            parts.say(
                f"warning: {stage.name} takes{passes.removeprefix(',')}: it will know them by heart. Set"
                f" {stage.name}.epochs=3, or {stage.name}.patience=3 with {stage.name}.eval_every"
            )
        self.roles = SupervisedRoles(
            **data_parts(self),
        )
        await self.watch.begin(self.roles)
        return self._ask, partial(learn_from, self.roles, loss=Likelihood(), called="demonstration")

    async def _ask(self, index: int) -> DataBatch:
        h = self.roles
        with self.clock.of("learn"):
            seed, before = h.run.seed, index - 1
            batch = await demonstrations(
                h.environment, h.renderer, h.dialogue, self.stage, seed=seed, step=before, context=h.context
            )
        return DataBatch(index, batch)


def many_passes(source: TaskSource, stage: Supervised) -> bool:
    """Returns whether a stage meets the same rows more often than anything is learned from."""
    return any(n > MANY for n, _ in _passes(source, stage))


def passes_words(source: TaskSource, stage: Supervised) -> str:
    """Says how often the stage meets its data, in words; empty where it is generated without end."""
    return "".join(f", {n:.3g} passes over {rows:,} rows" for n, rows in _passes(source, stage))


def _passes(source: TaskSource, stage: Supervised) -> list[tuple[float, int]]:
    """(passes, rows) of each data set."""
    draws = stage.steps * stage.batch
    if isinstance(source, RevisitingTasks):
        return source.passes(draws)
    return [(draws / source.count, source.count)] if source.count else []
