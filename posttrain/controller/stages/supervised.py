"""The supervised stage: imitate what the environment demonstrates, one minibatch of maximum likelihood a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.controller.lessons import Lessons
from posttrain.controller.stages.driver import Driver
from posttrain.controller.stages.progress import StageState
from posttrain.core.run import Supervised
from posttrain.core.types import Step
from posttrain.role.demonstrate import demonstrations


@dataclass
class SupervisedState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing more is remembered."""


class SupervisedDriver(Driver[Supervised, SupervisedState], stage=Supervised, state=SupervisedState):
    """Imitates texts of one style."""

    async def open(self, checkpoint: Path | None) -> None:
        stage = self.stage
        bound = f"{stage.steps} steps" if self.limit is None else f"as long as {stage.time_of} took ({self.limit:.0f} s)"
        wrong = f", {stage.wrong:.0%} of them wrong" if stage.wrong else ""
        self.parts.say(f"{stage.name}: imitate '{stage.style}' texts{wrong}; {stage.batch} a step, {bound}")
        self._lessons = Lessons(fresh=checkpoint is None)

    async def step(self, index: int) -> Step:
        parts, stage = self.parts, self.stage
        with self.clock.of("learn"):
            batch = await demonstrations(
                self.setting.environment,
                parts.renderer,
                self.setting.rollout.dialogue,
                stage,
                seed=parts.run.seed,
                step=index - 1,
                context=parts.sampler.context,
            )
            with self._lessons.watch(parts, self.trainer, stage, batch, index):
                gauges = self.trainer.imitate(batch)
        return Step(stage.name, index, self.trainer.version, gauges, self.clock.take())
