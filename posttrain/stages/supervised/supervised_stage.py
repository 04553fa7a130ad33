"""The supervised stage: it imitates what the environment demonstrates, one minibatch of maximum likelihood a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.run import Supervised
from posttrain.role.learning.demonstrations import demonstrations
from posttrain.role.roles import SupervisedRoles
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.progress import StageState
from posttrain.stages.role_parts import data_parts, say_passes
from posttrain.stages.training_step import DataBatch, learn_from


@dataclass
class SupervisedState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing of the data is remembered."""


class SupervisedDriver(Driver[Supervised, SupervisedState, DataBatch], stage=Supervised, state=SupervisedState):
    """Imitates texts of one style."""

    async def open(self, checkpoint: Path | None) -> AskAndLearn[DataBatch]:
        stage = self.stage
        length = (
            f"{stage.steps} steps" if self.limit is None else f"as long as {stage.time_of} took ({self.limit:.0f} s)"
        )
        length += "" if stage.wall_time is None else f" or {stage.wall_time:g} s"
        wrong = f", {stage.wrong:.0%} of them wrong" if stage.wrong else ""
        source = self.setting.environment.train
        say_passes(self, source, f"imitate '{stage.style}' texts{wrong}; {stage.batch} a step, {length}")
        self.roles = SupervisedRoles(**data_parts(self))
        await self.watch.begin(self.roles)
        return self._ask, partial(learn_from, self.roles, loss=Likelihood(), called="demonstration")

    async def _ask(self, index: int) -> DataBatch:
        roles = self.roles
        with self.clock.of("learn"):
            # Steps are counted from 1, and the minibatches of the data from 0.
            seed, minibatches_before = roles.run.seed, index - 1
            batch = await demonstrations(
                roles.environment,
                roles.renderer,
                roles.dialogue,
                self.stage,
                seed=seed,
                step=minibatches_before,
                context=roles.context,
            )
        return DataBatch(index, batch)
