"""The protocols of reward sources, and the verdict for a value that a reward function returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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
"""Last word of the name of a gauge: the number of requests that a source made in the run."""


@runtime_checkable
class CountedSource(Protocol):
    """A source that may be asked only a limited number of times in a run, and counts them."""

    name: str
    calls: int
    """Times it was asked."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that may judge all answers of a group in one call."""

    @property
    def batched(self) -> bool:
        """True where the source judges all answers of a group in one call. A single answer is then a batch of one."""
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
    """1 if right, else 0 with a reason: the text that was said and the text that was wanted."""
    return Verdict.value(1.0) if right else Verdict.value(0.0, kind, f"said {said}, wanted {wanted}")


def as_verdict(value: Any) -> Verdict:
    """The verdict for a value that a reward function returned. Numbers of any library are accepted. Text and truth
    values are not numbers here."""
    if value is None:
        return Verdict.abstain()
    if isinstance(value, Verdict):
        return value
    # Text has no `__float__`; numbers and arrays of NumPy and torch have one.
    if not hasattr(value, "__float__"):
        return Verdict.failed(
            "type", f"returned {type(value).__name__} {value!r:.80}, wanted a number, a Verdict or None"
        )
    if _is_truth_value(value):
        return Verdict.failed(
            "type",
            f"returned the truth value {value!r:.80}, wanted a number: return float(...) of it, or None to abstain",
        )
    try:
        score = float(value)
    # An array of several numbers raises a TypeError in NumPy and a RuntimeError in torch.
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Verdict.failed("type", f"returned {type(value).__name__}, which is not one number: {error}")
    if not math.isfinite(score):
        return Verdict.failed("nan", f"returned {score}")
    return Verdict.value(score)


def _is_truth_value(value: Any) -> bool:
    """Returns whether a value is True or False of Python, NumPy or torch, as a comparison gives. That is no score."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
