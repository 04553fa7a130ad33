"""The base class of environments with tools. The reward depends on the final state of the tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Talk
from posttrain.core.types import Stop, Task
from posttrain.environment.single import SingleTurn
from posttrain.environment.tools.tool import Observation, Toolbox
from posttrain.environment.tools.tool_loop import Loop, bracketed


@dataclass(frozen=True, kw_only=True)
class ToolWorld(SingleTurn):
    """A subclass defines `box` in addition to what every environment defines, and `show` if its prompts are text. Its
    `verify` reads `attempt.state`."""

    turns: int = 8
    """The largest number of turns of the policy, the answer included."""

    @abstractmethod
    def box(self, task: Task) -> Toolbox:
        """The tools of one episode, in the initial state of the task."""

    def show(self, results: Sequence[Observation]) -> str:
        """The text that the policy is shown for its calls, if the prompt is text."""
        return bracketed(results)

    @cached_property
    def loop(self) -> Loop:
        return Loop(self.limits, self.turns, self.show)

    async def play(self, task: Task, talk: Talk) -> Stop:
        async with self.box(task) as box:
            return await self.loop.converse(talk, task.prompt, box)

    def gauges(self) -> Gauges:
        return merge(super().gauges(), self.loop.gauges())
