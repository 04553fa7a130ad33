"""A room with a thermometer: for `<21>` the policy reads it, changes the temperature, and says `done`.

    [read()]            is shown [17]
    [change(by=4)]      is shown [ok]
    done

The temperature at first is known to the tool alone. The reward is 1 if the room has the wanted temperature at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from posttrain.core.ports import Attempt
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.tools.tool import Toolbox, ToolError, tool
from posttrain.environment.tools.tool_world import ToolWorld
from posttrain.system.errors import ConfigError
from posttrain.verifier.reward_source import graded

COLDEST, WARMEST = 10, 30


class Room(Toolbox):
    """The tools of one episode."""

    def __init__(self, degrees: int) -> None:
        self._degrees = degrees

    @tool
    def read(self) -> str:
        """Reads the temperature."""
        return str(self._degrees)

    @tool
    def change(self, by: Annotated[int, "degrees; negative cools"]) -> str:
        """Heats or cools the room."""
        if not COLDEST <= self._degrees + by <= WARMEST:
            raise ToolError("the room cannot be that warm or cold")
        self._degrees += by
        return "ok"

    def state(self) -> dict[str, int]:
        """What the reward looks at."""
        return {"degrees": self._degrees}


@dataclass(frozen=True, kw_only=True)
class Thermostat(GeneratedTasks, ToolWorld):
    """Bring the room to the wanted temperature."""

    turns: int = 3

    @property
    def name(self) -> str:
        return "thermostat"

    @property
    def alphabet(self) -> str:
        return "abcdefghijklmnopqrstuvwxyz0123456789<>[]()=-,? "

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        """A task: the wanted temperature is told, the present one is not."""
        now, wanted = (int(x) for x in rng.choice(np.arange(COLDEST, WARMEST + 1), size=2, replace=False))
        return Task(id=name, prompt=f"<{wanted}>", answer={"degrees": wanted}, info={"now": now, "wanted": wanted})

    def box(self, task: Task) -> Toolbox:
        return Room(task.info["now"])

    def verify(self, attempt: Attempt) -> Verdict:
        return graded(attempt.state == attempt.task.answer, attempt.state, attempt.task.answer)

    def key(self, task: Task) -> tuple[int, int]:
        return task.info["now"], task.info["wanted"]

    def gold(self, task: Task) -> tuple[str, ...]:
        return self._say(task.info["wanted"] - task.info["now"])

    def distractor(self, task: Task) -> tuple[str, ...]:
        """One degree beside it, towards the middle."""
        beside = -1 if task.info["wanted"] > 20 else 1
        return self._say(task.info["wanted"] - task.info["now"] + beside)

    @property
    def styles(self) -> tuple[str, ...]:
        return ("tools",)

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str, tuple[str, ...]]:
        """(prompt, turns) to imitate; a share `wrong` of them misses by a degree."""
        if style not in self.styles:
            raise ConfigError(f"thermostat writes the style tools, not {style!r}: set sft.style=tools")
        return str(task.prompt), self.distractor(task) if rng.random() < wrong else self.gold(task)

    @staticmethod
    def _say(by: int) -> tuple[str, ...]:
        return "[read()]", f"[change(by={by})]", "done"
