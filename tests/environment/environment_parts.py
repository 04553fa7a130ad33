"""Environments that tests play in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.ports import Attempt, Environment, Talk, TaskSource, Utterance
from posttrain.core.stop import Stop
from posttrain.core.types import Message, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.rows.columns import JudgedColumns
from posttrain.environment.rows.data_rows import read_rows
from posttrain.environment.rows.row_reader import PromptRow
from posttrain.system.errors import InvariantError

MARKS = "POSTTRAIN_TEST_PLAYED_MARKS"
"""Environment variable with a folder. `Counts` leaves a file there for each process that it kills."""


@dataclass(frozen=True)
class Counts(Environment):
    """Says numbers and asks for turns; what it does at the end depends on the task's id."""

    name: str = "counts"

    @property
    def train(self) -> TaskSource:
        raise NotImplementedError

    @property
    def heldout(self) -> Sequence[Task]:
        return ()

    async def play(self, task: Task, talk: Talk) -> Stop:
        kind, _, number = task.id.partition(" ")
        talk.see(f"begin {number}")
        said = await talk.say()
        talk.see(f"heard {said.text}")
        talk.pay("first", 0.5)
        if kind == "raises":
            raise ValueError(f"broken {number}")
        if kind == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "dies" and not (mark := Path(os.environ[MARKS]) / number).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "fickle":
            mark = Path(os.environ[MARKS]) / number
            talk.see("second life" if mark.exists() else "first life")
            if not mark.exists():
                await asyncio.sleep(0.2)  # so that its words are known
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if kind == "strange":
            talk.leave(lambda: None)
        if kind == "blocks":
            time.sleep(3600)
        if kind == "hangs":
            await asyncio.sleep(3600)
        if kind == "seats":
            a, b = talk.seat("a"), talk.seat("b")
            a.see("to a")
            b.see("to b")
            one, two = await asyncio.gather(a.say(3), b.say())
            talk.see([{"role": "user", "content": f"{one.text}+{two.text}"}])
        state: dict[str, Any] = {"lives": 1}
        talk.leave(state)
        last = await talk.say(7)
        state["lives"] = 2
        return last.stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        return (Judged(self.name, 1.0, Verdict.value(1.0)),)


def counting() -> list[Environment]:
    return [Counts()]


@dataclass
class WrittenTalk:
    """A `Talk` that keeps what was done to it, and says the number of each turn."""

    log: list[Any] = field(default_factory=list[Any])
    pause: float = 0.0
    limit: int = 100
    name: str = ""
    root: WrittenTalk | None = None
    state: Any = None
    said: int = 0

    @property
    def format(self) -> str | None:
        return "hermes"

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if content == "begin refused":
            raise InvariantError("this is not shown")
        (self.root or self).log.append(("see", self.name, content if isinstance(content, str) else list(content)))

    async def say(self, most: int | None = None) -> Utterance:
        root = self.root or self
        root.said += 1
        text = f"turn {root.said}"
        await asyncio.sleep(self.pause)
        root.log.append(("say", self.name, most, text))
        return Utterance(text, Stop.SAID, 2)

    def seat(self, name: str) -> WrittenTalk:
        return WrittenTalk(name=name, root=self, pause=self.pause)

    def pay(self, source: str, score: float) -> None:
        self.log.append(("pay", source, score))

    def leave(self, state: Any) -> None:
        self.state = state


def read(path: str, columns: JudgedColumns | None = None) -> tuple[PromptRow, ...]:
    """The rows of the user's data."""
    return read_rows(path, columns).rows
