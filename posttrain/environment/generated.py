"""Environments whose tasks are drawn at random: endless training tasks, of which none is held out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.core.ports import TaskSource
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.environment.single import HELDOUT_SEED, Generated, SingleTurn
from posttrain.system.errors import ConfigError

TRIES = 10_000
"""After this many draws without a new task, an error says that the settings leave no room."""


@dataclass(frozen=True, kw_only=True)
class GeneratedTasks(SingleTurn):
    """A subclass draws single tasks. Held-out ones are distinct by `key` and do not depend on the run's seed. A
    training task is a function of (seed, index) and never equals a held-out task."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, name: str) -> Task | None:
        """A task with the id `name`, a function of `rng` and the settings alone. None if the draw is no valid task."""

    @property
    def train(self) -> TaskSource:
        return Generated(self._train)

    def _train(self, index: int) -> Task:
        return self._new(generator(self.seed, f"{self.name}/train", index), f"{self.name}-{index}", self._held)

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        # One generator draws all held-out tasks in order, so a smaller held-out set is the beginning of a larger one.
        # Each training task has its own generator, so that task i does not need the tasks before it.
        rng, tasks = generator(HELDOUT_SEED, f"{self.name}/heldout"), dict[Hashable, Task]()
        for i in range(self.heldout_count):
            task = self._new(rng, f"{self.name}-heldout-{i + 1}", tasks)
            tasks[self.key(task)] = task
        return tuple(tasks.values())

    @cached_property
    def _held(self) -> frozenset[Hashable]:
        return frozenset(self.key(t) for t in self.heldout)

    def _new(self, rng: np.random.Generator, task_id: str, taken: Collection[Hashable]) -> Task:
        """A task whose key is not in `taken`. ConfigError after `TRIES` draws."""
        for _ in range(TRIES):
            task = self.draw(rng, task_id)
            if task is not None and self.key(task) not in taken:
                return task
        settings = ", ".join(self.settings())
        raise ConfigError(
            f"env {self.name}: no new task in {TRIES:,} draws, with {self.heldout_count} held out. Lower env.heldout,"
            f" or widen its settings ({settings})"
        )
