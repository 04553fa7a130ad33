"""Measures how well a process reward model finds the first wrong step: ProcessBench's metric (2412.06559)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.system.errors import DataError


@dataclass(frozen=True)
class ProcessBenchScore:
    """Accuracy on answers with a wrong step and on answers without one, and their harmonic mean."""

    erroneous: float
    """Share of the answers with a wrong step whose first wrong step is found."""
    correct: float
    """Share of the answers without one in which none is found."""
    erroneous_count: int
    correct_count: int

    @property
    def f1(self) -> float:
        """The harmonic mean of the two accuracies; 0 where one of them is."""
        total = self.erroneous + self.correct
        return 2 * self.erroneous * self.correct / total if total else 0.0

    @staticmethod
    def of(truth: Sequence[int], found: Sequence[int]) -> ProcessBenchScore:
        """From the index of the first wrong step of each answer, -1 where there is none, and the index that was found.
        Raises DataError: answers of one kind are missing, so that there is no mean of the two.

        >>> score = ProcessBenchScore.of([1, 0, -1, -1], [1, 2, -1, -1])
        >>> score.erroneous, score.correct, round(score.f1, 4)
        (0.5, 1.0, 0.6667)
        """
        pairs = list(zip(truth, found, strict=True))
        wrong = [t == f for t, f in pairs if t >= 0]
        right = [f == -1 for t, f in pairs if t < 0]
        if not wrong or not right:
            raise DataError(
                f"ProcessBench's score needs answers with a wrong step and answers without one, and there are"
                f" {len(wrong)} and {len(right)}: add the other kind"
            )
        return ProcessBenchScore(sum(wrong) / len(wrong), sum(right) / len(right), len(wrong), len(right))
