"""The base of environments whose policy works with tools; the reward is a predicate of the world it leaves behind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Talk
from posttrain.core.types import Stop, Task
from posttrain.environment.single import SingleTurn
from posttrain.environment.tools.loop import Loop, bracketed
from posttrain.environment.tools.tool import Observation, Toolbox


@dataclass(frozen=True, kw_only=True)
class ToolWorld(SingleTurn):
    """Subclasses give `box` (and `show`, where their prompts are text), beside what every environment gives; `verify`
    reads `attempt.state`."""

    turns: int = 8
    """Most turns of the policy, the answer included."""

    @abstractmethod
    def box(self, task: Task) -> Toolbox:
        """The tools of one episode, with the world as the task begins."""

    def show(self, results: Sequence[Observation]) -> str:
        """What the policy reads of its calls where the prompt is text."""
        return bracketed(results)

    @cached_property
    def loop(self) -> Loop:
        return Loop(self.limits, self.turns, self.show)

    async def play(self, task: Task, talk: Talk) -> Stop:
        async with self.box(task) as box:
            return await self.loop.converse(talk, task.prompt, box)

    def gauges(self) -> Gauges:
        return merge(super().gauges(), self.loop.gauges())
