"""Decides which answers are right, and whether outcomes are pass or fail, or grades. Every report of rewards asks here.

Outcomes are pass or fail if each of them is 0 or 1. Reports then show the accuracy first, which is the share of right
answers. All other outcomes are grades, and reports show their mean first.

An answer is right if its outcome is at least `Env.right`. Where the user sets no `Env.right`:

- the threshold is 1. Grades have a share of right answers only if 1 is their full marks: some outcome reaches 1, none
  is above it, and the weights of the paid sources sum to 1;
- the score of a model (a reward model, a judge) is a grade, and no such score is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.verdict import Judged

FULL = 1.0
"""The smallest outcome of a right answer, where `Env.right` names none."""
SLACK = 1e-9
"""How far an outcome may lie below the threshold and still count as right: the rounding of a sum of rewards."""


@dataclass(frozen=True)
class Right:
    """The smallest outcome of a right answer."""

    at: float | None = FULL
    """None: no outcome is right, because the score is a model's."""
    named: bool = False
    """Whether the user set the threshold (`Env.right`)."""
    full: bool = True
    """Whether the weights of the sources sum to 1, so that it may be full marks."""

    def of(self, outcome: float | None) -> bool:
        """Returns whether an outcome is right. None, an answer that was not judged, is not."""
        # The slack grows with the threshold: a sum of rewards near 1000 rounds more coarsely than one near 1.
        return self.at is not None and outcome is not None and outcome >= self.at - SLACK * max(1.0, abs(self.at))

    def share(self, outcomes: Sequence[float] | np.ndarray) -> float:
        """The share of outcomes that are right; NaN where there is none.

        >>> Right().share([0, 0.9, 1, 17]), Right(0.9, True).share([0, 0.9, 1]), Right(None).share([3.2])
        (0.5, 0.6666666666666666, 0.0)
        """
        return sum(self.of(float(x)) for x in outcomes) / len(outcomes) if len(outcomes) else math.nan


def right_of(verdicts: Iterable[Judged], named: float | None, measured: bool = False) -> Right:
    """Returns the rule for right answers, from the sources that are paid, or with `measured` from the measured ones."""
    if named is not None:
        return Right(named, True)
    sources = [j for j in verdicts if (j.measured if measured else j.counts)]
    # A model's score of 1.0 is no full mark, and its meaning may differ from prompt to prompt.
    if any(j.by_model for j in sources):
        return Right(None)
    # One weight per source, because a source that pays several turns has several verdicts. A negative
    # weight is a penalty: it adds nothing to full marks.
    weights = {j.source: max(j.weight, 0.0) for j in sources}
    return Right(full=abs(math.fsum(weights.values()) - FULL) <= SLACK)


def _joint(rules: Iterable[Right]) -> Right:
    """The rule that counts of several: that of a model's score, under which no outcome is right; else a threshold that
    the user set; else that of sources whose sum is no full mark."""
    return min(rules, key=lambda r: (r.at is not None, not r.named, r.full), default=Right())


@dataclass(frozen=True)
class Grades:
    """The range of some outcomes with the rule for right ones: it says whether they are pass or fail, or grades.

    >>> letters, rubric = Grades.of([16, 17, 18.0]), Grades.of([0.1, 0.9])
    >>> letters.graded, letters.tells, rubric.tells, Grades.of([0.2, 1.0]).tells, Grades.of([0, 1, 1]).graded
    (True, False, False, True, False)
    """

    right: Right
    low: float
    high: float
    """The smallest and the largest outcome; inf and -inf where there is none."""
    binary: bool
    """Whether each outcome is 0 or 1."""

    @staticmethod
    def of(outcomes: Sequence[float] | np.ndarray, right: Right | None = None) -> Grades:
        """The grades of these outcomes, under one rule for all of them."""
        x = np.asarray(outcomes, np.float64)
        low, high = float(x.min(initial=math.inf)), float(x.max(initial=-math.inf))
        return Grades(Right() if right is None else right, low, high, bool(np.all((x == 0) | (x == 1))))

    @staticmethod
    def each(judged: Iterable[tuple[float | None, Right]]) -> Grades:
        """The grades of outcomes that come with a rule each."""
        judged_pairs = [(x, rule) for x, rule in judged if x is not None]
        return Grades.of([x for x, _ in judged_pairs], _joint(rule for _, rule in judged_pairs))

    @property
    def graded(self) -> bool:
        """True where the outcomes are grades, so that the mean reward leads."""
        return not (self.binary and self.right.at is not None and 0 < self.right.at <= 1)

    @property
    def tells(self) -> bool:
        """True where the share of right answers has a meaning."""
        r = self.right
        # For grades the threshold 1 is a guess. It holds only where 1 is full marks: reached, and never exceeded.
        sure = r.named or not self.graded
        return r.at is not None and (sure or (r.full and abs(self.high - r.at) <= SLACK))

    @property
    def scale(self) -> tuple[float, float]:
        """The ends of the scale. For grades that differ: the smallest and the largest outcome. Else a scale that
        contains 0, 1 and the outcomes.

        >>> Grades.of([16, 18.5]).scale, Grades.of([0, 0]).scale, Grades.of([-1.0, -1.0]).scale
        ((16.0, 18.5), (0.0, 1.0), (-1.0, 1.0))
        """
        if self.graded and self.high > self.low:
            return self.low, self.high
        return min(0.0, self.low), max(1.0, self.high)

    def __or__(self, other: Grades) -> Grades:
        """The grades of both sets of outcomes together."""
        right = _joint((self.right, other.right))
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Grades(right, low, high, self.binary and other.binary)
