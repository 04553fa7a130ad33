"""The verdicts of verifiers about an episode, and the outcome as their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.system.errors import InvariantError

SOLVED = 1.0 - 1e-9
"""A raw outcome of at least this counts as solved. 1e-9 is left to the rounding of a sum of rewards."""


class State(StrEnum):
    """The state of a verdict: whether it has a score. `failed` is an outage on our side, never a wrong answer."""

    VALUE = "value"
    ABSTAIN = "abstain"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """The verdict of one verifier about one episode.

    What the policy's answer caused (its time-out, its crash) is a value of 0 with its `kind`. What we caused (an
    outage, a broken worker) is `failed`; it is retried, then the sample is excluded from baseline and batch.
    """

    state: State
    score: float | None
    kind: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        if (self.state is State.VALUE) != (self.score is not None and math.isfinite(self.score)):
            raise InvariantError(
                f"a verdict is a finite score exactly when its state is value: got {self.state}, {self.score}"
            )

    @staticmethod
    def value(score: float, kind: str = "", why: str = "") -> Verdict:
        return Verdict(State.VALUE, float(score), kind, why)

    @staticmethod
    def abstain(why: str = "") -> Verdict:
        return Verdict(State.ABSTAIN, None, "", why)

    @staticmethod
    def failed(kind: str, why: str = "") -> Verdict:
        return Verdict(State.FAILED, None, kind, why)


@dataclass(frozen=True)
class Judged:
    """One source's verdict with its weight in the outcome.

    With `end` it is about a part: the episode up to its spoken token number `end` (counted from 1). Without `paid` that
    is the score of a step. It is never a part of the outcome; only a baseline that compares steps reads it. With `paid`
    it is a reward for the turn that ends there: a part of the outcome, which turn-level credit places at that end.
    `resolution` is the relative difference up to which two scores of this source count as equal
    (`core.measure.equal_numbers`). With `measured` it is no reward: it says how good the episode is, and nothing is
    learned from it. With `by_model` a model gave the score (a reward model, a judge), so it is a grade
    (`core.measure.right`).
    """

    source: str
    weight: float
    verdict: Verdict
    end: int | None = None
    paid: bool = False
    resolution: float = RESOLUTION
    measured: bool = False
    by_model: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.resolution < 1:
            raise InvariantError(f"reward source {self.source!r}: resolution={self.resolution} must be in [0, 1)")
        if self.paid and self.end is None:
            raise InvariantError(f"reward source {self.source!r}: a paid turn needs the spoken token at which it ended")
        if self.measured and self.end is not None:
            raise InvariantError(f"reward source {self.source!r}: what is measured is about the whole episode")

    @property
    def counts(self) -> bool:
        """True where the verdict is a part of the outcome."""
        return not self.measured and (self.end is None or self.paid)


def outcome(verdicts: Sequence[Judged]) -> float | None:
    """The raw reward: weighted sum of the sources that gave a value; abstentions leave the sum.

    None where a source failed (the sample is excluded) or where all abstained (nobody judged it).
    """
    # Tested before the sum: without the failed source the sum would be too
    # low, and the policy would learn from an outage of ours.
    if failed(verdicts):
        return None
    scores = [j.weight * j.verdict.score for j in verdicts if j.counts and j.verdict.score is not None]
    # fsum is exact, so the order in which sources answered changes no bit.
    return math.fsum(scores) if scores else None


def failed(verdicts: Sequence[Judged]) -> bool:
    """Returns whether a source of the outcome has a verdict `failed`."""
    return any(j.counts and j.verdict.state is State.FAILED for j in verdicts)


def figure_failed(verdicts: Sequence[Judged]) -> bool:
    """Returns whether an episode has no figure (`Episode.figure`) because a source failed."""
    sources = [j for j in verdicts if j.measured] or [j for j in verdicts if j.counts]
    return any(j.verdict.state is State.FAILED for j in sources)


def truth(verdicts: Sequence[Judged]) -> float | None:
    """The weighted sum of what is measured and not paid. None where nothing is, or a measured source gave no score."""
    measures = [j for j in verdicts if j.measured]
    scores = [j.weight * j.verdict.score for j in measures if j.verdict.score is not None]
    # Unlike the outcome, all sources must have a score: a sum over fewer sources would measure something else.
    return math.fsum(scores) if measures and len(scores) == len(measures) else None


def size(verdicts: Sequence[Judged]) -> float:
    """The sum of the absolute values of the outcome's terms. Rounding of the outcome is relative to it."""
    return math.fsum(abs(j.weight * j.verdict.score) for j in verdicts if j.counts and j.verdict.score is not None)


def resolution(verdicts: Sequence[Judged]) -> float:
    """The coarsest resolution of the sources that gave a value."""
    # The sum is as coarse as its coarsest term.
    return max((j.resolution for j in verdicts if j.counts and j.verdict.score is not None), default=RESOLUTION)
