"""Runs that ask ahead, for tests: a tool whose time no seed decides, the queue where a run would alternate, and what
was asked, in order."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch as patched

from posttrain.build.build_environments import make_environment
from posttrain.config.run import Run
from posttrain.core.gauge import Step
from posttrain.core.ports import Talk
from posttrain.core.types import Stop, Task
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.record import run_reader, step_format
from posttrain.role.group_queue import GroupQueue, GroupSource
from posttrain.role.prompt_order import Prompts
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from tests.tiny import tiny_run


class Late(Arithmetic):
    """Arithmetic in two turns. Between them a tool works for a time that no seed decides."""

    slowest: ClassVar[float] = 0.03

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        first = await talk.say()
        if first.stop is not Stop.SAID:
            return first.stop
        await asyncio.sleep(random.random() * self.slowest)
        talk.see("=")
        return (await talk.say()).stop

    def gold(self, task: Task) -> tuple[str, ...]:
        return super().gold(task) * 2

    def distractor(self, task: Task) -> tuple[str, ...]:
        return super().distractor(task) * 2


GALLERY["late"] = f"{__name__}:Late"


def late_run(staleness: int, *, deterministic: bool = True, **rl: Any) -> Run:
    run = tiny_run(staleness=staleness, **{"steps": 6, "checkpoint_every": 2} | rl)
    return replace(run, env=replace(run.env, name="late"), deterministic=deterministic)


def rl_steps(folder: Path) -> list[Step]:
    return [s for s in run_reader.steps(folder) if s.stage == "rl"]


def episodes_of(row: run_reader.EpisodeFile) -> tuple[step_format.Recorded, ...]:
    return step_format.from_columns(step_format.read_columns(row.path))


def nothing_lost_or_doubled(folder: Path, run: Run) -> None:
    """Every prompt was learned from once, in the order of the source, with all its siblings."""
    stage: Any = run.stages[-1]
    trained = [
        (e.episode.task.id, e.episode.visit, e.episode.sibling)
        for row in run_reader.episode_files(folder)
        if row.stage == "rl" and row.kind == "train"
        for e in episodes_of(row)
    ]
    assert [s.index for s in rl_steps(folder)] == list(range(1, stage.steps + 1))
    assert len(set(trained)) == len(trained) == stage.steps * stage.prompts * stage.siblings
    walk = Prompts(make_environment(run).train, run.seed)
    asked = [next(walk) for _ in range(stage.steps * stage.prompts)]
    assert [(t.id, v, n) for t, v in asked for n in range(stage.siblings)] == trained


@contextmanager
def through_the_queue() -> Iterator[list[GroupQueue]]:
    """Stages without staleness take their groups from a queue of bound 0. Gives the queues that were made."""
    made = list[GroupQueue]()

    def queue(self: ReinforceDriver, prompts: Prompts, sampling: Any) -> GroupSource:
        stage, state = self.stage, self.state
        of = (self.setting.rollout, prompts, sampling, f"train/{stage.name}", stage.algorithm.request(stage))
        made.append(GroupQueue(*of, state.step + 1, stage.steps, 0, True, False, deque(maxlen=1), self.parts.idle))
        return made[-1]

    with patched.object(ReinforceDriver, "_groups", queue):
        yield made
