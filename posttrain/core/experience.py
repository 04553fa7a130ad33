"""The groups played for one step, with everything that learning from them and checking them needs later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.gauge import Gauges
from posttrain.core.types import Group


@dataclass(frozen=True)
class Walk:
    """Position of the prompt order after the step's prompts were drawn. A checkpoint of the step stores it."""

    cursor: int
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, eq=False)
class Experience:
    """All groups that a step played, in the order in which their prompts were drawn, and which passed the filter.

    A check that reads only some of the groups chooses them by this order. Choosing by `passed` would depend on the
    answers.
    """

    index: int
    """Number of the step it is for, from 1."""
    version: int
    """Version of the weights when it began. No token is from older weights."""
    played: tuple[Group, ...]
    passed: tuple[bool, ...]
    wanted: int
    """How many groups the step takes: the first of those that passed."""
    engine: Gauges = field(default_factory=Gauges)
    """The engine's counters for these groups."""
    walk: Walk = Walk(0)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the step learns from."""
        return self._passed()[: self.wanted]

    @property
    def spare(self) -> tuple[Group, ...]:
        """The groups that passed but were not needed."""
        return self._passed()[self.wanted :]

    @property
    def refused(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if not passed)

    def _passed(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if passed)
