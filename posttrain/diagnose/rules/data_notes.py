"""Notes without a model: before the first step, on repeated prompts and held-out prompts that are trained on; and on a
step that was played, about groups and rewards that teach nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from posttrain.core.content import shown
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.request_owner import DEADLY
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.ports import TaskSource
from posttrain.core.scored import Credit
from posttrain.core.types import Task
from posttrain.core.verdict import resolution, size

REPEATED = 0.05
"""Least share of training prompts that repeat another one, for a note."""
READ, SECONDS = 200_000, 2.0
"""Most training tasks that are compared, and most seconds spent on it."""


def written(task: Task) -> str:
    """The prompt as text, without differences of case and white space."""
    prompt = task.prompt
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {shown(m['content'])}" for m in prompt)
    return " ".join(text.casefold().split())


def data_notes(train: TaskSource, heldout: Sequence[Task], repeats: bool = False) -> list[str]:
    """Notes on a finite set of training tasks; none where tasks are generated without end. `repeats`: prompts are meant
    to come several times, as where several pairs have one."""
    if train.count is None:
        return []
    # Read once, and up to a limit of time: notes may not hold up the start of a run.
    prompts = list(_read(train.task(i) for i in range(min(train.count, READ))))
    # Rows that are learned whole have no prompt that could repeat.
    with_prompt = [t for t in heldout if len(t.prompt)]
    return [*(() if repeats else repeated(prompts)), *leaked(prompts, with_prompt)]


def _read(tasks: Iterable[Task]) -> Iterator[str]:
    """Prompts as they are compared. A text that is learned whole has none."""
    begun = time.perf_counter()
    for task in tasks:
        if len(task.prompt):
            yield written(task)
        if time.perf_counter() - begun > SECONDS:
            return


def repeated(prompts: Sequence[str]) -> list[str]:
    """A note where many training prompts are repeats of others."""
    counts = Counter(prompts)
    extra = len(prompts) - len(counts)
    if not extra or extra < REPEATED * len(prompts):
        return []
    (prompt, times), several = counts.most_common(1)[0], sum(n > 1 for n in counts.values())
    return [
        f"duplicated prompts: {extra} of {len(prompts)} training prompts repeat another one ({several} prompts come"
        f" more than once; {prompt[:60]!r} comes {times} times). Repeated prompts weigh more and are learned by heart:"
        " keep one row of each, or let steps go on over the data instead"
    ]


def leaked(prompts: Sequence[str], heldout: Sequence[Task]) -> list[str]:
    """A note where held-out prompts are also trained on, up to case and white space."""
    # Of prompts that are equal to the letter, the check before the run looks at the first ones and stops it there.
    train = set(prompts)
    twins = [t for t in heldout if written(t) in train]
    if not twins:
        return []
    return [
        f"leaked held-out prompts: {len(twins)} of {len(heldout)} held-out prompts are also trained on, in other case"
        f" or white space (first: {written(twins[0])[:60]!r}). Held-out figures measure memory there: take these"
        " rows out of the data, or write equal prompts alike, so that they fall on one side of the split"
    ]


def notes(experience: Experience, credit: Credit, wanted: int) -> tuple[str, ...]:
    """The notes on a step that wanted `wanted` groups. A dead letter is an episode that killed each engine which was
    given it."""
    out = [f"dead letter: {why}" for why in _deadly(experience)]
    if len(experience.groups) < wanted:
        out.append(
            f"only {len(experience.groups)} of {wanted} groups passed the filter after asking for"
            f" {len(experience.played)}; the tasks are too easy or too hard for this policy (raise refill, or change"
            " the tasks)"
        )
    # By their text, so that rewards that differ by rounding are shown once.
    rewards = sorted(
        {f"{r:g}": float(r) for g in credit.groups for r in g.group.rewards}.items(), key=lambda row: row[1]
    )
    seen = ", ".join(text for text, _ in rewards[:4])
    # A group is silent where its baseline leaves no credit. With a baseline that is not of the group, equal rewards are
    # not silent, and the second note says it.
    if credit.groups and all(g.silent for g in credit.groups):
        out.append(f"no group has spread (all siblings agree; rewards seen: {seen}), so this step carries no credit")
    elif credit.groups and _one_reward(credit):
        out.append(f"every sample got the same reward ({seen}), so nothing in this step tells good from bad")
    return tuple(out)


def _deadly(experience: Experience) -> list[str]:
    """Returns the recorded reasons of the episodes that killed the engines they were given to."""
    judged = [j for g in experience.played for e in g.episodes for j in e.verdicts]
    return [j.verdict.why.splitlines()[0] for j in judged if j.source == DEADLY]


def _one_reward(credit: Credit) -> bool:
    """Returns whether all judged samples have one raw outcome, up to rounding."""
    judged = [e for g in credit.groups for e in g.group.judged]
    noise = rounding([size(e.verdicts) for e in judged], max((resolution(e.verdicts) for e in judged), default=0.0))
    return not spread([e.reward for e in judged if e.reward is not None], noise)
