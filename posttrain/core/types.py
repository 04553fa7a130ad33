"""The types that all rooms share: tasks, turns, segments, episodes, groups. Each one checks itself when it is made.

A spoken token is one that the policy sampled; all others (prompts, observations) are context.

Axis letters, used as suffixes: P prompts in a step, G siblings of a prompt, T tokens of a segment. Of a batch: U units,
E episodes, S segments, N packed positions, M spoken positions. Of routers: R routers, E experts, K of them a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NotRequired, TypedDict

import numpy as np

from posttrain.core.content import Content
from posttrain.core.exchange.expert_choices import check_routed
from posttrain.core.exchange.other_seats import SeatTurn
from posttrain.core.gauge import Gauge
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.measure.right import Right, right_of
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop as Stop
from posttrain.core.verdict import Judged, outcome, resolution, size, truth
from posttrain.system.errors import InvariantError


class Message(TypedDict):
    """One message of a chat prompt, as chat templates take it. Optional are tool calls, results and reasoning."""

    role: str
    content: Content
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    thinking: NotRequired[str]


@dataclass(frozen=True)
class Task:
    """One task, as frozen data; its behaviour is in the environment. `id` is unique within an environment and split."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra columns of the source; reward functions receive them as keyword arguments."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that its prompt of messages offers, where they are data. Nothing here runs them."""

    @property
    def asked(self) -> str:
        """All but the id, as text. Rows that ask the same are not independent, and count as one task."""
        return json.dumps([self.prompt, self.answer, self.info], sort_keys=True, default=str)


SHOWN = -2
"""Version of a token from a demonstration. It is learned from, but no weights of this run sampled it."""


OUTSIDE = -3
"""Version of a token that a server's weights sampled, under sampling settings that cannot be checked. It is never
learned from. Its log-prob is 0 where it is unknown."""


OPPOSED = -4
"""Version of a token that the policy's opponent sampled (`Rollout.opponents`). Its log-prob is the opponent's."""


@dataclass(frozen=True)
class TruncationSets:
    """The token sets that truncated sampling (top-k, top-p, min-p) kept, one for each of n draws.

    Draw i kept `ids[offsets[i]:offsets[i+1]]`, ascending.
    """

    offsets: np.ndarray
    ids: np.ndarray

    def __post_init__(self) -> None:
        # Each set holds at least the drawn token, so offsets rise by 1 or more.
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
    def of(sets: Sequence[np.ndarray]) -> TruncationSets:
        """The sets of n draws, one array of ids each, joined."""
        offsets = np.concatenate([[0], np.cumsum([len(s) for s in sets])]).astype(np.int64)
        return TruncationSets(offsets, np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32))

    def sets(self) -> list[np.ndarray]:
        """The set of each draw, as an array of ids."""
        return [self.ids[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


@dataclass(frozen=True, eq=False)
class Top:
    """The sampler's K most probable tokens at each of n draws, most probable first.

    ids int32 [n, K], logp float32 [n, K].
    """

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
        """The draws of all parts, each with `k` tokens; no part gives n = 0."""
        ids = np.concatenate([np.zeros((0, k), np.int32), *(p.ids for p in parts)])
        return Top(ids, np.concatenate([np.zeros((0, k), np.float32), *(p.logp for p in parts)]))


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """One turn as an engine returns it.

    ids int32 [n], logp float32 [n] (under the resolved `Sampling`), version int32 [n] (of the weights that sampled each
    token). `kept` is given exactly where the sampling truncates. `stop` is SAID (the last token is a stop id), STRING
    (the last token completes a stop string and is no stop id), LENGTH or CONTEXT.
    """

    ids: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    stop: Stop
    kept: TruncationSets | None = None
    top: Top | None = None
    routed: np.ndarray | None = None
    """int16 [tokens of the prompt + n - 1, R, K]: the experts of each computed token, those of the prompt first
    (`core.exchange.expert_choices`). Given by engines that record them, for a mixture of experts."""

    def __post_init__(self) -> None:
        if self.routed is not None:
            check_routed(self.routed, len(self.routed), "a turn")
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

    mask is True at spoken tokens. There logp is finite and version >= 0. Elsewhere logp is NaN and version is -1, so
    that a result computed from an unspoken log-prob is NaN and cannot pass for a number.
    Tokens of a demonstration count as spoken. They have version SHOWN and logp 0, because their sampler is not known.
    Tokens of a foreign server have version OUTSIDE, and those of the policy's opponent OPPOSED.

    `kept` and `top` have one entry per spoken token, in order. `kept` is given exactly where `sampling.truncated`, and
    `top` exactly where `sampling.top`. `in_turn` (int32, the position of each spoken token in its turn) is given
    exactly where `sampling.in_turn`. The mask does not show where a turn begins, because two turns may have nothing
    between them.

    `routed` (int16 [T, R, K], `core.exchange.expert_choices`) are the experts that computed each token in the sampler,
    where it is a mixture of experts and its engine records them.
    """

    ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    sampling: Sampling
    kept: TruncationSets | None = None
    top: Top | None = None
    in_turn: np.ndarray | None = None
    routed: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        if self.routed is not None:
            check_routed(self.routed, n, "a segment")
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
        # The first token has no hidden state before it that predicts it: in a packed batch position -1
        # would be the last token of another segment.
        if n and self.mask[0]:
            raise InvariantError(
                "the first token of a segment has nothing before it, so the policy cannot have said it: see() a prompt"
                " first"
            )
        # NaN fails both comparisons. 1e-5, and not 0: in float32 the log-prob
        # of a nearly certain token may round to slightly above 0.
        spoken, silent = self.logp[self.mask], ~self.mask
        if not (spoken.min(initial=0.0) > -np.inf and spoken.max(initial=0.0) <= 1e-5):
            raise InvariantError("every spoken token carries a finite log-prob <= 0")
        if not np.isnan(self.logp[silent]).all() or (self.version[silent] != -1).any():
            raise InvariantError("unspoken tokens carry logp NaN and version -1")
        versions = self.version[self.mask]
        # The set is formed only where a version is negative: segments are checked for every answer of a run.
        if versions.min(initial=0) < 0 and not {*versions[versions < 0].tolist()} <= {SHOWN, OUTSIDE, OPPOSED}:
            raise InvariantError(
                "spoken tokens carry the version >= 0 of the weights that said them, SHOWN, OUTSIDE or OPPOSED"
            )
        count = len(versions)
        if self.sampling.truncated != (self.kept is not None):
            raise InvariantError("kept sets are stored exactly where the sampling truncates the support")
        if self.kept is not None and len(self.kept) != count:
            raise InvariantError(f"{count} spoken tokens but {len(self.kept)} kept sets")
        if bool(self.sampling.top) != (self.top is not None) or (self.top is not None and len(self.top) != count):
            raise InvariantError(
                "top tokens are stored for every spoken token exactly where sampling.top asks for them"
            )
        if self.sampling.in_turn != (self.in_turn is not None):
            raise InvariantError(
                "positions in the turn are stored exactly where the sampling reads them (min_tokens, bad sequences)"
            )
        if self.in_turn is not None:
            _check_in_turn(self.in_turn, self.mask)

    @cached_property
    def shown(self) -> bool:
        """True where any spoken token comes from a demonstration."""
        return bool(np.any(self.version[self.mask] == SHOWN))

    @cached_property
    def spoken(self) -> int:
        return int(self.mask.sum())


def _check_in_turn(in_turn: np.ndarray, mask: np.ndarray) -> None:
    """Checks that each spoken token begins a turn (0) or directly follows the token before it in the same turn.

    Raises:
        InvariantError: a position does not.
    """
    at = np.flatnonzero(mask)
    if len(in_turn) != len(at):
        raise InvariantError(f"{len(at)} spoken tokens but {len(in_turn)} positions in a turn")
    # A token continues its turn where its place in the segment and its position in the turn are
    # both one more than those of the spoken token before it. The first token has none before it.
    follows = np.append(False, (np.diff(at) == 1) & (np.diff(in_turn) == 1)) if len(at) else np.zeros(0, bool)
    if np.any((in_turn != 0) & ~follows):
        raise InvariantError("positions in a turn count up from 0, over tokens that stand side by side")


@dataclass(frozen=True, eq=False)
class Episode:
    """One attempt at a task. The algorithm's result for it is kept apart, as `Credit`.

    It has more than one segment only where history was rewritten. `reward` is the raw outcome, which filters, pass@k
    and difficulty read, and never the shaped reward. None: it was not judged, and is excluded.
    """

    task: Task
    visit: int
    sibling: int
    segments: tuple[Segment, ...]
    stop: Stop
    verdicts: tuple[Judged, ...]
    text: str = ""
    """The policy's words, decoded, for people to read. Nothing is computed from it after judging."""
    error: str = ""
    state: Any = None
    """The environment's state at the end of the episode (`Talk.leave`), as verifiers saw it."""
    turns: tuple[int, ...] = ()
    """Number of tokens of each turn of the policy, in order. They sum to the spoken tokens of all segments.
    Empty for a demonstration."""
    cut: bool = False
    """Whether a turn was aborted while it was being sampled. Its tokens are then in no segment."""
    seats: tuple[SeatTurn, ...] = ()
    """Turns of other seats, in order. Their tokens are in no segment either."""
    right_at: float | None = None
    """The smallest outcome of a right answer, where it is named (`Env.right`)."""

    def __post_init__(self) -> None:
        if self.turns and sum(self.turns) != self.spoken:
            raise InvariantError(
                f"task {self.task.id!r}: turns of {sum(self.turns)} tokens in an episode of {self.spoken} spoken ones."
                " Every token of a turn enters the transcript, and no other is spoken"
            )

    @cached_property
    def reward(self) -> float | None:
        return outcome(self.verdicts)

    @cached_property
    def truth(self) -> float | None:
        """The outcome that is measured of the episode and not paid (`Judged.measured`); None where none is."""
        return truth(self.verdicts)

    @property
    def figure(self) -> float | None:
        """The number of held-out accuracy and mean reward: the truth where one is measured, else the reward."""
        return self.truth if any(j.measured for j in self.verdicts) else self.reward

    @property
    def right(self) -> Right:
        """The rule by which its `figure` is right."""
        return right_of(self.verdicts, self.right_at, any(j.measured for j in self.verdicts))

    @property
    def solved(self) -> bool:
        """True where the reward that the episode is paid is right."""
        # Where something is measured, `right_at` is for that, and the paid reward has the rule of its own sources.
        measured = any(j.measured for j in self.verdicts)
        return right_of(self.verdicts, None if measured else self.right_at).of(self.reward)

    @cached_property
    def spoken(self) -> int:
        return sum(s.spoken for s in self.segments)

    @cached_property
    def shown(self) -> bool:
        """True where any of its spoken tokens comes from a demonstration."""
        return any(s.shown for s in self.segments)

    @cached_property
    def opposed(self) -> bool:
        """True where the policy's opponent spoke in the episode."""
        return any(bool(np.any(s.version[s.mask] == OPPOSED)) for s in self.segments)

    @property
    def own(self) -> bool:
        """True where the episode is the policy's own: it is no demonstration, and not its opponent's."""
        return not self.shown and not self.opposed


@dataclass(frozen=True, eq=False)
class Group:
    """The siblings of one prompt, ordered by sibling: one object from the rollout on, never regrouped by a reshape."""

    task: Task
    visit: int
    episodes: tuple[Episode, ...]
    greedy: Episode | None = None
    """The prompt's greedy answer, where a baseline compares with it. It is judged, and is in no batch."""
    aborted: int = 0
    """Siblings aborted because enough others had ended first (`Reinforce.oversample`)."""
    aborted_tokens: int = 0
    """Tokens in the complete turns of the aborted siblings."""
    logged: Mapping[str, Gauge] = field(default_factory=dict[str, Gauge])
    """Gauges of the step that batch rewards logged about this group."""
    discount: float = 1.0
    """Factor of its credit: less than 1 where a step learns from it again (`config.stages.reinforce`)."""
    again: bool = False
    """Whether a step learns from it again. A moving baseline already contains it, and does not take it in again."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise InvariantError(f"group of task {self.task.id!r} has no episodes")
        if any(e.task.id != self.task.id or e.visit != self.visit for e in self.episodes):
            raise InvariantError(f"group of task {self.task.id!r} holds an episode of another task or visit")
        # The numbers rise and none is twice: two siblings with one number would share random numbers.
        if [e.sibling for e in self.episodes] != sorted({e.sibling for e in self.episodes}):
            raise InvariantError(f"group of task {self.task.id!r}: siblings must be distinct and in order")

    @cached_property
    def judged(self) -> tuple[Episode, ...]:
        """The episodes that have a reward; only these enter baseline and batch."""
        return tuple(e for e in self.episodes if e.reward is not None)

    @property
    def rewards(self) -> np.ndarray:
        """Raw rewards of the judged episodes, float64."""
        return np.array([e.reward for e in self.judged], dtype=np.float64)

    @property
    def mixed(self) -> bool:
        """True where the judged siblings that the policy sampled differ in raw outcome by more than rounding
        (`core.measure.equal_numbers`)."""
        # Demonstrations and the opponent's episodes are left out: one right demonstration among wrong
        # samples would pass a filter that asks what the policy can do.
        sampled = [e for e in self.judged if e.own]
        noise = rounding(
            [size(e.verdicts) for e in sampled], max((resolution(e.verdicts) for e in sampled), default=0.0)
        )
        return spread([e.reward for e in sampled if e.reward is not None], noise)
