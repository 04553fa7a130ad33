"""Decides which tokens the next forward pass computes, and which request owns which cache blocks, without the model.

A request is queued, then gets a slot when there are blocks for its prompt, waits for the prompt to be cached, and
generates. Where blocks run out, the youngest is preempted: it goes back to the head of the queue with what it has said,
and its cache is computed again. Every request ends, since the oldest one is served first and is never preempted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from torch import Tensor

from posttrain.engine.embedded.cache.cache_blocks import BLOCK, Blocks, blocks_for, rows_of
from posttrain.engine.embedded.cache.forward_plan import SHORT, Drafts, Plan, PrefillPieces, make_plan, room_in_lanes
from posttrain.engine.embedded.cache.prefix_tree import EVICT_BLOCKS, PrefixTree
from posttrain.engine.embedded.schedule.engine_counters import SchedulerCounts
from posttrain.engine.embedded.schedule.slots import GenerateCall, Prompt, Slots


class Scheduler:
    """Admission, planning, preemption and release.

    Args:
        grow: called with the number of blocks that the pool must hold.
        rows: positions of every forward pass, idle ones included; None: as many as there is work for.
        budget: most positions of a forward pass where `rows` is None. Each generating slot has at least one.
        lanes: positions are computed in groups of this size (`forward_plan.room_in_lanes`).
        retain: blocks of ended sequences that are kept for later turns while no request needs them.
        version: version of the served weights.
    """

    def __init__(
        self,
        slots: int,
        context: int,
        blocks: Blocks,
        grow: Callable[[int], None],
        *,
        rows: int | None,
        budget: int,
        retain: int,
        version: int,
        lanes: int = 1,
    ) -> None:
        self.slots = Slots(slots, context)
        self.blocks = blocks
        self.tree = PrefixTree(blocks, version)
        self.queue: deque[GenerateCall] = deque()
        self.prompts: dict[bytes, Prompt] = {}
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        """(from, to) pool rows to copy before the next forward pass."""
        self.counts = SchedulerCounts()
        self.moved: list[GenerateCall] = []
        """Requests that lost their slot, or continue in a new one, since this list was emptied."""
        self.failed: list[tuple[GenerateCall, Exception]] = []
        """Requests that could not be admitted, and the errors, since this list was emptied."""
        self._grow, self._rows, self.budget, self._retain, self._lanes = grow, rows, max(budget, slots), retain, lanes
        self._arrived = 0
        self._users: Counter[bytes] = Counter()
        """Requests of each prompt (by its ids as bytes) that have not begun, in a slot or in the queue."""
        self._caching: deque[Prompt] = deque()
        """Prompts that are not cached to their end, in the order of their admission."""
        self._waits: dict[int, Prompt] = {}
        """The prompt that each slot waits for before it generates."""
        self._lost: dict[bytes, int] = {}
        """Cached positions of each prompt that was freed while requests still wanted it."""

    @property
    def busy(self) -> bool:
        """True where any slot is taken."""
        return len(self.slots.free) < self.slots.count

    @property
    def unfinished(self) -> bool:
        """True where any turn has begun and not ended, in a slot or preempted and queued."""
        return self.busy or any(r.begun is not None and not r.gone for r in self.queue)

    @property
    def filled(self) -> int:
        """Blocks needed for what the slots and prompts have cached or are caching; shared blocks count once."""
        # `spoken` has the block of every cached position and of the pending one, which lies at `cached`.
        s = self.slots
        waiting = {id(p): p for p in (*self.prompts.values(), *self._waits.values())}.values()
        at, block_starts = np.flatnonzero(s.generating), np.arange(0, s.table.shape[1], BLOCK)
        spoken = s.table[:, ::BLOCK][at][block_starts <= s.cached[at][:, None]] // BLOCK
        return len(np.unique(np.concatenate([spoken, *(p.blocks for p in waiting)])))

    def submit(self, request: GenerateCall) -> None:
        """Put a request at the end of the queue."""
        request.number = self._arrived
        self._arrived += 1
        self._users[request.key] += 1
        self.queue.append(request)

    def admit(self, begun_only: bool = False) -> list[GenerateCall]:
        """Fill free slots from the queue, in order, while there are blocks for the prompts. Returns
        the admitted requests.

        Args:
            begun_only: admit only requests that have already said a token, because new weights wait for these to end.
        """
        # Order of arrival is kept, also where a later request would fit and the first does not: a long prompt would
        # wait for ever otherwise. Only new weights change it: what has begun must end before they come, and goes first.
        if begun_only:
            self.queue = deque(sorted(self.queue, key=lambda r: r.begun is None))
        admitted: list[GenerateCall] = []
        while self.queue and self.slots.free:
            request = self.queue[0]
            if begun_only and request.begun is None:
                break
            if not request.gone:
                # Siblings share the first one's `Prompt`. A preempted request has tokens and a `Prompt` of its own.
                prompt = None if request.begun else self.prompts.get(request.key)
                if prompt is not None:
                    # Its one block is for the copy of the prompt's partly filled last block.
                    if not self._ensure_room(1, keep=prompt):
                        break
                    self.counts.shared += len(prompt.ids)
                elif (prompt := self._new_prompt(request)) is None:
                    break
                if self._assign(request, prompt):
                    admitted.append(request)
            self.queue.popleft()
        return admitted

    def _assign(self, request: GenerateCall, prompt: Prompt) -> bool:
        """Give a request of `prompt` a free slot. False where its contract cannot be stored: it alone fails."""
        s = self.slots.assign(request)
        self._waits[s] = prompt
        prompt.waiting.append(s)
        try:
            self.slots.set_contract(s, request)
        except Exception as error:  # the caller's numbers may raise anything
            self.free(s)
            request.slot, request.gone = None, True
            self.failed.append((request, error))
            return False
        # The prefix tree still had all tokens of this request, so no pass will compute them and call `_resume`.
        if prompt.resumes and prompt.done == len(prompt.ids):
            self._caching.remove(prompt)
            self._resume(prompt)
        return True

    def make_room(self, ahead: int = 0) -> np.ndarray:
        """Allocate blocks for the next position of every generating slot; where there are too few, the
        youngest is preempted. Allocate also for `ahead` more positions each, if no other request loses blocks.
        Returns the generating slots."""
        # Preempting the youngest until the others fit ends: the oldest keeps its blocks, and a request alone fits the
        # cache (checked when it was accepted). The youngest has the least to compute again.
        s = self.slots
        while True:
            at = s.generating.nonzero()[0]
            short = at[s.held[at] <= s.cached[at]]
            if self._ensure_room(len(short)):
                break
            self.counts.preempted += 1
            self.preempt(int(np.argmax(s.number)))
        self._extend(short)
        if ahead:
            wanting = at[(s.held[at] <= s.cached[at] + ahead) & (s.held[at] < s.table.shape[1])]
            if self.blocks.fits(len(wanting)):
                self._extend(wanting)
        return at

    def plan(self, at: np.ndarray, drafts: Drafts | None = None) -> Plan:
        """The next forward pass, for the slots that `make_room` returned."""
        computed = len(at) + (int(drafts.counts.sum()) if drafts is not None else 0)
        uncached = sum(len(p.ids) - p.done for p in self._caching)
        room = (
            room_in_lanes(computed, uncached, self.budget, self._lanes) if self._rows is None else self._rows - computed
        )
        return make_plan(self.slots, at, drafts, self._pieces(room), self._rows or 0)

    def cached(self, plan: Plan, hidden: Callable[[int], Tensor]) -> None:
        """Record that the pass was computed. `hidden(i)`: state of its position i. Drafts count once they are said."""
        self.slots.cached[plan.generating] += 1
        for (prompt, to), end in zip(plan.pieces, plan.ends, strict=True):
            # Whole blocks go into the tree as soon as they are computed, not when the prompt ends: another prompt with
            # the same beginning, which waits in `_pieces`, takes them up in the next pass.
            prompt.done = to
            if full := to // BLOCK:
                self._take_over(prompt, self.tree.insert(prompt.ids[: full * BLOCK], prompt.blocks[:full]))
            if to == len(prompt.ids):
                prompt.hidden = hidden(end)
                self._caching.remove(prompt)
                if prompt.resumes:
                    self._resume(prompt)

    def begin(self) -> list[tuple[int, Tensor]]:
        """(slot, hidden state) of each slot whose prompt is cached now; its first token is drawn from that state."""
        out: list[tuple[int, Tensor]] = []
        # A list, because `_join` removes a prompt with its last request.
        for prompt in [p for p in self.prompts.values() if p.hidden is not None and p.waiting]:
            while prompt.waiting and self._join(prompt):
                s = prompt.waiting.pop(0)
                assert prompt.hidden is not None
                out.append((s, prompt.hidden))
        return out

    def free(self, s: int) -> None:
        """Free a slot and all it holds, also one that has not begun. Its cached blocks stay in the prefix tree."""
        request, prompt = self.slots.of(s), self._waits.pop(s, None)
        if prompt is None:
            # Into the tree first, then released: so a block is not free in between.
            slot_blocks = self.slots.blocks(s)
            # Keys of older weights must not be found under the new ones, so only a fresh slot leaves its tokens there.
            if self.slots.fresh[s]:
                self.tree.insert(self.slots.sequence(s), slot_blocks[: blocks_for(int(self.slots.cached[s]))])
            self.blocks.release(slot_blocks)
            # Some more than are to be kept may gather, so that the search for what to evict is rare.
            if (spare := self.blocks.spare) > self._retain + EVICT_BLOCKS:
                self.tree.evict(spare - self._retain)
        elif prompt.resumes:
            self.blocks.release(prompt.blocks)
            self._caching.remove(prompt)
        else:
            prompt.waiting.remove(s)
            self._leave(request.key)
        self.slots.clear(s)

    def cancel(self, request: GenerateCall) -> None:
        """Remove a request from its slot or from the queue."""
        if request.slot is not None:
            if self.slots.request[request.slot] is request:
                self.free(request.slot)
        elif not request.gone:
            request.gone = True
            if request.begun is None:
                self._leave(request.key)

    def preempt(self, s: int) -> None:
        """The slot's request goes back to the head of the queue, with the tokens it has said."""
        request = self.slots.of(s)
        request.begun = self.slots.begun(s)
        # Without a token it counts again as not begun. If it still waits at its prompt, `free` takes that count off.
        if request.begun is None:
            self._users[request.key] += 1
        request.lost = int(self.slots.cached[s])
        self.free(s)
        request.slot, request.since = None, time.perf_counter()
        self.moved.append(request)
        self.queue.appendleft(request)

    def renew(self, version: int, *, stale: bool = False) -> None:
        """New weights: free every cached prompt, and the slots' caches unless they continue over `stale` blocks."""
        s = self.slots
        # The youngest first: each goes to the head of the queue, so at the end the oldest is at the head.
        for i in np.argsort(-s.number, kind="stable").tolist():
            if s.request[i] is None:
                continue
            # Slots that wait for a prompt are always preempted: their first token would be drawn from old weights.
            if not stale or not s.generating[i]:
                self.preempt(i)
        s.fresh[s.generating] = False  # with `stale` alone: else no slot generates any more
        for prompt in list(self.prompts.values()):
            self._drop(prompt)
        self.tree.renew(version)

    def _new_prompt(self, request: GenerateCall) -> Prompt | None:
        """The request's tokens with blocks for all, of the prefix tree where possible; None: too few blocks."""
        # Of a new prompt the last token is never taken from the cache: the first token is drawn from its hidden state,
        # and the cache has keys and values alone. A preempted request goes on from a token that it has said.
        ids = request.cached_ids
        resumes = request.begun is not None
        match = self.tree.match(ids, len(ids) if resumes else len(ids) - 1)
        # Held before room is made for the others, which may evict spare blocks.
        self.blocks.share(match.blocks)
        own_blocks = blocks_for(len(ids)) - len(match.blocks)
        # And one block for every generating slot, so that the next pass need not preempt this request.
        if not self._ensure_room(own_blocks + int(np.count_nonzero(self.slots.generating))):
            self.blocks.release(match.blocks)
            return None
        rows = rows_of(np.concatenate([match.blocks, self._take_blocks(own_blocks)]))
        prompt = Prompt(ids, rows, done=match.tokens, resumes=resumes)
        # Of a block that is matched in part the beginning is copied into an own one.
        if match.extra:
            at = len(match.blocks) * BLOCK
            self.copies.append((match.tail * BLOCK + np.arange(match.extra), rows[at : at + match.extra]))
        # Positions that were cached before and are computed again are work that no answer needs.
        lost = request.lost if resumes else self._lost.pop(request.key, 0)
        if lost > match.tokens:
            self.counts.again.append((match.tokens, lost))
        self.counts.found += match.tokens
        self.counts.asked += len(ids)
        if not resumes:
            self.prompts[request.key] = prompt
        self._caching.append(prompt)
        return prompt

    def _pieces(self, room: int) -> PrefillPieces:
        """Pieces of prompts, at most `room` positions. A prompt waits for a next block that another computes now."""
        pieces = PrefillPieces()
        claimed: set[bytes] = set()
        for prompt in self._caching:
            if room <= 0:
                break
            # Two prompts that begin alike arrive together at a stage's start. The second one waits a pass for the block
            # that the first computes now, and then adopts it, where otherwise both would compute it. Whole blocks alone
            # are adopted, and never the last token: so not within a block, nor with at most one block left.
            if len(self._caching) > 1 and prompt.done % BLOCK == 0 and len(prompt.ids) - prompt.done > BLOCK:
                self._adopt(prompt)
                next_block = prompt.ids[: prompt.done + BLOCK].tobytes()
                if next_block in claimed:
                    continue
                claimed.add(next_block)
            todo = min(len(prompt.ids) - prompt.done, room)
            # With fixed shapes all are ragged: the bits of dense attention depend on what else is in the bucket.
            ragged = self._rows is not None or todo <= SHORT
            kind = pieces.ragged if ragged else pieces.chunks if prompt.done else pieces.dense
            kind.append((prompt, prompt.done + todo))
            room -= todo
        return pieces

    def _adopt(self, prompt: Prompt) -> None:
        """Use whole blocks that other requests have cached since the prompt was admitted, instead of own empty ones."""
        # Whole blocks, and never the one with the last token, whose hidden state has to be computed.
        cached_blocks = self.tree.match(prompt.ids, (len(prompt.ids) - 1) // BLOCK * BLOCK).blocks
        begun = prompt.done // BLOCK
        if len(cached_blocks) > begun:
            self._take_over(prompt, cached_blocks)
            self.counts.found += len(cached_blocks) * BLOCK - prompt.done
            prompt.done = len(cached_blocks) * BLOCK

    def _take_over(self, prompt: Prompt, tree_blocks: np.ndarray) -> None:
        """Let the prompt hold `tree_blocks`, the tree's blocks of its beginning, in place of its own
        blocks of the same tokens.

        So a request that holds a block of the tree also holds all blocks before it, even where two requests
        computed the same at once. Therefore no request holds a block after one that only the tree owns, and all
        spare blocks can be evicted."""
        # Shared before its own are released: at no moment is a block that is in use without an owner.
        differs = prompt.blocks[: len(tree_blocks)] != tree_blocks
        self.blocks.share(tree_blocks[differs])
        self.blocks.release(prompt.blocks[: len(tree_blocks)][differs])
        prompt.rows[: len(tree_blocks) * BLOCK] = rows_of(tree_blocks)

    def _join(self, prompt: Prompt) -> bool:
        """The first waiting slot begins after `prompt`. It shares the full blocks and copies the partial one; the last
        request of the prompt takes both without a copy. False where there is no block for the copy."""
        # Slots write behind the prompt from now on, so each needs a partly filled last block of its own. The last
        # request to begin takes the prompt's own block: `_users` counts those that have not begun, this one with them.
        s = prompt.waiting[0]
        request = self.slots.of(s)
        size, full = len(prompt.ids), len(prompt.ids) // BLOCK
        inherits = self._users[request.key] == 1
        if not inherits and full * BLOCK < size and not self._ensure_room(1):
            # No room for a copy. While other slots generate, a block will become free, and this slot waits for it. If
            # no slot generates, none ever will, so the last sibling gives its slot up. A slot that waits alone takes
            # the prompt's own block, and requests that are still in the queue cache the prompt again.
            if len(prompt.waiting) > 1:
                if not self.slots.generating.any():
                    self.counts.preempted += 1
                    self.preempt(prompt.waiting[-1])
                return False
            inherits = True
        self.slots.table[s, : len(prompt.rows)] = prompt.rows
        if inherits:
            del self.prompts[request.key]
        else:
            self.blocks.share(prompt.blocks[:full])
            if full * BLOCK < size:
                copy_rows = rows_of(self._take_blocks(1))
                self.slots.table[s, full * BLOCK : (full + 1) * BLOCK] = copy_rows
                self.copies.append((prompt.rows[full * BLOCK : size], copy_rows[: size - full * BLOCK]))
        # From here on the slot itself owns what it holds.
        del self._waits[s]
        self._count_down(request.key)
        self.slots.cached[s], self.slots.held[s] = size, len(prompt.rows)
        return True

    def _resume(self, prompt: Prompt) -> None:
        """All tokens that the prompt's slot had said are cached again, so it continues."""
        (s,) = prompt.waiting
        del self._waits[s]
        self.slots.table[s, : len(prompt.rows)] = prompt.rows
        self.slots.cached[s], self.slots.held[s] = len(prompt.ids), len(prompt.rows)
        self.slots.generating[s] = True
        self.moved.append(self.slots.of(s))

    def _leave(self, key: bytes) -> None:
        """A request of this prompt is removed before it began. With the last one the prompt is removed."""
        self._count_down(key)
        if not self._users[key]:
            self._lost.pop(key, None)
            if key in self.prompts:
                self._drop(self.prompts[key])

    def _count_down(self, key: bytes) -> None:
        """One request fewer of this prompt has not begun."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _drop(self, prompt: Prompt) -> None:
        """Free a prompt that no slot waits for."""
        key = prompt.ids.tobytes()
        del self.prompts[key]
        self.blocks.release(prompt.blocks)
        if prompt.hidden is None:
            self._caching.remove(prompt)
        # Queued requests of this prompt compute it again, and what is computed twice is counted.
        if self._users[key]:
            self._lost[key] = prompt.done

    def _ensure_room(self, n: int, keep: Prompt | None = None) -> bool:
        """Free prompts that no slot waits for, but not `keep`, until `n` more blocks fit; False: they still do not."""
        if not self.blocks.fits(n):
            for prompt in [p for p in self.prompts.values() if not p.waiting and p is not keep]:
                self._drop(prompt)
                if self.blocks.fits(n):
                    break
        return self.blocks.fits(n)

    def _take_blocks(self, n: int) -> np.ndarray:
        """Take `n` blocks: free ones first, then new ones within the byte budget, then evicted ones of the tree.
        `_ensure_room` or `Blocks.fits` has said before that there are so many."""
        blocks = self.blocks
        if n > blocks.free and blocks.capacity < blocks.most:
            # A quarter more at least, so that a cache of n blocks has been copied some log n times and not n times.
            capacity = min(blocks.most, max(blocks.capacity + n - blocks.free, blocks.capacity + blocks.capacity // 4))
            self._grow(capacity)
            blocks.grow(capacity)
        if n > blocks.free:
            self.tree.evict(max(n - blocks.free, EVICT_BLOCKS))
        return blocks.take(n)

    def _extend(self, at: np.ndarray) -> None:
        """One more block for each of these slots."""
        if len(at):
            rows = rows_of(self._take_blocks(len(at))).reshape(-1, BLOCK)
            self.slots.table[at[:, None], self.slots.held[at][:, None] + np.arange(BLOCK)] = rows
            self.slots.held[at] += BLOCK
