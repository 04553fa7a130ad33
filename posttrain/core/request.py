"""What an algorithm asks of a rollout: one object, from the algorithm and its stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.core.errors import InvariantError
from posttrain.core.pieces.token import Shown


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """The groups of one step."""

    groups: int
    """Groups wanted."""
    siblings: int
    """Samples of each prompt."""
    extra: int = 0
    """So many more samples of each prompt are started, and those given up that have not ended once `siblings` have."""
    mixed: bool = False
    """Only groups whose raw outcomes differ count."""
    most: int = 8
    """Times `groups` that may be asked for until enough of them count."""
    greedy: bool = False
    """Each prompt's argmax answer too, beside its siblings."""
    shown: Shown | None = None
    """Demonstrations that stand in for the last siblings."""

    def __post_init__(self) -> None:
        if self.groups < 1 or self.siblings < 1 or self.most < 1 or self.extra < 0:
            raise InvariantError(
                f"a request of {self.groups} groups of {self.siblings} + {self.extra} samples, at most {self.most}"
                " times, asks for nothing: give at least one of each, and none less than 0 more"
            )


@dataclass(frozen=True)
class PassRate:
    """How many groups passed a filter, of how many; older ones may count for less."""

    played: float = 0.0
    passed: float = 0.0

    def and_then(self, played: float, passed: float) -> PassRate:
        """With what came after."""
        return PassRate(self.played + played, self.passed + passed)

    def halved(self) -> PassRate:
        return PassRate(self.played / 2, self.passed / 2)

    def wave(self, missing: int) -> int:
        """Groups to ask so that on average `missing` of them pass: as many as are missing where nothing is known.

        32 missing, 20 of 50 passed -> 80; none of 50 passed, which is taken for half a group -> 3200.
        """
        return missing if not self.played else max(missing, math.ceil(missing * self.played / max(self.passed, 0.5)))
