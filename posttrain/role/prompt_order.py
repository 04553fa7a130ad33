"""The order of tasks: a function of the seed, a cursor and the pass rates, so a checkpoint stores little."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from posttrain.core import seeds
from posttrain.core.ports import TaskSource
from posttrain.core.types import Group, Task
from posttrain.ladder.pieces.token_choice import Curriculum
from posttrain.system.errors import ConfigError, DataError


@runtime_checkable
class RevisitingTasks(Protocol):
    """A source without end whose tasks come again."""

    def visit(self, index: int) -> int:
        """Number of times that the task of this index came before."""
        ...

    def passes(self, draws: int) -> list[tuple[float, int]]:
        """Returns for each list of tasks: how often `draws` draws go through it, and how many tasks it has."""
        ...


@dataclass
class Prompts:
    """An endless iterator over the tasks of a source: a finite one is shuffled anew every epoch, generated tasks come
    in order. `visit` counts how often a task was used before, a part of every random key of its episodes (law 8). A
    curriculum leaves tasks out, or draws them in proportion to a weight. It reads raw outcomes only."""

    source: TaskSource
    seed: int
    cursor: int = 0
    """Tasks taken from the source so far, those a curriculum left out included."""
    curriculum: Curriculum | None = None
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """Task id -> pass rate when it was last used. Part of every checkpoint of a stage with a curriculum."""
    visits: dict[str, int] = field(default_factory=dict[str, int])
    """Task id -> how often it was used. Kept for a curriculum that draws tasks, since it has no epochs."""

    def __post_init__(self) -> None:
        if self.source.count == 0:
            raise DataError(
                "there are no training tasks: every prompt went to the held-out split, or the source is empty"
            )
        # A curriculum goes through a list of tasks, or draws from it. A source without end has no such list.
        if self.curriculum is not None and self.source.count is None:
            self.curriculum = None
        self._epoch = -1
        self._order: list[int] = []
        self._tasks: list[Task] | None = None
        self._index = -1

    @property
    def index(self) -> int:
        """Index in the source of the task that was taken last."""
        return self._index

    def __iter__(self) -> Iterator[tuple[Task, int]]:
        return self

    def __next__(self) -> tuple[Task, int]:
        curriculum = self.curriculum
        if curriculum is None:
            return self._walk()
        if curriculum.drawn:
            return self._draw(curriculum)
        # The rest of this epoch and all of the next: only then was every task looked at, for each epoch has an order of
        # its own. Then all weights are 0.
        for _ in range(2 * (self.source.count or 1)):
            task, visit = self._walk()
            # A task that was never played counts as never solved, so it comes.
            if curriculum.weight(self.rates.get(task.id, 0.0)) > 0:
                return task, visit
        raise self._nothing_left(curriculum)

    def _nothing_left(self, curriculum: Curriculum) -> ConfigError:
        return ConfigError(
            f"curriculum: every one of the {self.source.count} tasks {curriculum.left_out()}. Stop here, or add harder"
            " tasks"
        )

    def _walk(self) -> tuple[Task, int]:
        """The next task in the order of the epoch, and how often it came before."""
        count = self.source.count
        if count is None:
            index = self.cursor
            visit = self.source.visit(index) if isinstance(self.source, RevisitingTasks) else 0
        else:
            # The cursor alone says where the walk stands, so a checkpoint needs one number and no order.
            visit, place = divmod(self.cursor, count)
            if visit != self._epoch:
                self._order = seeds.generator(self.seed, "prompt-order", visit).permutation(count).tolist()
                self._epoch = visit
            index = self._order[place]
        self.cursor, self._index = self.cursor + 1, index
        return self.source.task(index), visit

    def _draw(self, curriculum: Curriculum) -> tuple[Task, int]:
        """Draw a task with probability proportional to its weight."""
        if self._tasks is None:
            self._tasks = [self.source.task(i) for i in range(self.source.count or 0)]
        # One draw a call, by the cursor alone: a resumed run draws the same task from the same rates.
        weight = np.array([curriculum.weight(self.rates.get(t.id, 0.0)) for t in self._tasks])
        if not weight.sum() > 0:
            raise self._nothing_left(curriculum)
        rng = seeds.generator(self.seed, "prompt-draw", self.cursor)
        index = int(rng.choice(len(weight), p=weight / weight.sum()))
        task = self._tasks[index]
        self.cursor, self._index = self.cursor + 1, index
        visit = self.visits.get(task.id, 0)
        self.visits[task.id] = visit + 1
        return task, visit

    def learn(self, groups: Iterable[Group]) -> None:
        """Update the pass rates from the raw outcomes of these groups. Without a curriculum this does nothing."""
        if self.curriculum is None:
            return
        for group in groups:
            # Demonstrations do not show what the policy can do.
            solved = [e.solved for e in group.judged if not e.shown]
            if solved:
                self.rates[group.task.id] = sum(solved) / len(solved)
