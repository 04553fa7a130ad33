"""Which tokens the next forward pass computes, and who owns which cache blocks. numpy; no model, no event loop.

A request is queued, then assigned a slot, then waits for its prompt to be cached, then speaks one token a step.
A request is admitted only if all slots could grow to their longest within the byte budget, so none runs out of blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from posttrain.engine.embedded.blocks import BLOCK, Blocks, blocks_for, rows_of
from posttrain.engine.embedded.cache import ragged_arange
from posttrain.engine.embedded.slots import Prompt, Request, Slots

PREFILL = 4096
"""Most prompt tokens of one forward pass, beside one prompt of any length."""
SHORT = 64
"""Prompts up to this length join the ragged queries; longer ones attend densely, which costs a call per bucket and layer."""


@dataclass(eq=False)
class Plan:
    """One forward pass: ragged positions (speaking slots, then prompt pieces), then dense prompts, then idle positions."""

    speaking: np.ndarray
    """Slots whose pending token is computed, at the first positions."""
    ids: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    """Pool row of every position that is not idle."""
    visible: np.ndarray
    """Pool rows each ragged position sees, position after position."""
    lengths: np.ndarray
    """How many each sees; 0 for idle ones."""
    dense: list[int]
    """Length of each dense prompt."""
    pieces: list[tuple[Prompt, int]]
    """Prompts in order, with the number of positions cached after this pass."""
    ends: list[int]
    """Index of the last position of each piece."""


class Scheduler:
    """Admission, planning and release.

    Args:
        grow: called with the number of blocks the pool must hold.
        rows: positions of every forward pass, idle ones included; None where passes are as large as their work.
    """

    def __init__(self, slots: int, context: int, blocks: Blocks, grow: Callable[[int], None], rows: int | None) -> None:
        self.slots = Slots(slots, context)
        self.blocks = blocks
        self.queue: deque[Request] = deque()
        self.prompts: dict[bytes, Prompt] = {}
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        """(from, to) pool rows to copy before the next forward pass."""
        self.evicted: list[int] = []
        """Lengths of cached prompts given up for room, which will be computed again."""
        self.shared = 0
        """Prompt tokens that were not computed because a sibling's were."""
        self._grow, self._rows = grow, rows
        self._users: Counter[bytes] = Counter()
        """Requests of each prompt that have not begun."""
        self._caching: deque[Prompt] = deque()

    @property
    def busy(self) -> bool:
        """Whether a slot is taken."""
        return len(self.slots.free) < self.slots.count

    def submit(self, request: Request) -> None:
        self._users[request.key] += 1
        self.queue.append(request)

    def admit(self) -> None:
        """Fill free slots from the queue, in order, as far as blocks can be reserved."""
        while self.queue and self.slots.free:
            request = self.queue[0]
            if not request.gone:
                prompt = self.prompts.get(request.key)
                if not self._room(request.own_blocks + (0 if prompt else blocks_for(len(request.ids))), request.key):
                    return
                if prompt is None:
                    prompt = Prompt(request.ids, rows_of(self._take(blocks_for(len(request.ids)))))
                    self.prompts[request.key] = prompt
                    self._caching.append(prompt)
                else:
                    self.shared += len(request.ids)
                prompt.waiting.append(self.slots.assign(request))
            self.queue.popleft()

    def plan(self) -> Plan:
        """The next forward pass; blocks for every position it writes are taken."""
        s = self.slots
        at = np.flatnonzero(s.speaking)
        cached = s.cached[at]
        self._extend(at[cached % BLOCK == 0])
        ragged, dense = self._pieces(len(at))
        pieces = ragged + dense
        spans = [(p, p.done, to) for p, to in pieces]
        short = [np.arange(a + 1, b + 1) for _, a, b in spans[: len(ragged)]]
        visible = [s.table.ravel()[np.repeat(at * s.table.shape[1], cached + 1) + ragged_arange(cached + 1)]]
        visible += [p.rows[ragged_arange(n)] for (p, _, _), n in zip(spans[: len(ragged)], short, strict=True)]
        ids = np.concatenate([s.pending[at], *(p.ids[a:b] for p, a, b in spans)]).astype(np.int64)
        positions = np.concatenate([cached, *(np.arange(a, b) for _, a, b in spans)])
        idle = max(0, (self._rows or 0) - len(ids)) if len(ids) else 0
        return Plan(
            speaking=at,
            ids=np.append(ids, np.zeros(idle, np.int64)),
            positions=np.append(positions, np.zeros(idle, np.int64)),
            rows=np.concatenate([s.table[at, cached], *(p.rows[a:b] for p, a, b in spans)]),
            visible=np.concatenate(visible),
            lengths=np.concatenate([cached + 1, *short, np.zeros(idle, np.int64)]),
            dense=[b - a for _, a, b in spans[len(ragged) :]],
            pieces=pieces,
            ends=(len(at) - 1 + np.cumsum([b - a for _, a, b in spans], dtype=np.int64)).tolist(),
        )

    def cached(self, plan: Plan, hidden: Callable[[int], Tensor]) -> None:
        """The pass is done: `hidden(i)` is the hidden state of its position i."""
        self.slots.cached[plan.speaking] += 1
        for (prompt, to), end in zip(plan.pieces, plan.ends, strict=True):
            prompt.done = to
            if to == len(prompt.ids):
                prompt.hidden = hidden(end)
                self._caching.remove(prompt)

    def begin(self) -> list[tuple[int, Tensor]]:
        """Slots whose prompt is cached and that say their first token now, with the hidden state it is drawn from."""
        out: list[tuple[int, Tensor]] = []
        for prompt in [p for p in self.prompts.values() if p.hidden is not None and p.waiting]:
            for s in prompt.waiting:
                self._join(s, prompt)
                assert prompt.hidden is not None
                out.append((s, prompt.hidden))
            prompt.waiting = []
        return out

    def free(self, s: int) -> None:
        """Give up a slot with all it holds, also one that has not begun."""
        request = self.slots.request[s]
        assert request is not None
        prompt = self.prompts.get(request.key)
        if prompt is not None and s in prompt.waiting:
            prompt.waiting.remove(s)
            self._leave(request.key)
        else:
            self.blocks.release(self.slots.blocks(s))
        self.slots.clear(s)

    def cancel(self, request: Request) -> None:
        """Forget a request wherever it is."""
        if request.slot is not None:
            if self.slots.request[request.slot] is request:
                self.free(request.slot)
        elif not request.gone:
            request.gone = True
            self._leave(request.key)

    def drop_prompts(self) -> None:
        """Forget every cached prompt; no slot may be taken."""
        for key in list(self.prompts):
            self._drop(key)

    def _pieces(self, speaking: int) -> tuple[list[tuple[Prompt, int]], list[tuple[Prompt, int]]]:
        """Prompts to compute now, as (ragged, dense) with the position each is computed up to."""
        ragged: list[tuple[Prompt, int]] = []
        dense: list[tuple[Prompt, int]] = []
        room = PREFILL if self._rows is None else self._rows - speaking
        for prompt in self._caching:
            todo = len(prompt.ids) - prompt.done
            if self._rows is not None:
                todo = min(todo, room)
            elif todo > room < PREFILL:
                break
            if todo:
                (ragged if self._rows is not None or todo <= SHORT else dense).append((prompt, prompt.done + todo))
            room -= todo
            if room <= 0:
                break
        return ragged, dense

    def _join(self, s: int, prompt: Prompt) -> None:
        """Slot `s` continues `prompt`: full blocks are shared, the partial one copied; the last sibling inherits both."""
        request = self.slots.request[s]
        assert request is not None
        size = len(prompt.ids)
        full = size // BLOCK * BLOCK
        self.slots.table[s, : len(prompt.rows)] = prompt.rows
        if self._users[request.key] == 1:
            del self.prompts[request.key]
        else:
            self.blocks.share(prompt.blocks[: size // BLOCK])
            if full < size:
                own = rows_of(self._take(1))
                self.slots.table[s, full : full + BLOCK] = own
                self.copies.append((prompt.rows[full:size], own[: size - full]))
        self.slots.owed[s] -= full < size
        self._count_down(request.key)
        self.slots.cached[s] = size

    def _leave(self, key: bytes) -> None:
        """A request of this prompt goes before it began; the last one takes the prompt with it."""
        self._count_down(key)
        if not self._users[key] and key in self.prompts:
            self._drop(key)

    def _count_down(self, key: bytes) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _drop(self, key: bytes) -> None:
        prompt = self.prompts.pop(key)
        self.blocks.release(prompt.blocks)
        if prompt.hidden is None:
            self._caching.remove(prompt)

    def _room(self, blocks: int, key: bytes) -> bool:
        """Whether `blocks` more fit, beside all that slots may still take; gives up cached prompts no slot waits for if it must."""
        owed = int(self.slots.owed.sum()) + blocks
        for idle in [k for k, p in self.prompts.items() if not p.waiting and k != key]:
            if self.blocks.in_use + owed <= self.blocks.most:
                break
            self.evicted.append(self.prompts[idle].done)
            self._drop(idle)
        return self.blocks.in_use + owed <= self.blocks.most

    def _extend(self, at: np.ndarray) -> None:
        """One more block for each of these slots, at their next position."""
        if len(at):
            rows = rows_of(self._take(len(at))).reshape(-1, BLOCK)
            self.slots.owed[at] -= 1
            self.slots.table[at[:, None], self.slots.cached[at][:, None] + np.arange(BLOCK)] = rows

    def _take(self, n: int) -> np.ndarray:
        if capacity := self.blocks.short(n):
            self._grow(capacity)
            self.blocks.grow(capacity)
        return self.blocks.take(n)
