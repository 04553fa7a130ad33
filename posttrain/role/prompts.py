"""Which task comes next: a pure function of (seed, cursor), so a checkpoint needs one integer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.core import seeds
from posttrain.core.errors import DataError
from posttrain.core.ports import TaskSource
from posttrain.core.types import Task


@dataclass
class Prompts:
    """An endless walk through a task source: shuffled anew every epoch, or in order where tasks are generated.

    `visit` counts how often a task was asked before; it enters every random key of its episodes (law 8).
    """

    source: TaskSource
    seed: int
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.source.count == 0:
            raise DataError("there are no training tasks: every prompt went to the held-out split, or the source is empty")
        self._epoch = -1
        self._order: list[int] = []

    def __iter__(self) -> Iterator[tuple[Task, int]]:
        return self

    def __next__(self) -> tuple[Task, int]:
        """The next task with its visit number."""
        count = self.source.count
        if count is None:
            index, visit = self.cursor, 0
        else:
            visit, place = divmod(self.cursor, count)
            if visit != self._epoch:
                self._order = seeds.generator(self.seed, "prompt-order", visit).permutation(count).tolist()
                self._epoch = visit
            index = self._order[place]
        self.cursor += 1
        return self.source.task(index), visit
