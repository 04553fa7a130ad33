"""The rows that a meta reward model learns from: judgements of a trained judge, each with whether it was right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.abilities import Judging
from posttrain.core.types import Task
from posttrain.environment.judged.judge_rules import chosen
from posttrain.role.judges.generative_judge import GenerativeJudge, Vote
from posttrain.system.concurrency import together
from posttrain.system.errors import DataError, InvariantError


@dataclass(frozen=True)
class JudgedTask:
    """A task of the environment `judge` with a judge's votes about it."""

    task: Task
    votes: tuple[Vote, ...]


async def asked(judge: GenerativeJudge, tasks: Sequence[Task], votes: int) -> list[JudgedTask]:
    """`votes` judgements of the prompt of each task."""
    sides = tuple(range(judge.judging.sides))

    async def one(task: Task) -> JudgedTask:
        said = await together([judge.vote(str(task.prompt), sides, task.id, k) for k in range(votes)])
        return JudgedTask(task, tuple(said))

    return await together([one(task) for task in tasks])


def right(judging: Judging, task: Task, vote: Vote) -> bool:
    """Eq. 10 of 2504.02495: whether the better side has the highest score. It is the pair's label that says which one
    is better, never a vote."""
    return chosen(vote.scores) == judging.better(task)


def labels(judging: Judging, each: JudgedTask) -> list[bool | None]:
    """Returns for each vote about a task whether it is right; None for one without a verdict."""
    return [None if v.scores is None else right(judging, each.task, v) for v in each.votes]


def meta_rows(judging: Judging, judged: Sequence[JudgedTask]) -> list[dict[str, str | bool]]:
    """Rows with prompt, completion and label, for a stage that trains a reward model with `judgement=label`. Judgements
    without a verdict are left out, and so are tasks of which all judgements are right or all wrong. Raises DataError:
    nothing is left. Raises InvariantError: the labels are not those of the pairs."""
    rows: list[dict[str, str | bool]] = []
    labelled = list[tuple[Task, Vote, bool]]()
    for each in judged:
        marked = [(v, g) for v, g in zip(each.votes, labels(judging, each), strict=True) if g is not None]
        if len({good for _, good in marked}) == 2:
            labelled += [(each.task, v, good) for v, good in marked]
    for task, vote, good in labelled:
        rows.append({"prompt": str(task.prompt), "completion": vote.text, "label": good})
    labels_are_the_pairs(judging, labelled)
    if not rows:
        raise DataError(
            f"all judgements of each of {len(judged)} pairs are right, or all wrong, so they teach a meta reward model"
            " nothing: take more votes, harder pairs, or a judge that is less sure"
        )
    return rows


def labels_are_the_pairs(judging: Judging, labelled: Sequence[tuple[Task, Vote, bool]]) -> None:
    """InvariantError where a label is not whether the vote names the pair's better side, counted a second way: over all
    judgements of a pair, the good ones name one side alone, and that is the better one."""
    named: Counter[tuple[str, int | None]] = Counter()
    better = {task.id: judging.better(task) for task, _, _ in labelled}
    for task, vote, good in labelled:
        if good:
            named[task.id, chosen(vote.scores)] += 1
    if wrong := [key for key in named if key[1] != better[key[0]]]:
        raise InvariantError(
            f"{sum(named[k] for k in wrong)} of {len(labelled)} judgements are labelled right and name the worse side,"
            f" such as of task {wrong[0][0]!r}: a meta reward model that learns this, learns what the judge likes to"
            " say. Label by the pair, not by the votes"
        )
