"""The protocols of reward sources: a source gives one verdict about one attempt. Some sources offer more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt
from posttrain.core.stop import StepNumber
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict


class Source(Protocol):
    """A reward source: one verdict about one attempt."""

    async def __call__(self, attempt: Attempt) -> Judged: ...


class Checked(Source, Protocol):
    """A source with its name and its weight in the reward. It can check that tasks have what it needs."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    def check(self, tasks: Sequence[Task]) -> None: ...


@runtime_checkable
class SourceWithProcesses(Protocol):
    """A source that keeps processes: it reports gauges, and `close` stops the processes."""

    def gauges(self) -> Gauges: ...

    def close(self) -> None: ...


CALLS = "calls"
"""Last word of the gauge with a source's requests of the run."""


@runtime_checkable
class CountedSource(Protocol):
    """A source that may be asked a number of times in a run."""

    name: str
    calls: int
    """Times it was asked."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that may judge all answers of a group in one call."""

    @property
    def batched(self) -> bool:
        """True where the source judges all answers of a group in one call. Then an answer that comes alone is a batch
        of one."""
        ...

    async def batch(self, attempts: Sequence[Attempt], at: StepNumber) -> tuple[list[Judged], Gauges]:
        """One verdict for each attempt, in order, and what it logged."""
        ...


@runtime_checkable
class ContainedSource(Protocol):
    """A source that runs programs of the policy."""

    @property
    def contained(self) -> str:
        """Name of the sandbox they run in."""
        ...


def graded(right: bool, said: object, wanted: object, *, kind: str = "wrong") -> Verdict:
    """1 if right, else 0 with the text that was said and the text that was wanted."""
    return Verdict.value(1.0) if right else Verdict.value(0.0, kind, f"said {said}, wanted {wanted}")
