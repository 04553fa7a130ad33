"""Accuracy, or the mean reward of grades, against tokens spent: searches measured on the same tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import numpy as np

from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.right import Grades, Right
from posttrain.core.types import Task
from posttrain.search.play_search import play
from posttrain.search.search_kinds import ONE, SearchKind
from posttrain.search.step_sampling import StepSearch
from posttrain.system.concurrency import together


@dataclass(frozen=True)
class SearchPoint:
    """The worth of a search, and its cost."""

    kind: SearchKind
    score: Score
    """Over tasks: the accuracy; of grades the mean reward (`leading`). A task that was searched several times counts
    once, with its mean."""
    tokens: float
    """Tokens said for a task, in the mean."""
    values: Mapping[Hashable, float]
    """By task: the share of right answers, or the mean reward. Tasks of which no answer could be judged are left
    out."""
    unjudged: int = 0
    """Searches whose answer could not be judged."""
    means: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    """By task: the mean reward."""
    grades: Grades = Grades.of([])
    """How the outcomes are to be read."""
    width: float = 1.0
    """Width of the scale of the values."""

    @property
    def name(self) -> str:
        return "one answer" if self.kind == ONE else self.kind.name

    def gain(self, other: SearchPoint) -> Gain:
        """By how much it is better than another search, task by task."""
        return Gain.of(other.values, self.values, self.width)


async def search_point(kind: SearchKind, tools: StepSearch, tasks: Sequence[Task], runs: int = 1) -> SearchPoint:
    """A search over tasks, each searched `runs` times with other random numbers. Whole answers of equal number are the
    same in all searches of a call, so that searches are compared on equal samples."""
    said: list[list[tuple[float, Right] | None]] = []
    spent = 0
    for seed in range(runs):
        # A count of its own for each run: the budget is for one search of a task, not for all runs of it.
        own = replace(tools, seed=tools.seed + seed, spent_on=Counter())

        async def one(task: Task, own: StepSearch = own) -> tuple[float, Right] | None:
            return await own.judged(task, await play(kind, own, task))

        said.append(await together([one(t) for t in tasks]))
        spent += own.spent
    judged = {t.id: [x for x in each if x is not None] for t, each in zip(tasks, zip(*said, strict=True), strict=True)}
    # A task counts once however often it was searched: the interval of the score is over tasks, which are
    # independent, and not over runs of one task, which are not.
    right: dict[Hashable, float] = {t: float(np.mean([r.of(x) for x, r in each])) for t, each in judged.items() if each}
    means: dict[Hashable, float] = {t: float(np.mean([x for x, _ in each])) for t, each in judged.items() if each}
    grades = Grades.each(x for each in judged.values() for x in each)
    unjudged = sum(x is None for each in said for x in each)
    return SearchPoint(
        kind, Score.of([*right.values()]), spent / (runs * len(tasks)), right, unjudged, means=means, grades=grades
    )


def leading(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points by what leads: the mean reward, where some outcome of them is a grade."""
    grades = reduce(or_, (p.grades for p in points))
    if not grades.graded:
        return list(points)
    low, high = grades.scale
    return [
        replace(p, score=Score.of([*p.means.values()], low, high), values=p.means, width=high - low, grades=grades)
        for p in points
    ]


def frontier(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points than which none is better for as few tokens, by their tokens; NaN scores are left out."""
    out: list[SearchPoint] = []
    # From few tokens to many: a point is kept if it is better than everything that costs no more. NaN is of
    # points without a judged task.
    for p in sorted(points, key=lambda p: (p.tokens, -p.score.mean)):
        if p.score.prompts and (not out or p.score.mean > out[-1].score.mean):
            out.append(p)
    return out
