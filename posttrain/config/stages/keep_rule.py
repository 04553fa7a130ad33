"""Rules that choose which of a prompt's judged completions are kept, to be imitated. Each rule is a type that owns its
numbers.

A rule reads the raw rewards of one prompt's completions and nothing else. Completions that could not be judged, and
those that were cut off, never reach it (`role.learning.rejection_selection`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.system.errors import ConfigError
from posttrain.system.subclass_registry import Open

SLACK = 1e-9
"""How far a reward may lie below a threshold and still reach it. It is the rounding of a sum of rewards, as in
`core.verdict.SOLVED`."""


class Keep(Open, ABC, begin=True):
    """One rule."""

    @abstractmethod
    def chosen(self, rewards: Sequence[float], improvement: int = 0) -> list[int]:
        """Returns the indices of the completions of one prompt that are kept, the first to keep first. There may be
        none.

        Args:
            improvement: how often the same completions were imitated from before (`RejectionMethod.improvements`).
        """

    @abstractmethod
    def words(self) -> str:
        """The rule, one line."""

    @property
    def thresholds(self) -> bool:
        """True where a completion is kept for its own reward, whatever the others got."""
        return False


@dataclass(frozen=True, kw_only=True)
class Passing(Keep):
    """Every completion whose reward reaches a threshold (RFT 2308.01825, STaR 2203.14465, ReST-EM 2312.06585)."""

    at: float = 1.0
    """The threshold. 1: what a verifier calls right."""

    def __post_init__(self) -> None:
        _finite("keep.at", self.at)

    def chosen(self, rewards: Sequence[float], improvement: int = 0) -> list[int]:
        return [i for i, r in enumerate(rewards) if r >= self.at - SLACK]

    def words(self) -> str:
        return f"reward >= {self.at:g}"

    @property
    def thresholds(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Rising(Keep):
    """Every completion whose reward reaches a threshold, which rises each time the same completions are imitated from
    again (ReST 2308.08998, its Improve steps). The last number stays."""

    at: tuple[float, ...] = (0.7, 0.8, 0.9)
    """The thresholds, in order. They belong to a scale of rewards; those of the paper belong to its reward model."""

    def __post_init__(self) -> None:
        if not self.at or list(self.at) != sorted(set(self.at)):
            raise ConfigError(f"keep.at={','.join(f'{x:g}' for x in self.at) or 'none'}: give numbers that rise")
        for x in self.at:
            _finite("keep.at", x)

    def chosen(self, rewards: Sequence[float], improvement: int = 0) -> list[int]:
        return Passing(at=self.at[min(improvement, len(self.at) - 1)]).chosen(rewards)

    def words(self) -> str:
        return f"reward >= {', then '.join(f'{x:g}' for x in self.at)}"

    @property
    def thresholds(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Best(Keep):
    """The best completion of each prompt; of equal ones the first (RAFT 2304.06767)."""

    above: float | None = None
    """The best one is kept only if its reward is greater than this. None: always, as in the paper, whose reward is a
    model's. A verifier gives all completions of a hard prompt 0; set 0 for it, or a wrong one is imitated."""

    def __post_init__(self) -> None:
        if self.above is not None:
            _finite("keep.above", self.above)

    def chosen(self, rewards: Sequence[float], improvement: int = 0) -> list[int]:
        if not rewards:
            return []
        # `-i`: of equal rewards the first, whatever `max` does with ties.
        best = max(range(len(rewards)), key=lambda i: (rewards[i], -i))
        return [best] if self.above is None or rewards[best] > self.above else []

    def words(self) -> str:
        return "the best of a prompt" + ("" if self.above is None else f", where its reward > {self.above:g}")


@dataclass(frozen=True, kw_only=True)
class TopShare(Keep):
    """The best share of each prompt's completions, at least one; of equal ones the first."""

    share: float = 0.25
    """The share, rounded down to whole completions."""
    above: float | None = None
    """Only completions whose reward is greater than this are kept. None: whatever their reward is."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"keep.share={self.share:g}: a share in (0, 1]")
        if self.above is not None:
            _finite("keep.above", self.above)

    def chosen(self, rewards: Sequence[float], improvement: int = 0) -> list[int]:
        order = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
        # The slack keeps a product such as .29 * 100 from being rounded down to 28.
        top = order[: max(1, int(self.share * len(order) + SLACK))]
        return [i for i in top if self.above is None or rewards[i] > self.above]

    def words(self) -> str:
        return f"the best {self.share:.0%} of a prompt" + (
            "" if self.above is None else f" with reward > {self.above:g}"
        )


def _finite(path: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{path}={value:g}: a finite number, on the scale of the rewards")
