"""What a source of verdicts is: one verdict about one attempt, and what some sources have beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict


class Source(Protocol):
    """A reward source: one verdict about one attempt."""

    async def __call__(self, attempt: Attempt) -> Judged: ...


class Checked(Source, Protocol):
    """A source with its place in the outcome, which can say what it needs of the tasks."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    def check(self, tasks: Sequence[Task]) -> None: ...


@runtime_checkable
class SourceWithProcesses(Protocol):
    """A source with processes of its own."""

    def gauges(self) -> Gauges: ...

    def close(self) -> None: ...


@runtime_checkable
class ContainedSource(Protocol):
    """A source that runs programs of the policy."""

    @property
    def contained(self) -> str:
        """Name of the sandbox they run in."""
        ...


def graded(right: bool, said: object, wanted: object, *, kind: str = "wrong") -> Verdict:
    """1 or 0, with what was said and wanted where they differ."""
    return Verdict.value(1.0) if right else Verdict.value(0.0, kind, f"said {said}, wanted {wanted}")
