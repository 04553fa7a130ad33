"""What the rooms hold in their hands. Each type refuses to be born wrong.

Axis letters, used as suffixes: P prompts in a step, G siblings of a prompt, T tokens of a segment, S segments in a
batch, N packed positions, M spoken positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np

from posttrain.core.content import Content
from posttrain.core.errors import InvariantError
from posttrain.core.sampling import Sampling
from posttrain.core.seats import SeatTurn
from posttrain.core.spread import rounding, spread
from posttrain.core.stop import Stop as Stop
from posttrain.core.verdict import Judged, outcome, resolution, size


class Message(TypedDict):
    """One entry of a chat prompt, as chat templates take it. The optional fields belong to turns that call tools and
    their answers."""

    role: str
    content: Content
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    thinking: NotRequired[str]


@dataclass(frozen=True)
class Task:
    """Frozen data; behaviour lives in the environment. `id` is unique within an environment and split."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra columns of the source; reward functions receive them as keyword arguments."""


SHOWN = -2
"""Version of a token that a demonstration wrote: learned from, but said by no weights of ours."""


OUTSIDE = -3
"""Version of a token that a server's weights said, under a contract that is only believed: never learned from. Its
log-prob may be unknown, then 0."""


@dataclass(frozen=True)
class Kept:
    """Ragged kept token sets of `n` truncated draws: draw i kept `ids[offsets[i]:offsets[i+1]]` (ascending)."""

    offsets: np.ndarray
    ids: np.ndarray

    def __post_init__(self) -> None:
        if (
            self.offsets.ndim != 1
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.ids)
            or np.any(np.diff(self.offsets) < 1)
        ):
            raise InvariantError(
                "kept sets: offsets must start at 0, end at len(ids), and every set holds at least the token said"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(sets: Sequence[np.ndarray]) -> Kept:
        offsets = np.concatenate([[0], np.cumsum([len(s) for s in sets])]).astype(np.int64)
        return Kept(offsets, np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32))

    def sets(self) -> list[np.ndarray]:
        return [self.ids[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


@dataclass(frozen=True, eq=False)
class Top:
    """The sampler's `K` most probable tokens at each of n draws, most probable first: ids int32 [n, K], logp float32
    [n, K]."""

    ids: np.ndarray
    logp: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logp.shape:
            raise InvariantError(
                f"top tokens: ids {self.ids.shape} and log-probs {self.logp.shape} must be one [n, K] each"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def join(parts: Sequence[Top], k: int) -> Top:
        ids = np.concatenate([np.zeros((0, k), np.int32), *(p.ids for p in parts)])
        return Top(ids, np.concatenate([np.zeros((0, k), np.float32), *(p.logp for p in parts)]))


@dataclass(frozen=True, eq=False)
class Said:
    """One turn as an engine returns it: tokens, the log-prob of each under the resolved `Sampling`, and who said it.

    ids int32 [n], logp float32 [n], version int32 [n] (weights that said each token); `kept` exactly where the
    sampling truncates; `stop` is SAID (the last token is a stop id), STRING (the last token completes a stop string and
    is no stop id), LENGTH or CONTEXT.
    """

    ids: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    stop: Stop
    kept: Kept | None = None
    top: Top | None = None

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.logp) == len(self.version):
            raise InvariantError(
                f"said {len(self.ids)} tokens with {len(self.logp)} log-probs and {len(self.version)} versions"
            )
        if self.kept is not None and len(self.kept) != len(self.ids):
            raise InvariantError(f"said {len(self.ids)} tokens with {len(self.kept)} kept sets")
        if self.top is not None and len(self.top) != len(self.ids):
            raise InvariantError(f"said {len(self.ids)} tokens with top tokens of {len(self.top)} draws")


@dataclass(frozen=True, eq=False)
class Segment:
    """One token sequence and who wrote each token. All arrays [T].

    mask is True where the policy spoke; there logp is finite and version >= 0. Elsewhere logp is NaN and version -1,
    so that reading an unspoken log-prob poisons whatever read it instead of passing for a number.
    Tokens of a demonstration count as spoken, with version SHOWN and logp 0: their sampler is not known. Those of a
    foreign server have version OUTSIDE.
    `kept` holds one set per spoken token, in order, exactly where `sampling.truncated`; `top` exactly where
    `sampling.top`; `in_turn` (int32, the position of each spoken token in its turn) exactly where `sampling.in_turn`:
    two turns may follow each other with nothing seen between them, so the mask does not tell where one begins.
    """

    ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    sampling: Sampling
    kept: Kept | None = None
    top: Top | None = None
    in_turn: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        if not len(self.mask) == len(self.logp) == len(self.version) == n:
            raise InvariantError(
                f"misaligned segment: {n} ids, {len(self.mask)} mask, {len(self.logp)} logp, {len(self.version)}"
                " version"
            )
        if (
            self.ids.dtype != np.int32
            or self.mask.dtype != np.bool_
            or self.logp.dtype != np.float32
            or self.version.dtype != np.int32
        ):
            raise InvariantError("segment dtypes are ids int32, mask bool, logp float32, version int32")
        if n and self.mask[0]:
            raise InvariantError(
                "the first token of a segment has nothing before it, so the policy cannot have said it: see() a prompt"
                " first"
            )
        spoken = self.logp[self.mask]
        if not np.all(np.isfinite(spoken)) or np.any(spoken > 1e-5):
            raise InvariantError("every spoken token carries a finite log-prob <= 0")
        if not np.all(np.isnan(self.logp[~self.mask])) or np.any(self.version[~self.mask] != -1):
            raise InvariantError("unspoken tokens carry logp NaN and version -1")
        if np.any((self.version[self.mask] < 0) & ~np.isin(self.version[self.mask], (SHOWN, OUTSIDE))):
            raise InvariantError("spoken tokens carry the version >= 0 of the weights that said them, SHOWN or OUTSIDE")
        if self.sampling.truncated != (self.kept is not None):
            raise InvariantError("kept sets are stored exactly where the sampling truncates the support")
        if self.kept is not None and len(self.kept) != int(self.mask.sum()):
            raise InvariantError(f"{int(self.mask.sum())} spoken tokens but {len(self.kept)} kept sets")
        if bool(self.sampling.top) != (self.top is not None) or (
            self.top is not None and len(self.top) != int(self.mask.sum())
        ):
            raise InvariantError(
                "top tokens are stored for every spoken token exactly where sampling.top asks for them"
            )
        if self.sampling.in_turn != (self.in_turn is not None):
            raise InvariantError(
                "positions in the turn are stored exactly where the sampling reads them (min_tokens, bad sequences)"
            )
        if self.in_turn is not None:
            _check_in_turn(self.in_turn, self.mask)

    @property
    def shown(self) -> bool:
        """Whether a demonstration wrote the spoken tokens."""
        return bool(np.any(self.version[self.mask] == SHOWN))

    @property
    def spoken(self) -> int:
        return int(self.mask.sum())


def _check_in_turn(in_turn: np.ndarray, mask: np.ndarray) -> None:
    """Each spoken token begins a turn (0) or stands right after the one before it in the same turn."""
    at = np.flatnonzero(mask)
    if len(in_turn) != len(at):
        raise InvariantError(f"{len(at)} spoken tokens but {len(in_turn)} positions in a turn")
    follows = np.append(False, (np.diff(at) == 1) & (np.diff(in_turn) == 1)) if len(at) else np.zeros(0, bool)
    if np.any((in_turn != 0) & ~follows):
        raise InvariantError("positions in a turn count up from 0, over tokens that stand side by side")


@dataclass(frozen=True, eq=False)
class Episode:
    """What happened: one attempt at a task. What the algorithm makes of it is `Credit`, kept apart.

    More than one segment only where history was rewritten. `reward` is the raw outcome (None: not judged, so the
    sample is excluded); filters, pass@k and difficulty read this one and never the shaped reward.
    """

    task: Task
    visit: int
    sibling: int
    segments: tuple[Segment, ...]
    stop: Stop
    verdicts: tuple[Judged, ...]
    text: str = ""
    """What the policy said, decoded, for people; nothing computes on it after judging."""
    error: str = ""
    state: Any = None
    """The world as the episode left it (`Talk.leave`), as verifiers saw it."""
    turns: tuple[int, ...] = ()
    """Tokens of each turn the policy said, in order; over all segments they are its spoken tokens. Empty for a
    demonstration."""
    cut: bool = False
    """Whether a turn was given up while it was being said: its tokens are in no segment."""
    seats: tuple[SeatTurn, ...] = ()
    """What other seats said, in order. Their tokens are in no segment either."""

    def __post_init__(self) -> None:
        if self.turns and sum(self.turns) != self.spoken:
            raise InvariantError(
                f"task {self.task.id!r}: turns of {sum(self.turns)} tokens in an episode of {self.spoken} spoken ones."
                " Every token of a turn enters the transcript, and no other is spoken"
            )

    @property
    def reward(self) -> float | None:
        return outcome(self.verdicts)

    @property
    def spoken(self) -> int:
        return sum(s.spoken for s in self.segments)

    @property
    def shown(self) -> bool:
        """Whether a demonstration wrote it."""
        return any(s.shown for s in self.segments)


@dataclass(frozen=True, eq=False)
class Group:
    """Siblings of one prompt: born together, never a reshape. Episodes are ordered by sibling."""

    task: Task
    visit: int
    episodes: tuple[Episode, ...]
    greedy: Episode | None = None
    """The prompt's argmax answer, where a baseline compares with it. It is judged, and in no batch."""
    aborted: int = 0
    """Siblings given up because enough others had ended first (`Reinforce.oversample`)."""
    aborted_tokens: int = 0
    """Tokens of whole turns that those had said."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise InvariantError(f"group of task {self.task.id!r} has no episodes")
        if any(e.task.id != self.task.id or e.visit != self.visit for e in self.episodes):
            raise InvariantError(f"group of task {self.task.id!r} holds an episode of another task or visit")
        if [e.sibling for e in self.episodes] != sorted({e.sibling for e in self.episodes}):
            raise InvariantError(f"group of task {self.task.id!r}: siblings must be distinct and in order")

    @property
    def judged(self) -> tuple[Episode, ...]:
        """The episodes that have a reward; only these enter baseline and batch."""
        return tuple(e for e in self.episodes if e.reward is not None)

    @property
    def rewards(self) -> np.ndarray:
        """Raw rewards of the judged episodes, float64."""
        return np.array([e.reward for e in self.judged], dtype=np.float64)

    @property
    def mixed(self) -> bool:
        """Whether the judged siblings that the policy said differ in raw outcome, by more than rounding
        (`core.spread`)."""
        own = [e for e in self.judged if not e.shown]
        noise = rounding([size(e.verdicts) for e in own], max((resolution(e.verdicts) for e in own), default=0.0))
        return spread([e.reward for e in own if e.reward is not None], noise)
