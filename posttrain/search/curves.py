"""Accuracy against tokens spent: searches measured on the same tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.core.interval import Gain, Score
from posttrain.core.types import Task
from posttrain.role.concurrency import together
from posttrain.search.kinds import ONE, SearchKind
from posttrain.search.play import play
from posttrain.search.steps import StepSearch


@dataclass(frozen=True)
class SearchPoint:
    """What a search is worth and what it costs."""

    kind: SearchKind
    accuracy: Score
    """Over tasks. A task that was searched several times counts once, with its share of right answers."""
    tokens: float
    """Tokens said for a task, in the mean."""
    right: Mapping[Hashable, float]
    """By task: the share of right answers. Tasks of which no answer could be judged are left out."""
    unjudged: int = 0
    """Searches whose answer could not be judged."""

    @property
    def name(self) -> str:
        return "one answer" if self.kind == ONE else self.kind.name

    def gain(self, other: SearchPoint) -> Gain:
        """By how much it is better than another search, task by task."""
        return Gain.of(other.right, self.right)


async def search_point(kind: SearchKind, tools: StepSearch, tasks: Sequence[Task], runs: int = 1) -> SearchPoint:
    """A search over tasks, each searched `runs` times with other random numbers. Whole answers of equal number are the
    same in all searches of a call, so that searches are compared on equal samples."""
    said: list[list[bool | None]] = []
    spent = 0
    for seed in range(runs):
        own = replace(tools, seed=tools.seed + seed, spent_on=Counter())

        async def one(task: Task, own: StepSearch = own) -> bool | None:
            return await own.right(task, await play(kind, own, task))

        said.append(await together([one(t) for t in tasks]))
        spent += own.spent
    judged = {t.id: [x for x in each if x is not None] for t, each in zip(tasks, zip(*said, strict=True), strict=True)}
    right: dict[Hashable, float] = {task: float(np.mean(each)) for task, each in judged.items() if each}
    unjudged = sum(x is None for each in said for x in each)
    return SearchPoint(kind, Score.of([*right.values()]), spent / (runs * len(tasks)), right, unjudged)


def frontier(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points than which none is better for as few tokens, by their tokens; NaN accuracies are left out."""
    out: list[SearchPoint] = []
    for p in sorted(points, key=lambda p: (p.tokens, -p.accuracy.mean)):
        if p.accuracy.prompts and (not out or p.accuracy.mean > out[-1].accuracy.mean):
            out.append(p)
    return out
