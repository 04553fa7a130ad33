"""The searches as data: their names, their settings, and the scores that each of them reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from posttrain.core.measure.answer_steps import Aggregate
from posttrain.system.errors import ConfigError

Scored = Literal["nothing", "answers", "steps"]
"""The scores that a search reads: none, a score of each whole answer, or a score of each step."""

TreeRule = Literal["puct", "ucb"]
"""Which beginning of a tree goes on."""


@dataclass(frozen=True, kw_only=True)
class SearchKind:
    """One search with its settings. `posttrain.search.play_search` plays it."""

    word: ClassVar[str]
    """Its name on the command line."""
    shown: ClassVar[tuple[str, ...]]
    """Settings that say how large it is. Its name in a table has them in any case, and others where they are not as by
    default."""

    aggregate: Aggregate = "min"
    """How the scores of an answer's steps become one number."""

    def __post_init__(self) -> None:
        for f in fields(self):
            # Every number of a search is a count, but exploration, which may be 0: only what was found counts then.
            value, least = getattr(self, f.name), 0.0 if f.name == "exploration" else 1
            if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value < math.inf:
                raise ConfigError(f"search={self.word}.{f.name}={value:g}: must be at least {least:g}, and finite")

    @property
    def reads(self) -> Scored:
        """The scores that the search reads: of steps, unless a kind of whole answers says otherwise."""
        return "steps"

    @property
    def name(self) -> str:
        """The search as it is written on the command line: the settings of `shown`, and those not as by default.

        >>> BeamSearch(width=2).name, MajorityVote(weighted=True).name
        ('beam.width=2,expand=4', 'vote.count=8,weighted=true')
        """
        return f"{self.word}." + ",".join(self._settings(self.shown) + self._settings(self._changed))

    @property
    def family(self) -> str:
        """Its name without the settings that say how large it is."""
        return ", ".join([self.word, *self._settings(self._changed)])

    @property
    def size(self) -> str:
        """The settings that say how large it is, as numbers.

        >>> TreeSearch().size
        '12x3'
        """
        return "x".join(str(getattr(self, name)) for name in self.shown)

    @property
    def _changed(self) -> tuple[str, ...]:
        """Other settings, where they are not as by default."""
        return tuple(f.name for f in fields(self) if f.name not in self.shown and getattr(self, f.name) != f.default)

    def _settings(self, names: tuple[str, ...]) -> list[str]:
        return [f"{name}={_written(getattr(self, name))}" for name in names]


def _written(value: Any) -> str:
    """A value of a setting as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class BestOfN(SearchKind):
    """The one of several whole answers that scores highest (2110.14168)."""

    word = "best_of"
    shown = ("count",)

    count: int = 8
    """Answers that are sampled. 1: a single answer, which no score is needed for."""

    @property
    def reads(self) -> Scored:
        return "answers" if self.count > 1 else "nothing"


@dataclass(frozen=True, kw_only=True)
class MajorityVote(SearchKind):
    """The answer that most of several whole answers say (2203.11171)."""

    word = "vote"
    shown = ("count",)

    count: int = 8
    """Answers that are sampled."""
    weighted: bool = False
    """Each answer counts as much as its score (2206.02336). The scores must not be negative."""
    answer: Literal["integer", "math", "line"] = "integer"
    """Part of an answer that must be equal: its last integer; its final answer as the verifier of mathematics finds it
    (a box, a phrase, the last number); or its last line."""

    @property
    def reads(self) -> Scored:
        return "answers" if self.weighted else "nothing"


@dataclass(frozen=True, kw_only=True)
class BeamSearch(SearchKind):
    """The best beginnings are kept after each step, and each goes on several times."""

    word = "beam"
    shown = ("width", "expand")

    width: int = 4
    """Beginnings that are kept after each step."""
    expand: int = 4
    """Continuations that each of them is given. The first step has width x expand."""


@dataclass(frozen=True, kw_only=True)
class TreeSearch(SearchKind):
    """A tree of beginnings; PUCT (1712.01815) or UCB chooses which goes on."""

    word = "tree"
    shown = ("expansions", "expand")

    expansions: int = 12
    """How often a beginning is given continuations."""
    expand: int = 3
    """Continuations of a beginning."""
    exploration: float = 1.0
    """How much a beginning that was looked at seldom counts, beside what was found below it."""
    rule: TreeRule = "puct"
    """puct: it looks at the others as the square root of all visits. ucb: as their logarithm (UCT)."""


ONE = BestOfN(count=1)
"""A single answer: what every search is compared with."""
KINDS: dict[str, type[SearchKind]] = {k.word: k for k in (BestOfN, MajorityVote, BeamSearch, TreeSearch)}
"""By name."""
