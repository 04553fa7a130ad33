"""One held-out evaluation of a run, and what is computed from two of them: the scale of their outcomes, and gains."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.right import Grades


@dataclass(frozen=True)
class Measurement:
    """One held-out evaluation, with the place in the run at which it was made."""

    stage: str
    step: int
    """Steps that the stage had taken. 0: before its first one."""
    accuracy: Score
    reward: Score
    graded: bool
    """Whether outcomes are grades, not pass or fail, so that the mean reward leads."""
    right: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    """Share of right answers, by prompt; empty where no episodes were recorded."""
    outcomes: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    """Mean outcome, by prompt."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The ends of the scale of outcomes (`Grades.scale`)."""
    sampling: str = ""
    """The settings that its samples were drawn with, as canonical text."""
    proxy: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    """Mean of what is paid, by prompt, where the outcome is what is measured and not paid; empty elsewhere."""
    grades: Grades | None = None
    """How its outcomes are to be read; None where no episodes were recorded."""


def outcome_gain(before: Measurement, after: Measurement) -> Gain:
    """The gain of the mean outcome, on the scale of the outcomes of both."""
    low, high = common_scale((before, after))
    return Gain.of(before.outcomes, after.outcomes, high - low)


def common_grades(*measured: Measurement | None) -> Grades | None:
    """Returns the grades by which the outcomes of all measurements are read together; None where none is known."""
    known = [m.grades for m in measured if m is not None and m.grades is not None]
    return reduce(or_, known) if known else None


def common_scale(measured: Sequence[Measurement]) -> tuple[float, float]:
    """The ends of the scale that holds the outcomes of all."""
    # One scale is read from the outcomes of all, where all are known. Else the wider one must do.
    if (both := common_grades(*measured)) is not None and all(m.grades is not None for m in measured):
        return both.scale
    return min(m.scale[0] for m in measured), max(m.scale[1] for m in measured)


def proxy_gain(before: Measurement, after: Measurement) -> Gain | None:
    """The gain of what is paid, on the scale from the smallest to the largest mean of a prompt.

    None where what is paid is not recorded apart from what is measured.
    """
    if not before.proxy or not after.proxy:
        return None
    means = [*before.proxy.values(), *after.proxy.values()]
    # Where every mean is equal the scale has no width, and 1 stands for it.
    return Gain.of(before.proxy, after.proxy, max(means) - min(means) or 1.0)
