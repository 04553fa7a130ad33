"""Steps of an answer: where they end, labels by completion, the scores of several steps as one, and the first error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import InvariantError

Aggregate = Literal["min", "product", "mean", "last"]
"""How the scores of steps become one score of the answer (2312.08935 takes the minimum)."""


def step_ends(text: str, separator: str) -> tuple[int, ...]:
    """The number of characters up to the end of each step.

    A separator belongs to the step before it. The text after the last separator is a step too. A blank piece is no
    step: it belongs to the step before it, or to the first step if it comes before all of them.

    >>> step_ends("3+4=7;7+5=12", ";")
    (6, 12)
    >>> step_ends("3+4=7;;7+5=12;", ";")
    (7, 14)
    """
    ends, at = list[int](), 0
    while at < len(text):
        place = text.find(separator, at)
        end = len(text) if place < 0 else place + len(separator)
        # A blank piece behind a step belongs to it. One before the first step ends nothing, so that step begins at 0.
        if text[at:end].replace(separator, "").strip():
            ends.append(end)
        elif ends:
            ends[-1] = end
        at = end
    return tuple(ends)


def steps_of_text(text: str, separator: str) -> tuple[str, ...]:
    """The texts of the steps, each with its separator. Joined, they are the text.

    >>> steps_of_text("3+4=7;7+5=12", ";")
    ('3+4=7;', '7+5=12')
    """
    ends = step_ends(text, separator)
    return tuple(text[a:b] for a, b in zip((0, *ends), ends, strict=False))


def joined(steps: Sequence[str], separator: str) -> tuple[str, tuple[int, ...]]:
    """(the text of these steps, the number of characters up to the end of each). A separator is written between two
    steps where the first does not end with it.

    >>> joined(["3+4=7", "7+5=12"], ";")
    ('3+4=7;7+5=12', (6, 12))
    >>> joined(["3+4=7;", "7+5=12"], ";")
    ('3+4=7;7+5=12', (6, 12))
    """
    text, ends = "", list[int]()
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        text += step if last or step.endswith(separator) else step + separator
        ends.append(len(text))
    return text, tuple(ends)


def aggregated(scores: Sequence[float], aggregate: Aggregate) -> float:
    """The scores of an answer's steps as one number; InvariantError where there is no step.

    >>> [round(aggregated([0.9, 0.4, 0.8], how), 3) for how in ("min", "product", "mean", "last")]
    [0.4, 0.288, 0.7, 0.8]
    """
    if not scores:
        raise InvariantError("an answer without a step has no score: leave it out, or count it as not judged")
    match aggregate:
        case "min":
            return min(scores)
        case "product":
            return math.prod(scores)
        case "mean":
            return math.fsum(scores) / len(scores)
        case "last":
            return scores[-1]


def progress(scores: Sequence[float]) -> tuple[float, ...]:
    """Returns the amount by which each step raised the chance of success: its score less that of the step before it
    (2410.08146). The chance before the first step is the same for all answers to a prompt, and is taken as 0.

    >>> [round(x, 3) for x in progress([0.2, 0.3, 0.1])]
    [0.2, 0.1, -0.2]
    """
    return tuple(after - before for before, after in zip((0.0, *scores), scores, strict=False))


def first_error(scores: Sequence[float], at: float = 0.5) -> int:
    """The index of the first step that scores below `at`; -1 where none does (ProcessBench, 2412.06559).

    >>> first_error([0.9, 0.4, 0.8]), first_error([0.9, 0.8])
    (1, -1)
    """
    return next((i for i, score in enumerate(scores) if score < at), -1)


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """Counts of the completions from the end of each step, and of the right ones among them."""

    right: tuple[int, ...]
    """Right completions, of each step."""
    asked: tuple[int, ...]
    """Judged completions, of each step: at least 1. The last step of an answer that ended has 1: the answer itself."""

    @property
    def hard(self) -> tuple[bool, ...]:
        """Returns for each step whether any completion was right (2312.08935, hard estimation).

        >>> StepValues(right=(0, 3, 8), asked=(8, 8, 8)).hard
        (False, True, True)
        """
        return tuple(r > 0 for r in self.right)

    @property
    def soft(self) -> tuple[float, ...]:
        """The share of right completions, of each step (soft estimation).

        >>> StepValues(right=(0, 3, 8), asked=(8, 8, 8)).soft
        (0.0, 0.375, 1.0)
        """
        return tuple(r / n for r, n in zip(self.right, self.asked, strict=True))

    def best_of(self, count: int) -> tuple[float, ...]:
        """The chance that at least one of `count` completions is right, of each step.

        It is the unbiased estimate 1 - C(wrong, count) / C(asked, count) from all judged completions: the value of a
        prover that takes the best of `count` answers (2410.08146). Where fewer were judged, their number is taken as
        `count`. At the end of an answer the only completion is the answer itself, so the value is 0 or 1.

        >>> values = StepValues(right=(0, 1, 3, 1), asked=(4, 4, 4, 1))
        >>> values.best_of(1) == values.soft, values.best_of(2)
        (True, (0.0, 0.5, 1.0, 1.0))
        """
        # The chance that a random choice of k of n judged completions, with r right ones, holds no right one.
        each = [(r, n, min(count, n)) for r, n in zip(self.right, self.asked, strict=True)]
        return tuple(1 - math.comb(n - r, k) / math.comb(n, k) for r, n, k in each)
