"""The request of an algorithm to a rollout: one object, made from the algorithm and its stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from posttrain.core.stop import StepNumber
from posttrain.ladder.pieces.token_choice import Shown
from posttrain.system.errors import InvariantError


class AsksGroups(Protocol):
    """A stage that learns from groups (`config.stages.reinforce.Reinforce`)."""

    @property
    def prompts(self) -> int: ...
    @property
    def siblings(self) -> int: ...
    @property
    def oversample(self) -> int: ...
    @property
    def refill(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """What a step asks of the rollout: how many groups, how many samples of each prompt, and which groups count."""

    groups: int
    """Groups wanted."""
    siblings: int
    """Samples of each prompt."""
    extra: int = 0
    """Additional samples of each prompt that are started. Once `siblings` have ended, the rest is aborted."""
    mixed: bool = False
    """Only groups whose raw outcomes differ count."""
    most: int = 8
    """At most this many times `groups` are played until enough of them count."""
    greedy: bool = False
    """Whether to play also the greedy answer of each prompt, beside its siblings."""
    shown: Shown | None = None
    """Demonstrations that replace the last siblings."""
    at: StepNumber = StepNumber()
    """The step that is played, for rewards that change with it."""

    def __post_init__(self) -> None:
        if self.groups < 1 or self.siblings < 1 or self.most < 1 or self.extra < 0:
            raise InvariantError(
                f"a request of {self.groups} groups of {self.siblings} + {self.extra} samples, at most {self.most}"
                " times, asks for nothing: give at least one of each, and none less than 0 more"
            )


@dataclass(frozen=True)
class PassRate:
    """Number of groups that were played, and of those that passed a filter. Older groups may count for less."""

    played: float = 0.0
    passed: float = 0.0

    def and_then(self, played: float, passed: float) -> PassRate:
        """The rate with further groups added."""
        return PassRate(self.played + played, self.passed + passed)

    def halved(self) -> PassRate:
        """The same rate, in which all groups so far count half."""
        return PassRate(self.played / 2, self.passed / 2)

    def wave(self, missing: int) -> int:
        """Returns the number of groups to play so that on average `missing` of them pass; `missing` where none was
        played. 32 missing, 20 of 50 passed -> 80. None of 50 passed counts as half a group, so that the wave is not
        infinite: -> 3200."""
        return missing if not self.played else max(missing, math.ceil(missing * self.played / max(self.passed, 0.5)))
