"""What was asked of the policy for one step, with everything that learning from it and checking it needs later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.gauge import Gauges
from posttrain.core.types import Group


@dataclass(frozen=True)
class PromptState:
    """Where the walk through the prompts stood after asking: what a checkpoint of the step stores."""

    cursor: int
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, eq=False)
class Experience:
    """Every group that a step played, in the order they were asked, and which of them passed the filter.

    Whoever looks at some of them chooses by this order: which ones passed is known only by what they say.
    """

    index: int
    """The step it is for, from 1."""
    version: int
    """Of the weights it was begun under: no token is older."""
    played: tuple[Group, ...]
    passed: tuple[bool, ...]
    wanted: int
    """Groups the step has room for: the first of those that passed."""
    engine: Gauges = field(default_factory=Gauges)
    """The engine's counters for it."""
    prompts: PromptState = PromptState(0)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those that the step learns from."""
        return self._passed()[: self.wanted]

    @property
    def spare(self) -> tuple[Group, ...]:
        """Those that passed when there was no room any more."""
        return self._passed()[self.wanted :]

    @property
    def refused(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if not passed)

    def _passed(self) -> tuple[Group, ...]:
        return tuple(g for g, passed in zip(self.played, self.passed, strict=True) if passed)
