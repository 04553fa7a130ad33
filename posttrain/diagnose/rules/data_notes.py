"""Notes from the data alone before the first step: repeated prompts, and held-out prompts that are trained on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from posttrain.core.content import shown
from posttrain.core.ports import TaskSource
from posttrain.core.types import Task

REPEATED = 0.05
"""Share of training prompts that repeat another one, from which on it is said."""
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
    prompts = list(_read(train.task(i) for i in range(min(train.count, READ))))
    asked = [t for t in heldout if len(t.prompt)]
    return [*(() if repeats else repeated(prompts)), *leaked(prompts, asked)]


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
    """A note where held-out prompts are also trained on, up to case and white space. Equal ones stop the run."""
    train = set(prompts)
    twins = [t for t in heldout if written(t) in train]
    if not twins:
        return []
    return [
        f"leaked held-out prompts: {len(twins)} of {len(heldout)} held-out prompts are also trained on, in other case"
        f" or white space (first: {written(twins[0])[:60]!r}). Held-out figures measure memory there: take these"
        " rows out of the data, or write equal prompts alike, so that they fall on one side of the split"
    ]
