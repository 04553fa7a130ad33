"""The rollouts of one step, with everything that learning from them and checking them needs later."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from posttrain.core.gauge import Gauges
from posttrain.core.types import Group


@dataclass(frozen=True, eq=False)
class Experience:
    """Every group that a step played, in prompt order, and which of them passed the filter.

    A check that reads only some groups must choose them by this order, and never by whether they passed. Passing
    depends on the answers, so that choice would bias the check.
    """

    index: int
    """The step it is for, counted from 1."""
    version: int
    """The version of the weights when the step's rollouts started. No token is older."""
    played: tuple[Group, ...]
    passed: tuple[bool, ...]
    wanted: int
    """How many groups the step learns from: the first ones that passed."""
    engine: Gauges = field(default_factory=Gauges)
    """The engine's counters for these rollouts."""
    walked: int = 0
    """Number of prompts whose groups this stage has taken so far, this step included."""
    replayed: tuple[Group, ...] = ()
    """Groups of earlier steps that this one learns from again."""
    versions: tuple[int, ...] = ()
    """The versions that the step's tokens may have, oldest first: the learner's at the beginning of this step, and of
    as many steps before it as samples of the stage may be late. Empty: `version` alone."""

    @property
    def promised(self) -> tuple[int, ...]:
        """The versions that the step's tokens may have, oldest first."""
        return self.versions or (self.version,)

    def behind(self, version: np.ndarray) -> np.ndarray:
        """The number of steps by which tokens of these versions are older than the learner at the step's beginning.

        A step that did not change the weights does not count.
        """
        # `unique` gives the different versions, ascending. `searchsorted` from the right
        # counts those up to `version`; the others are newer.
        newer = np.unique(self.promised)
        return len(newer) - np.searchsorted(newer, version, side="right")

    @property
    def fresh(self) -> tuple[Group, ...]:
        """The groups that the step learns from for the first time."""
        return self._where_passed_is(True)[: self.wanted]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the step learns from."""
        return (*self.fresh, *self.replayed)

    @property
    def spare(self) -> tuple[Group, ...]:
        """The groups that passed after enough others had."""
        return self._where_passed_is(True)[self.wanted :]

    @property
    def refused(self) -> tuple[Group, ...]:
        """The groups that did not pass the filter."""
        return self._where_passed_is(False)

    def _where_passed_is(self, passed: bool) -> tuple[Group, ...]:
        """The played groups that passed the filter, or those that did not."""
        return tuple(g for g, p in zip(self.played, self.passed, strict=True) if p == passed)
