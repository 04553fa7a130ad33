"""What the engine knows of requests: one row of every array per slot, so that a step costs no Python per slot.

Axis letters: s a slot (row), P tokens of a prompt, C context rounded up to whole blocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.types import Kept, Said, Stop, Top
from posttrain.engine.embedded.blocks import BLOCK, blocks_for
from posttrain.engine.embedded.sampler import Contracts, Drawn


@dataclass(eq=False)
class Request:
    """One `generate` call. `limit` is how many tokens it may say, `end` why it stops there."""

    ids: np.ndarray
    sampling: Sampling
    place: int
    limit: int
    end: Stop
    future: asyncio.Future[Said]
    slot: int | None = None
    gone: bool = False
    """Cancelled while queued."""

    @property
    def key(self) -> bytes:
        return self.ids.tobytes()

    @property
    def own_blocks(self) -> int:
        """Most blocks it takes beside the shared full blocks of its prompt."""
        return blocks_for(len(self.ids) + self.limit) - len(self.ids) // BLOCK


@dataclass(eq=False)
class Prompt:
    """A prompt's cached rows, from its first admission until its last request has begun to speak."""

    ids: np.ndarray
    rows: np.ndarray
    """int64, whole blocks: pool row of each position."""
    done: int = 0
    """Positions cached so far."""
    hidden: Tensor | None = None
    """Last hidden state [H] once all positions are cached: what every sibling's first token is drawn from."""
    waiting: list[int] = field(default_factory=list[int])
    """Slots assigned to it that have not begun."""

    @property
    def blocks(self) -> np.ndarray:
        return self.rows[::BLOCK] // BLOCK


class Slots:
    """State of every slot."""

    def __init__(self, count: int, context: int) -> None:
        width = blocks_for(context) * BLOCK
        self.count = count
        self.request: list[Request | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.table = np.zeros((count, width), np.int64)
        """[s, C]: pool row of each cached position."""
        self.cached = np.zeros(count, np.int64)
        """Positions in the cache."""
        self.owed = np.zeros(count, np.int64)
        """Blocks the slot may still take."""
        self.pending = np.zeros(count, np.int64)
        """The token said last, at position `cached`, not in the cache yet."""
        self.speaking = np.zeros(count, bool)
        """Whether the slot has said a token and says more."""
        self.said = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)
        self.uniforms = np.zeros((count, context))
        self.ids = np.zeros((count, context), np.int32)
        self.logp = np.zeros((count, context), np.float32)
        self.stops = np.full((count, 1), -1, np.int64)
        """Stop ids, filled up with -1."""
        self.contracts = Contracts.plain(count)
        self.kept: list[list[np.ndarray]] = [[] for _ in range(count)]
        self.top: list[list[Top]] = [[] for _ in range(count)]

    def assign(self, request: Request) -> int:
        """Take a free slot for a request."""
        s = self.free.pop()
        request.slot, self.request[s] = s, request
        stops = request.sampling.stop_ids or ()
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.count, len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[s] = -1
        self.stops[s, : len(stops)] = stops
        self.contracts.put(s, request.sampling)
        self.uniforms[s, : request.limit] = seeds.uniforms(request.place, request.limit)
        self.said[s], self.limit[s], self.cached[s] = 0, request.limit, 0
        self.owed[s] = request.own_blocks
        self.kept[s], self.top[s] = [], []
        return s

    def blocks(self, s: int) -> np.ndarray:
        """Blocks the slot owns a share of."""
        return self.table[s, : self.cached[s] : BLOCK] // BLOCK

    def clear(self, s: int) -> None:
        """The slot is free."""
        self.request[s], self.speaking[s], self.cached[s], self.owed[s] = None, False, 0, 0
        self.contracts.truncated[s] = self.contracts.greedy[s] = False
        self.contracts.top[s] = 0
        self.free.append(s)

    def say(self, at: np.ndarray, drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
        """Record one token in each slot of `at`; returns (slots that have ended, whether by a stop id)."""
        said = self.said[at]
        self.ids[at, said] = drawn.ids
        self.logp[at, said] = drawn.logp
        for row, ids in zip(drawn.truncated_rows.tolist(), drawn.kept, strict=True):
            self.kept[at[row]].append(ids)
        if drawn.top is not None:
            for row in np.flatnonzero(self.contracts.top[at]).tolist():
                k = int(self.contracts.top[at[row]])
                self.top[at[row]].append(Top(drawn.top.ids[row : row + 1, :k], drawn.top.logp[row : row + 1, :k]))
        self.pending[at] = drawn.ids
        self.said[at] = said + 1
        stopped = (self.stops[at] == drawn.ids[:, None]).any(1)
        ended = stopped | (said + 1 == self.limit[at])
        self.speaking[at] = ~ended
        return at[ended], stopped[ended]

    def turn(self, s: int, stopped: bool, version: int) -> Said:
        """What the slot's request gets back."""
        request, n = self.request[s], int(self.said[s])
        assert request is not None
        return Said(
            ids=self.ids[s, :n].copy(),
            logp=self.logp[s, :n].copy(),
            version=np.full(n, version, np.int32),
            stop=Stop.SAID if stopped else request.end,
            kept=Kept.of(self.kept[s]) if request.sampling.truncated else None,
            top=Top.join(self.top[s], request.sampling.top) if request.sampling.top else None,
        )
