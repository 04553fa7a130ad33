"""A probe and its result, answers with their verdicts, and what the verdicts of a source depend on.

`questions` and `dependences` find out whether a source looks at the task and at its answer: the same text is judged for
a task, for another task, and for the task with another answer. A source whose score never changes, such as one of
length or of form, cannot tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from posttrain.core.types import Task
from posttrain.core.verdict import Judged, State, outcome

if TYPE_CHECKING:
    from posttrain.environment.check.subject import Subject


class Mark(StrEnum):
    """The result of a probe. Only `fail` fails the check. `warn`: may be intended. `skip`: the probe did not apply."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe, as numbers or an example."""

    probe: str
    mark: Mark
    detail: str
    means: str = ""
    advice: str = ""
    """The change to make; empty if nothing is wrong."""


Answer = tuple[Mark, str]
"""A probe's mark and the number or example that shows it."""


@dataclass(frozen=True)
class Probe:
    """One test of an environment: its name, its meaning, what to change if it fails, and its function."""

    name: str
    means: str
    advice: str
    ask: Callable[[Subject], Awaitable[Answer]]

    async def __call__(self, subject: Subject) -> ProbeResult:
        mark, detail = await self.ask(subject)
        return ProbeResult(self.name, mark, detail, self.means, self.advice if mark in (Mark.WARN, Mark.FAIL) else "")


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer and its verdicts."""

    task: Task
    turns: tuple[str, ...]
    judged: tuple[Judged, ...]

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores by source, without weights. Only those that enter the outcome."""
        scores: dict[str, float] = {}
        for j in self.judged:
            if j.counts and j.verdict.score is not None:
                scores[j.source] = scores.get(j.source, 0.0) + j.verdict.score
        return scores

    @property
    def outcome(self) -> float | None:
        return outcome(self.judged)

    @property
    def failed(self) -> Judged | None:
        """The first `failed` verdict, if any."""
        return next((j for j in self.judged if j.verdict.state is State.FAILED), None)

    @property
    def said(self) -> str:
        """The last turn, for messages."""
        text = self.turns[-1] if self.turns else ""
        return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")


PAIRS = 8
"""The number of pairs of tasks on which texts are exchanged."""
TEXTS = (
    "",
    "a",
    "7",
    "I do not know. " * 30,
    "<think>\nLet me see.\n</think>\n\nseven",
    "<think>Let me see.</think><answer>seven</answer>",
    "**Step 1.** Look.\n\n- one\n- two\n\n```python\nprint(7)\n```\n",
    '{"answer": 7}',
)
"""Texts of different length and form, on which a reward of the text alone differs."""


@dataclass(frozen=True)
class Dependence:
    """One source's scores over the texts that were tried."""

    on_task: bool
    """True if some text has another score for another task."""
    on_answer: bool
    """True if some text has another score when only the answer of the task is changed."""
    lowest: float
    highest: float

    @property
    def constant(self) -> bool:
        return not self.on_task and self.lowest == self.highest


Round = list[tuple[Task, tuple[str, ...]]]
"""(task, turns) of answers that are judged together."""


def questions(pairs: Sequence[tuple[Task, Task, Sequence[tuple[str, ...]]]]) -> tuple[Round, Round, Round]:
    """Three rounds of the same texts, entry by entry: for a task, for another task, and for the first task with the
    answer of the other.

    `pairs`: (task, other task, right answers as turns, which are tried together with `TEXTS`).
    """
    texts = [(a, b, text) for a, b, right in pairs[:PAIRS] for text in (*right, *((t,) for t in TEXTS))]
    return (
        [(a, text) for a, _, text in texts],
        [(b, text) for _, b, text in texts],
        [(replace(a, answer=b.answer), text) for a, b, text in texts],
    )


def dependences(
    one: Sequence[JudgedAnswer], other: Sequence[JudgedAnswer], changed: Sequence[JudgedAnswer]
) -> dict[str, Dependence]:
    """The dependence of each source, from the verdicts of the three rounds of `questions`. Empty without any pair."""
    by_source: dict[str, Dependence] = {}
    for name in dict.fromkeys(name for answer in one for name in answer.scores):
        # One row for each text: its score for the task, for the other task, and for the task with the other answer.
        rows = [[x.scores.get(name) for x in same] for same in zip(one, other, changed, strict=True)]
        scores = [x for row in rows for x in row if x is not None]
        on_task, on_answer = any(a != b for a, b, _ in rows), any(a != c for a, _, c in rows)
        by_source[name] = Dependence(on_task, on_answer, min(scores), max(scores))
    return by_source
