"""Packed token sequences: `Packed` is what a forward pass needs, `Batch` adds the streams that a loss reads.

Labels are aligned once, here. Spoken token m is at packed position p and is predicted by the hidden state at
`source_M[m] = p - 1`. No later code shifts labels.

Worked example: segments [a b C D] and [e F] (capitals spoken) pack to ids_N = [a b C D e F], lengths_S = [4, 2],
source_M = [1, 2, 4], target_M = [C, D, F], segment_M = [0, 0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np

from posttrain.core.exchange.expert_choices import check_routed, packed_routed
from posttrain.core.exchange.micro_batches import Room, alike, balanced, bins, saved
from posttrain.core.sampling import Sampling
from posttrain.core.streams import Streamed
from posttrain.core.types import Segment, TruncationSets
from posttrain.system.errors import InvariantError


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """Segments one after another, with the positions of their spoken tokens. numpy, host memory."""

    ids_N: np.ndarray
    """int32: tokens of all segments, back to back."""
    lengths_S: np.ndarray
    """int32: tokens of each segment; sums to N."""
    source_M: np.ndarray
    """int64: packed position whose hidden state predicts spoken token m."""
    target_M: np.ndarray
    """int32: id of spoken token m."""
    segment_M: np.ndarray
    """int32: segment of spoken token m."""
    sequence_S: np.ndarray
    """int32: episode of each segment, 0..E-1, ascending."""
    sampling: Sampling
    """The contract every spoken token was drawn under."""
    kept: TruncationSets | None = None
    """One kept set per spoken token, exactly where the sampling truncates."""
    in_turn_M: np.ndarray | None = None
    """int32: position of each spoken token in its turn, exactly where the sampling reads it."""
    unit_E: np.ndarray | None = None
    """int32: unit of each episode, 0..U-1, ascending. A unit is what a loss reads together (a pair, a list); no split
    divides it. None: each episode is a unit."""
    routed_N: np.ndarray | None = None
    """int16 [N, R, K]: the experts of each token in its sampler (`core.exchange.expert_choices`); None: not known."""
    balance_E: np.ndarray | None = None
    """float64, for each expert (E counts experts here): what a router's probability of it, at a token whose experts are
    known, adds to the load-balance loss of the minibatch (`algorithm.loss.load_balance_loss`); None: no such loss."""

    def __post_init__(self) -> None:
        # Each part of a split is checked too: later an index that is off by one only shows as a loss that falls slowly.
        m = len(self.source_M)
        for name, x_M in (("target_M", self.target_M), ("segment_M", self.segment_M), ("in_turn_M", self.in_turn_M)):
            if x_M is not None and len(x_M) != m:
                raise InvariantError(f"batch: {name} has {len(x_M)} entries for {m} spoken tokens")
        if int(self.lengths_S.sum()) != len(self.ids_N) or len(self.sequence_S) != len(self.lengths_S):
            raise InvariantError("batch: segment lengths must sum to the packed tokens, with one episode per segment")
        if m and not np.array_equal(self.ids_N[self.source_M + 1], self.target_M):
            raise InvariantError("batch: labels are not the tokens after their source positions")
        # Source and target of each spoken token [M] must both lie in its segment [S].
        ends = np.cumsum(self.lengths_S)
        begin_M, end_M = (ends - self.lengths_S)[self.segment_M], ends[self.segment_M]
        if m and (np.any(self.source_M < begin_M) or np.any(self.source_M + 1 >= end_M)):
            raise InvariantError("batch: a label crosses a segment border")
        if self.kept is not None and len(self.kept) != m:
            raise InvariantError(f"batch: {len(self.kept)} kept sets for {m} spoken tokens")
        if self.sampling.in_turn != (self.in_turn_M is not None):
            raise InvariantError("batch: positions in the turn are given exactly where the sampling reads them")
        if np.any(np.diff(self.sequence_S) < 0):
            raise InvariantError("batch: segments of one episode must lie together, episodes ascending")
        if self.routed_N is not None:
            check_routed(self.routed_N, len(self.ids_N), "batch")
        if self.unit_E is not None and (len(self.unit_E) != self.episodes or not _counts_up(self.unit_E)):
            raise InvariantError(f"batch: units number the {self.episodes} episodes 0, 1, ... in order, side by side")

    @property
    def spoken(self) -> int:
        """Number of spoken tokens M."""
        return len(self.source_M)

    @property
    def sequence_M(self) -> np.ndarray:
        """int32: episode of each spoken token."""
        return self.sequence_S[self.segment_M]

    @property
    def positions_N(self) -> np.ndarray:
        """int64: position of each token in its own segment."""
        return positions(self.lengths_S)

    @property
    def episodes(self) -> int:
        """Number of episodes E."""
        return int(self.sequence_S[-1]) + 1 if len(self.sequence_S) else 0

    @property
    def units(self) -> int:
        """Number of units U."""
        # Units are numbered in order, so the last one tells how many there are.
        return self.episodes if self.unit_E is None else int(self.unit_E[-1]) + 1 if len(self.unit_E) else 0

    def members(self, unit: int) -> np.ndarray:
        """The episodes of one unit."""
        return np.array([unit]) if self.unit_E is None else np.flatnonzero(self.unit_E == unit)

    def ids_of(self, episode: int) -> np.ndarray:
        """int32: all tokens of an episode, of its segments back to back."""
        # A mask over segments [S] becomes one over packed tokens [N] by the lengths.
        return self.ids_N[np.repeat(self.sequence_S == episode, self.lengths_S)]

    @classmethod
    def of(cls, segments: Sequence[Segment], sequence: Sequence[int] | None = None, **further: Any) -> Self:
        """Pack checked segments; `sequence[s]` is the episode of segment s (default: one segment each).

        `further` are other fields: units, and the streams of a `Batch` in packing order.
        """
        if not segments:
            raise InvariantError("nothing to pack: no segments")
        # pi is evaluated under the contract that drew the tokens, in one pass for all of them.
        if len({s.sampling for s in segments}) != 1:
            raise InvariantError("segments of one batch share one sampling contract")
        lengths = np.array([len(s.ids) for s in segments], np.int32)
        # a + start - 1 below: position a within its segment, plus where the segment begins, minus one for
        # the hidden state that predicts it. No segment begins with a spoken token, so it stays inside.
        starts = np.cumsum(lengths) - lengths
        at = [np.flatnonzero(s.mask) for s in segments]
        # Kept sets and positions in the turn have one entry per spoken token, so joining them gives the order of M.
        kept = [k for s in segments if s.kept is not None for k in s.kept.sets()]
        turns = [s.in_turn for s in segments if s.in_turn is not None]
        return cls(
            ids_N=np.concatenate([s.ids for s in segments]),
            lengths_S=lengths,
            source_M=np.concatenate([a + start - 1 for a, start in zip(at, starts, strict=True)]).astype(np.int64),
            target_M=np.concatenate([s.ids[a] for s, a in zip(segments, at, strict=True)]).astype(np.int32),
            segment_M=np.repeat(np.arange(len(segments), dtype=np.int32), [len(a) for a in at]),
            sequence_S=np.arange(len(segments), dtype=np.int32) if sequence is None else np.asarray(sequence, np.int32),
            sampling=segments[0].sampling,
            kept=TruncationSets.of(kept) if segments[0].sampling.truncated else None,
            in_turn_M=np.concatenate(turns) if segments[0].sampling.in_turn else None,
            **{"routed_N": packed_routed([s.routed for s in segments], lengths.tolist()), **further},
        )

    def heard(self) -> Packed:
        """The same tokens, with the heard tokens in the place of the spoken ones.

        Heard tokens (axis H) are those that the policy was told after it had said something: in each segment, every
        token after the first spoken one that is not spoken itself. They are scored in the model's own distribution,
        at temperature 1, because nobody sampled them.
        """
        # at_M: packed positions of the spoken tokens themselves. Their minimum
        # in each segment is the place where the policy first spoke.
        at_M, count = self.source_M + 1, len(self.lengths_S)
        segment_N = np.repeat(np.arange(count, dtype=np.int32), self.lengths_S)
        # For a segment without a spoken token this place is the end of all
        # packed tokens: no token follows it, so none counts as heard.
        first_S = np.full(count, len(self.ids_N))
        np.minimum.at(first_S, self.segment_M, at_M)
        heard_N = np.arange(len(self.ids_N)) > first_S[segment_N]
        heard_N[at_M] = False
        at_H = np.flatnonzero(heard_N)
        # Without the experts of the sampler: the layers run once, on `self`, and only the head reads this one.
        return Packed(
            ids_N=self.ids_N,
            lengths_S=self.lengths_S,
            source_M=at_H - 1,
            target_M=self.ids_N[at_H],
            segment_M=segment_N[at_H],
            sequence_S=self.sequence_S,
            sampling=Sampling(stop_ids=()),
            unit_E=self.unit_E,
        )

    def select(self, episodes: Sequence[int] | np.ndarray) -> Self:
        """The batch of only these episodes (whole units), renumbered from 0. Streams and weights are unchanged."""
        # `unique` also sorts: a part keeps the order of the batch, whatever the order of `episodes`.
        chosen, unit_E = np.unique(np.asarray(episodes, np.int64)), None
        if self.unit_E is not None:
            unit_E = np.unique(self.unit_E[chosen], return_inverse=True)[1].astype(np.int32)
            # If the chosen units have more episodes than were chosen, a unit was cut.
            if int(np.isin(self.unit_E, self.unit_E[chosen]).sum()) != len(chosen):
                raise InvariantError("a part of a unit was selected: its episodes are read together (`members`)")
        # Masks of segments, of packed tokens, of spoken tokens. A new place is the number of kept entries before it.
        keep_S = np.isin(self.sequence_S, chosen)
        keep_N = np.repeat(keep_S, self.lengths_S)
        keep_M = keep_S[self.segment_M]
        new_position = np.cumsum(keep_N) - 1
        new_segment = np.cumsum(keep_S) - 1
        kept = None if self.kept is None else [k for k, yes in zip(self.kept.sets(), keep_M, strict=True) if yes]
        return replace(
            self,
            ids_N=self.ids_N[keep_N],
            lengths_S=self.lengths_S[keep_S],
            source_M=new_position[self.source_M[keep_M]],
            target_M=self.target_M[keep_M],
            segment_M=new_segment[self.segment_M[keep_M]].astype(np.int32),
            sequence_S=np.searchsorted(chosen, self.sequence_S[keep_S]).astype(np.int32),
            kept=None if kept is None else TruncationSets.of(kept),
            in_turn_M=None if self.in_turn_M is None else self.in_turn_M[keep_M],
            unit_E=unit_E,
            routed_N=None if self.routed_N is None else self.routed_N[keep_N],
            **self._carried(keep_M),
        )

    def _carried(self, keep_M: np.ndarray) -> dict[str, Any]:
        """Further fields of a subclass, for these tokens alone."""
        return {}

    def split(self, max_tokens: int) -> list[Self]:
        """Parts of whole units, in order, with at most `max_tokens` packed tokens each (one unit may exceed it)."""
        # In the order of the batch, unlike `bins`: results of the parts are simply joined.
        sizes = self._sizes_E()
        if sizes.sum() <= max_tokens:
            return [self]
        parts: list[list[int]] = [[]]
        room = max_tokens
        for unit in range(self.units):
            members = self.members(unit)
            size = int(sizes[members].sum())
            if parts[-1] and size > room:
                parts.append([])
                room = max_tokens
            parts[-1].extend(members.tolist())
            room -= size
        return self.cut([np.array(p) for p in parts])

    def bins(self, max_tokens: int, once: bool = False) -> list[np.ndarray]:
        """Episodes of each micro-batch: whole units, at most `max_tokens` packed tokens (one unit may exceed it).

        There are few micro-batches, and units that begin alike are in the same one (`core.exchange.micro_batches`).
        `once`: whether a beginning that segments share takes room once.
        """
        sizes = self._sizes_E()
        if sizes.sum() <= max_tokens:
            return [np.arange(self.episodes)]
        # A unit is packed as one item. `begin`: its first segment. `within`: the token ids of its segments.
        members = [self.members(u) for u in range(self.units)]
        segments = np.split(self.ids_N, np.cumsum(self.lengths_S)[:-1])
        begin = np.searchsorted(self.sequence_S, [m[0] for m in members])
        within = [segments[a:b] for a, b in pairwise([*begin.tolist(), len(segments)])]
        total = [sum(map(len, unit)) for unit in within]
        # Segments of one unit may share a beginning (earlier turns, a pair's question): this saves positions in any
        # bin. A beginning that several units share saves positions only in the same bin: `bins` counts it.
        computed = [n - sum(saved(alike(x, y)) for x, y in pairwise(u)) for n, u in zip(total, within, strict=True)]
        # Units are compared by their first segments.
        bins_of_units = bins([unit[0] for unit in within], total, Room(max_tokens, once), computed if once else total)
        return [np.concatenate([members[u] for u in units]) for units in bins_of_units]

    def shares(self, world: int) -> list[np.ndarray]:
        """Episodes of each of `world` ranks, ascending: whole units, balanced by packed tokens
        (`core.exchange.micro_batches.balanced`). Every unit is on one rank. A rank may have none."""
        sizes = self._sizes_E()
        members = [self.members(u) for u in range(self.units)]
        # A rank may have no unit. The empty array gives `concatenate` something to join, and the dtype.
        parts = balanced([int(sizes[m].sum()) for m in members], world)
        return [np.concatenate([np.zeros(0, np.int64), *(members[u] for u in part)]).astype(np.int64) for part in parts]

    def shard(self, rank: int, world: int) -> Self:
        """The part of one of `world` ranks, with its order, streams and weights unchanged. It may be empty.

        Weights stay normalised over the whole batch, so losses and gradients of all ranks add up to those of the batch.
        """
        if not 0 <= rank < world:
            raise InvariantError(f"rank {rank} of {world}: give a rank from 0 to world - 1")
        return self if world == 1 else self.select(self.shares(world)[rank])

    def cut(self, parts: Sequence[np.ndarray]) -> list[Self]:
        """The batch in parts, given by their episodes."""
        # No copy where nothing is cut.
        return [self] if len(parts) == 1 and len(parts[0]) == self.episodes else [self.select(p) for p in parts]

    def _sizes_E(self) -> np.ndarray:
        """int64: packed tokens of each episode."""
        return np.bincount(self.sequence_S, weights=self.lengths_S, minlength=self.episodes).astype(np.int64)


def positions(lengths_S: np.ndarray) -> np.ndarray:
    """int64 [N]: position of every token of segments of these lengths within its own segment."""
    starts = np.cumsum(lengths_S) - lengths_S
    return np.arange(int(lengths_S.sum())) - np.repeat(starts, lengths_S)


def _counts_up(unit_E: np.ndarray) -> bool:
    """Whether unit numbers begin with 0 and rise by 0 or 1: no unit is missing, and its episodes are side by side."""
    return not len(unit_E) or (int(unit_E[0]) == 0 and bool(np.isin(np.diff(unit_E), (0, 1)).all()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Packed, Streamed[np.ndarray]):
    """One minibatch: the tokens of one optimizer step with the streams that its loss reads, exactly those whose makers
    were asked. Weights are normalised over it once; splits only select.

    `START` is missing on the first optimizer step after a sync: the policy is then equal to that of the step's start.
    """

    HOLDER: ClassVar[str] = "the minibatch"

    def __post_init__(self) -> None:
        super().__post_init__()
        for stream, x_M in self.streams.items():
            stream.check(x_M, self.spoken)

    def _carried(self, keep_M: np.ndarray) -> dict[str, Any]:
        return {"streams": {stream: x_M[keep_M] for stream, x_M in self.streams.items()}}
