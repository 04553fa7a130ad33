"""A world whose process dies once, in an episode of the first step; `tests.faulty` plays it in processes of its own,
which find it by its path."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.ports import Talk
from posttrain.core.types import Stop, Task
from posttrain.environment.gallery.arithmetic import Arithmetic

AFTER = 6
"""Training episodes that a process has begun when one dies."""
BEGUN: list[str] = []
"""Training episodes of this process."""


@dataclass(frozen=True, kw_only=True)
class Dies(Arithmetic):
    """Arithmetic in two turns; between them one process dies, whose episodes are then played again."""

    mark: str = ""
    """A folder. It holds the number of the process that died, if one did."""
    learner: int = 0
    """The process in which nobody dies: checks before the first step play there too."""
    fickle: bool = False
    """Whether the world shows something else when it is played again."""

    async def play(self, task: Task, talk: Talk) -> Stop:
        died = Path(self.mark) / "died"
        if "heldout" not in task.id and os.getpid() != self.learner:
            BEGUN.append(task.id)
        talk.see(task.prompt)
        first = await talk.say()
        if first.stop is not Stop.SAID:
            return first.stop
        talk.see("+" if self.fickle and died.exists() else "=")
        last = await talk.say()
        if len(BEGUN) > AFTER and not died.exists():
            died.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return last.stop

    def gold(self, task: Task) -> tuple[str, ...]:
        return super().gold(task) * 2

    def distractor(self, task: Task) -> tuple[str, ...]:
        return super().distractor(task) * 2
