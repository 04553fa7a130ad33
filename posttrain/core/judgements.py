"""Completions that somebody judged: which of two was preferred, a list in order, a label, ratings, labels of steps.

Preference losses and reward models learn from them. An environment offers them (`Abilities.judgements`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.core.types import Task
from posttrain.system.errors import DataError

Kind = Literal["pair", "ranking", "label", "rating", "steps"]
"""The kinds of judgement, by the name of their class in small letters (`steps` is `StepLabels`)."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The fields that all kinds of judgement share. A completion is the text after the prompt, without a stop token."""

    task: Task
    """The prompt, and the row's further columns."""
    place: str = ""
    """`file:line` of the row, for messages; empty where no file holds it."""

    def told(self, why: str) -> DataError:
        """An error about this judgement, with its place."""
        return DataError(f"{self.place or f'the judgement of task {self.task.id!r}'}: {why}")


@dataclass(frozen=True, kw_only=True)
class Pair(Judgement):
    """Two completions, of which one was preferred."""

    chosen: str
    rejected: str
    margin: float | None = None
    """By how much the chosen completion was preferred, where the data says so."""
    weight: float = 1.0
    """Weight of this pair in the loss, beside other pairs."""


@dataclass(frozen=True, kw_only=True)
class Ranking(Judgement):
    """Two or more completions, the best one first."""

    completions: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.completions) < 2:
            raise self.told(f"a ranking orders at least 2 completions, and this one has {len(self.completions)}")


@dataclass(frozen=True, kw_only=True)
class Label(Judgement):
    """One completion, judged good or bad."""

    completion: str
    good: bool


@dataclass(frozen=True, kw_only=True)
class Rating(Judgement):
    """One completion with a number for each attribute, such as helpfulness."""

    completion: str
    ratings: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class StepLabels(Judgement):
    """One completion in steps, with a label for each: 1 right, 0 neutral, -1 wrong."""

    steps: tuple[str, ...]
    labels: tuple[int, ...]
    values: tuple[float, ...] = ()
    """The chance of a right answer after each step, in [0, 1]; empty where the data has none."""
    separator: str = "\n"
    """Text between two steps in the completion, where a step does not end with it."""

    def __post_init__(self) -> None:
        if self.values and len(self.values) != len(self.steps):
            raise self.told(f"{len(self.steps)} steps have {len(self.values)} values: give one for each step")
        if len(self.steps) != len(self.labels):
            raise self.told(f"{len(self.steps)} steps have {len(self.labels)} labels: give one for each step")
