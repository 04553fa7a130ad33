"""Episodes after scoring and after credit: the input of the mathematics, and its result for each spoken token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from posttrain.core.streams import ADVANTAGE, RETURN, Stream, Streamed
from posttrain.core.types import Episode, Group
from posttrain.system.errors import InvariantError


@dataclass(frozen=True, eq=False)
class Scored(Streamed[tuple[np.ndarray, ...]]):
    """A judged episode with the scores that models gave it in forward passes without gradient: of each stream that the
    algorithm reads (`core.streams.SCORED`) one array per segment, over its spoken tokens."""

    HOLDER: ClassVar[str] = "what was scored of an episode"
    episode: Episode
    unhinted: str = ""
    """The reason why the teacher was shown nothing more than the policy, where it should have been; '' otherwise. Such
    an episode has no gradient."""

    def __post_init__(self) -> None:
        if self.episode.reward is None:
            raise InvariantError("an episode that was not judged cannot be scored: it leaves baseline and batch")
        for stream, parts in self.streams.items():
            if len(parts) != len(self.episode.segments):
                raise InvariantError(
                    f"stream {stream.name!r} has {len(parts)} parts for {len(self.episode.segments)} segments: give one"
                    " to each"
                )
            for segment, x in zip(self.episode.segments, parts, strict=True):
                stream.check(x, segment.spoken)


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with its judged episodes scored, in order of sibling."""

    group: Group
    episodes: tuple[Scored, ...]


@dataclass(frozen=True, eq=False)
class EpisodeCredit:
    """The credit of one episode: per segment, arrays over its spoken tokens in order.

    `shaped` is the reward after shaping; the raw reward stays in the episode. `advantage` is float64 per spoken token.
    `returns` are the value targets, only where the algorithm learns values. `dropped` is the reason why no token of
    this episode may have a gradient, '' otherwise. A dropped episode counts in the baseline and is in no batch.
    """

    scored: Scored
    shaped: float
    advantage: tuple[np.ndarray, ...]
    returns: tuple[np.ndarray, ...] | None = None
    dropped: str = ""

    def __post_init__(self) -> None:
        for segment, a in zip(self.episode.segments, self.advantage, strict=True):
            if len(a) != segment.spoken:
                raise InvariantError(f"credit of {len(a)} tokens for {segment.spoken} spoken ones")
            # Checked here, where the task is known. In the loss one NaN would make the
            # whole gradient NaN, and no message could name its episode.
            if not np.all(np.isfinite(a)):
                raise InvariantError(f"credit of task {self.episode.task.id!r} is not finite")

    @property
    def episode(self) -> Episode:
        return self.scored.episode

    @property
    def streams(self) -> dict[Stream, tuple[np.ndarray, ...]]:
        """The scored streams with advantage and return: all that a batch holds of this episode."""
        returns = {} if self.returns is None else {RETURN: self.returns}
        return {ADVANTAGE: self.advantage, **returns, **self.scored.streams}


@dataclass(frozen=True, eq=False)
class GroupCredit:
    """Credit of one group's judged episodes, in order. `silent`: whether a group-relative baseline found no spread."""

    group: Group
    episodes: tuple[EpisodeCredit, ...]
    silent: bool


@dataclass(frozen=True, eq=False)
class Credit:
    """Credit of a whole step, and the moving baseline after it (unchanged where the algorithm has none)."""

    groups: tuple[GroupCredit, ...]
    ema: float
    emas: Mapping[str, float] = field(default_factory=dict[str, float])
    """The moving baseline of each source of tasks, where there is one for each (`Ema.by`)."""
