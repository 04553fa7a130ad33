"""The state of all requests in slots: every array has one row per slot, so that a step runs no Python code per slot.

Axis letters: s a slot (row), P tokens of a prompt, C context rounded up to whole blocks. `at` [n], here and in the
callers: the numbers of the slots that a call is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop, Top, TruncationSets
from posttrain.engine.embedded.cache.cache_blocks import BLOCK, blocks_for
from posttrain.engine.embedded.schedule.stop_strings import Strings
from posttrain.engine.embedded.token_sampler import Contracts, DrawnTokens


@dataclass(frozen=True, eq=False)
class Preempted:
    """The tokens a request had said when it lost its slot: arrays [n] and lists as in `Slots`, which go back there."""

    ids: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    kept: list[np.ndarray]
    top: list[Top]


TokenCallback = Callable[[np.ndarray, np.ndarray], None]
"""Called with the new ids [n] and log-probs [n] of one request, as soon as they are drawn."""


@dataclass(eq=False)
class GenerateCall:
    """One `generate` call. `limit` is the most tokens it may say, and `end` its stop reason where it reaches that."""

    ids: np.ndarray
    sampling: Sampling
    place: int
    limit: int
    end: Stop
    future: asyncio.Future[SampledTurn]
    heard: TokenCallback | None = None
    since: float = 0.0
    """When it was queued (perf_counter)."""
    number: int = -1
    """Order of arrival: the youngest is preempted first."""
    slot: int | None = None
    gone: bool = False
    """Cancelled while queued, or refused because its contract could not be stored."""
    begun: Preempted | None = None
    """Set while it is preempted and waits for a slot."""
    lost: int = 0
    """Positions that were cached when it lost its slot."""

    @property
    def key(self) -> bytes:
        """Its prompt's ids as bytes. Requests with equal keys share one `Prompt`."""
        return self.ids.tobytes()

    @property
    def cached_ids(self) -> np.ndarray:
        """Tokens that must be cached before its next token; the next forward pass computes the token said last."""
        return self.ids if self.begun is None else np.concatenate([self.ids, self.begun.ids[:-1]])


@dataclass(eq=False)
class Prompt:
    """A prompt that is being cached or is cached, from the admission of its first request until its last has begun."""

    ids: np.ndarray
    rows: np.ndarray
    """int64, whole blocks: pool row of each position."""
    done: int = 0
    """Positions cached so far."""
    hidden: Tensor | None = None
    """Last hidden state [H] once all positions are cached, from which the first token of its requests is drawn."""
    waiting: list[int] = field(default_factory=list[int])
    """Slots of this prompt that have not begun."""
    resumes: bool = False
    """Whether its one slot continues a turn after a preemption."""

    @property
    def blocks(self) -> np.ndarray:
        """The cache blocks of its rows."""
        return self.rows[::BLOCK] // BLOCK


class Slots:
    """State of every slot."""

    def __init__(self, count: int, context: int) -> None:
        width = blocks_for(context) * BLOCK
        self.count = count
        self.request: list[GenerateCall | None] = [None] * count
        self.streaming = 0
        """Slots whose request has a callback for new tokens."""
        # Free slots, taken from the end, so slot 0 comes first.
        self.free = list(range(count - 1, -1, -1))
        self.table = np.zeros((count, width), np.int64)
        """[s, C]: pool row of each cached position."""
        self.cached = np.zeros(count, np.int64)
        """Positions in the cache."""
        self.held = np.zeros(count, np.int64)
        """Rows in `table`: those of whole blocks that the slot owns a share of."""
        self.number = np.full(count, -1, np.int64)
        """Order of arrival of the slot's request; -1: free."""
        self.fresh = np.zeros(count, bool)
        """Whether every cached position was computed by the weights that are served now."""
        self.pending = np.zeros(count, np.int64)
        """The token said last. Its position is `cached`, and it is not in the cache yet."""
        self.generating = np.zeros(count, bool)
        """Whether the slot has said a token and its turn goes on."""
        self.said = np.zeros(count, np.int64)
        """Tokens of the turn so far: this many entries of `ids`, `logp` and `version` count."""
        self.limit = np.zeros(count, np.int64)
        self.uniforms = np.zeros((count, context))
        """The random number of each position of the turn, drawn when the request gets the slot."""
        self.ids = np.zeros((count, context), np.int32)
        self.logp = np.zeros((count, context), np.float32)
        self.version = np.zeros((count, context), np.int32)
        self.stops = np.full((count, 1), -1, np.int64)
        """Stop ids, filled up with -1."""
        self.contracts = Contracts.plain(count)
        self.strings = Strings()
        self.ended_by_string = np.zeros(count, bool)
        """Whether the token said last completes a stop string of the contract."""
        self.kept: list[list[np.ndarray]] = [[] for _ in range(count)]
        """The kept ids of each token of the turn, under a truncating contract."""
        self.top: list[list[Top]] = [[] for _ in range(count)]

    def of(self, s: int) -> GenerateCall:
        """The request of a slot that is taken."""
        request = self.request[s]
        assert request is not None
        return request

    def assign(self, request: GenerateCall) -> int:
        """Take a free slot for a request. `set_contract` must follow."""
        s = self.free.pop()
        request.slot, self.request[s] = s, request
        self.streaming += request.heard is not None
        # Arrays of the turn keep what the last request has left in them: `said` says how much of them counts.
        self.number[s], self.fresh[s], self.ended_by_string[s] = request.number, True, False
        self.said[s], self.limit[s], self.cached[s], self.held[s] = 0, request.limit, 0, 0
        self.kept[s], self.top[s] = [], []
        return s

    def set_contract(self, s: int, request: GenerateCall) -> None:
        """Store the contract of the slot's request, and the tokens it had said before a preemption.

        It reads numbers that callers gave, so it may raise. `clear` then undoes what it has done.
        """
        stops = request.sampling.stop_ids or ()
        more = len(stops) - self.stops.shape[1]
        if more > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=-1)
        self.stops[s] = -1
        self.stops[s, : len(stops)] = stops
        self.contracts.put(s, request.sampling, request.ids, None if request.begun is None else request.begun.ids)
        self.strings.put(s, request.sampling)
        # All uniforms of the turn, by its place alone: its tokens do not depend on slot, step or preemption.
        self.uniforms[s, : request.limit] = seeds.uniforms(request.place, request.limit)
        # Copied back, and `begun` is given up: from now on the slot has the only state of the turn.
        if (before := request.begun) is not None:
            n = len(before.ids)
            self.ids[s, :n], self.logp[s, :n], self.version[s, :n] = before.ids, before.logp, before.version
            self.kept[s], self.top[s] = before.kept, before.top
            self.said[s], self.pending[s], request.begun = n, before.ids[-1], None

    def begun(self, s: int) -> Preempted | None:
        """What the slot's request needs to continue in another slot; None where it has said no token."""
        n = int(self.said[s])
        if not n:
            return None
        return Preempted(
            self.ids[s, :n].copy(), self.logp[s, :n].copy(), self.version[s, :n].copy(), self.kept[s], self.top[s]
        )

    def sequence(self, s: int) -> np.ndarray:
        """int32: the tokens whose keys and values the slot has cached."""
        return np.concatenate([self.of(s).ids, self.ids[s, : self.said[s]]])[: self.cached[s]]

    def blocks(self, s: int) -> np.ndarray:
        """Blocks that the slot owns a share of."""
        return self.table[s, : self.held[s] : BLOCK] // BLOCK

    def clear(self, s: int) -> None:
        """Make the slot free."""
        self.streaming -= self.of(s).heard is not None
        self.request[s], self.generating[s], self.cached[s], self.held[s], self.number[s] = None, False, 0, 0, -1
        self.contracts.clear(s)
        self.strings.clear(s)
        self.free.append(s)

    def say(self, at: np.ndarray, drawn: DrawnTokens, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Record one token of `version` in each slot of `at`; returns (slots that have ended, whether by a stop id)."""
        # `said` is the index of the new token, and one less than the length of the turn after it.
        new_index = self.said[at]
        self.ids[at, new_index] = drawn.ids
        self.logp[at, new_index] = drawn.logp
        self.version[at, new_index] = version
        for row, ids in zip(drawn.truncated_rows.tolist(), drawn.kept, strict=True):
            self.kept[at[row]].append(ids)
        if drawn.top is not None:
            for row in np.flatnonzero(self.contracts.top[at]).tolist():
                k = int(self.contracts.top[at[row]])
                self.top[at[row]].append(Top(drawn.top.ids[row : row + 1, :k], drawn.top.logp[row : row + 1, :k]))
        self.contracts.record(at, drawn.ids)
        self.pending[at] = drawn.ids
        self.said[at] = new_index + 1
        stopped = (self.stops[at] == drawn.ids[:, None]).any(1)
        ended = stopped | (new_index + 1 == self.limit[at])
        # Decoding text is slow, so it is done only where some slot has a stop string.
        if self.strings.wanted:
            self.ended_by_string[at] = self.strings.ended(at, self.ids, self.said)
            ended |= self.ended_by_string[at]
        self.generating[at] = ~ended
        return at[ended], stopped[ended]

    def turn(self, s: int, stopped: bool) -> SampledTurn:
        """The finished turn of the slot's request."""
        request, n = self.of(s), int(self.said[s])
        return SampledTurn(
            ids=self.ids[s, :n].copy(),
            logp=self.logp[s, :n].copy(),
            version=self.version[s, :n].copy(),
            # A stop id goes before a stop string, and both before the length: a turn that ended by itself was not cut.
            stop=Stop.SAID if stopped else Stop.STRING if self.ended_by_string[s] else request.end,
            kept=TruncationSets.of(self.kept[s]) if request.sampling.truncated else None,
            top=Top.join(self.top[s], request.sampling.top) if request.sampling.top else None,
        )
