"""Searches measured on the same tasks: accuracy, or mean reward where outcomes are grades, against tokens spent."""

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
    """The accuracy over tasks, or the mean reward where outcomes are grades (`leading`). A task that was searched
    several times counts once, with its mean."""
    tokens: float
    """Mean number of tokens said for a task."""
    values: Mapping[Hashable, float]
    """By task: the share of right answers, or the mean reward. Tasks without a judged answer are left out."""
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
    """The point of a search over tasks, each searched `runs` times with other random numbers.

    Answer i of a task is the same sample in all searches with equal `tools`, so that searches are compared on equal
    samples.
    """
    outcomes: list[list[tuple[float, Right] | None]] = []
    spent = 0
    for seed in range(runs):
        # Each run has its own count of tokens, because the budget is for one search of a task and not for all runs.
        run_tools = replace(tools, seed=tools.seed + seed, spent_on=Counter())

        async def one(task: Task, run_tools: StepSearch = run_tools) -> tuple[float, Right] | None:
            return await run_tools.judged(task, await play(kind, run_tools, task))

        outcomes.append(await together([one(t) for t in tasks]))
        spent += run_tools.spent
    # `outcomes` is [runs][tasks]. `each` has the outcomes of one task in all runs.
    judged = {
        t.id: [x for x in each if x is not None] for t, each in zip(tasks, zip(*outcomes, strict=True), strict=True)
    }
    # A task counts once, however often it was searched. The interval of the score needs independent values: tasks are
    # independent, and runs of one task are not.
    right: dict[Hashable, float] = {t: float(np.mean([r.of(x) for x, r in each])) for t, each in judged.items() if each}
    means: dict[Hashable, float] = {t: float(np.mean([x for x, _ in each])) for t, each in judged.items() if each}
    grades = Grades.each(x for each in judged.values() for x in each)
    unjudged = sum(x is None for of_run in outcomes for x in of_run)
    return SearchPoint(
        kind, Score.of([*right.values()]), spent / (runs * len(tasks)), right, unjudged, means=means, grades=grades
    )


def leading(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points with the mean reward as their score, if some outcome is a grade; else the points as they are."""
    grades = reduce(or_, (p.grades for p in points))
    if not grades.graded:
        return list(points)
    low, high = grades.scale
    return [
        replace(p, score=Score.of([*p.means.values()], low, high), values=p.means, width=high - low, grades=grades)
        for p in points
    ]


def frontier(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points that are better than every point with as many tokens or fewer, ordered by tokens.

    Points without a judged task are left out.
    """
    best: list[SearchPoint] = []
    # From few tokens to many, a point is kept if it is better than the last one that was kept. Of points with equal
    # tokens the best one comes first.
    judged = [p for p in points if p.score.prompts]
    for p in sorted(judged, key=lambda p: (p.tokens, -p.score.mean)):
        if not best or p.score.mean > best[-1].score.mean:
            best.append(p)
    return best
