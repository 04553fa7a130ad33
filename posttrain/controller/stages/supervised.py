"""The supervised stage: imitate what the environment demonstrates, one minibatch of maximum likelihood a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.controller.stages.driver import Driver
from posttrain.controller.stages.progress import StageState
from posttrain.controller.step import SupervisedBatch, imitate
from posttrain.core.gauge import Step
from posttrain.core.run import Supervised
from posttrain.role.demonstrate import demonstrations
from posttrain.role.roles import SupervisedRoles


@dataclass
class SupervisedState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing more is remembered."""


class SupervisedDriver(Driver[Supervised, SupervisedState, SupervisedBatch], stage=Supervised, state=SupervisedState):
    """Imitates texts of one style."""

    async def open(
        self, checkpoint: Path | None
    ) -> tuple[Callable[[int], Awaitable[SupervisedBatch]], Callable[[SupervisedBatch], Awaitable[Step]]]:
        parts, stage, setting = self.parts, self.stage, self.setting
        bound = (
            f"{stage.steps} steps" if self.limit is None else f"as long as {stage.time_of} took ({self.limit:.0f} s)"
        )
        bound += "" if stage.wall_time is None else f" or {stage.wall_time:g} s"
        wrong = f", {stage.wrong:.0%} of them wrong" if stage.wrong else ""
        parts.say(f"{stage.name}: imitate '{stage.style}' texts{wrong}; {stage.batch} a step, {bound}")
        self.roles = SupervisedRoles(
            run=parts.run,
            stage=stage,
            learner=parts.learner,
            trainer=self.trainer,
            sync=parts.sync,
            book=parts.book,
            text=parts.text,
            watch=self.watch,
            clock=self.clock,
            environment=setting.environment,
            renderer=parts.renderer,
            dialogue=setting.rollout.dialogue,
            stop_ids=parts.stop_ids,
            context=parts.sampler.context,
        )
        await self.watch.begin(self.roles)
        return self._ask, partial(imitate, self.roles)

    async def _ask(self, index: int) -> SupervisedBatch:
        h = self.roles
        with self.clock.of("learn"):
            seed, before = h.run.seed, index - 1
            batch = await demonstrations(
                h.environment, h.renderer, h.dialogue, self.stage, seed=seed, step=before, context=h.context
            )
        return SupervisedBatch(index, batch)
