"""The rollouts of one step, with everything that learning from them and checking them needs later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.gauge import Gauges
from posttrain.core.types import Group


@dataclass(frozen=True)
class PromptState:
    """Which prompts the stage had taken after these rollouts. A checkpoint of the step stores it (`role.prompts`)."""

    cursor: int
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, eq=False)
class Experience:
    """Every group that a step played, in prompt order, and which of them passed the filter.

    A check that reads only some groups must choose them by this order. Which ones passed depends on their answers, so
    choosing by that would bias it.
    """

    index: int
    """The step it is for, counted from 1."""
    version: int
    """The version of the weights when its rollouts started. No token is older."""
    played: tuple[Group, ...]
    passed: tuple[bool, ...]
    wanted: int
    """How many groups the step learns from: the first ones that passed."""
    engine: Gauges = field(default_factory=Gauges)
    """The engine's counters for these rollouts."""
    prompts: PromptState = PromptState(0)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the step learns from."""
        return self._passed()[: self.wanted]

    @property
    def spare(self) -> tuple[Group, ...]:
        """The groups that passed after enough others had."""
        return self._passed()[self.wanted :]

    @property
    def refused(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if not passed)

    def _passed(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if passed)
