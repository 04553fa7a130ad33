"""One step of the engine: admit requests, make room, draft, plan, run one forward pass, draw, record, answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from posttrain.core.types import SampledTurn
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.forward_plan import Drafts, Plan
from posttrain.engine.embedded.cache.key_value_cache import CachePool, ragged_arange
from posttrain.engine.embedded.schedule.engine_counters import EngineCounters
from posttrain.engine.embedded.schedule.scheduler import Scheduler
from posttrain.engine.embedded.schedule.slot_rules import NoDraw, NothingLeft
from posttrain.engine.embedded.schedule.slots import GenerateCall
from posttrain.engine.embedded.schedule.timeline import Timeline
from posttrain.engine.embedded.speculation import DraftModel, Proposer, positions_ahead, verify, within
from posttrain.engine.embedded.token_sampler import DrawDistributions, DrawnTokens, draw
from posttrain.system.errors import EngineError


@dataclass(eq=False)
class Stepper:
    """Extends every generating slot by one token, or by more where drafts are accepted."""

    served: CachedModel
    scheduler: Scheduler
    counters: EngineCounters
    proposer: Proposer | None = None
    timeline: Timeline | None = None
    others: tuple[CachePool, ...] = ()
    """Pools beside the served model's, with the same rows: of the other model of a mixture, and of a draft model."""

    @torch.inference_mode()
    def step(self, version: int, *, admit: bool) -> None:
        """One forward pass with the weights of `version`. Without `admit` only preempted requests begin."""
        scheduler, begun = self.scheduler, time.perf_counter()
        self._mark_moved()  # new weights move requests between two steps
        self._admit(begun_only=not admit)
        # Slots write behind their last token, so a partly filled block that is another's too is copied before the pass.
        self._copy()
        generating = scheduler.make_room(self.proposer.tokens if self.proposer else 0)
        drafts = self._propose(generating)
        plan = scheduler.plan(generating, drafts)
        # Hidden states of the generating slots and their drafts. The scheduler keeps those of prompts that it needs.
        rows = [self._forward(plan)[: plan.front]] if len(plan.ids) else []
        beginning = scheduler.begin()
        self._copy()  # again: slots that share a prompt have got copies of its partly filled last block in `begin`
        # Prompts that end with this pass draw their first token with the slots that speak.
        at = generating
        if beginning:
            at = np.append(at, np.array([s for s, _ in beginning], np.int64))
            rows.append(torch.stack([h for _, h in beginning]))
        self.counters.step(scheduler, len(at))
        if len(at):
            hidden = rows[0] if len(rows) == 1 else torch.cat(rows)
            if drafts is None:
                self._record(*self._draw(at, hidden), version)
            else:
                self._verify_drafts(plan, drafts, at, hidden, version)
        self.counters.spent("engine/step", time.perf_counter() - begun)
        if self.timeline is not None:
            self.timeline.step(begun, len(plan.ids), len(at))
        for s, _ in beginning:
            if (request := scheduler.slots.request[s]) is not None:  # None: it has ended at once
                self.mark(request, "speak")
        self._mark_moved()

    def mark(self, request: GenerateCall, phase: str | None) -> None:
        """Note in the timeline, where there is one, that a phase of the request begins; None: the request ends."""
        if self.timeline is not None:
            self.timeline.phase(request, phase)

    def _admit(self, begun_only: bool) -> None:
        """Admit requests from the queue, and answer those whose contract could not be stored."""
        now = time.perf_counter()
        for request in self.scheduler.admit(begun_only):
            self.counters.spent("engine/queue", now - request.since)
            self.mark(request, "prefill")
        failed, self.scheduler.failed = self.scheduler.failed, []
        for request, error in failed:
            self._answer(request, error)

    def _mark_moved(self) -> None:
        """Record in the timeline the requests that lost their slot and those that continue after a preemption."""
        moved, self.scheduler.moved = self.scheduler.moved, []
        for request in moved:
            # By this time it may have moved on, ended or been cancelled. Its state of this moment counts.
            holds = request.slot is not None and self.scheduler.slots.request[request.slot] is request
            if holds or (request.slot is None and not request.gone):
                self.mark(request, "speak" if holds else "queued")

    def _copy(self) -> None:
        """Copy the cache rows of partly filled blocks that got a second owner."""
        if copies := self.scheduler.copies:
            # All as one copy, which reads every source before it writes a row. A block that was matched only in part is
            # not held, so it may have been evicted in the same admission and have become a target.
            source, to = (np.concatenate(x) for x in zip(*copies, strict=True))
            for pool in (self.served.pool, *self.others):
                pool.copy(source, to)
            self.scheduler.copies = []

    def _propose(self, at: np.ndarray) -> Drafts | None:
        """Drafts for the generating slots, in the part of the budget that these leave; None where there are none."""
        if self.proposer is None or not len(at):
            return None
        most = within(positions_ahead(self.scheduler.slots, at, self.proposer.tokens), self.scheduler.budget - len(at))
        try:
            return self.proposer.propose(self.scheduler.slots, at, most) if most.any() else None
        except NothingLeft:  # every token of a slot is banned: the draw raises for it
            return None

    def _forward(self, plan: Plan) -> Tensor:
        """Compute a plan's positions, and record that it was done. Returns their hidden states [N, H]."""
        hidden, dense = self.served.run(plan)
        # The draft model computes every position too, so its cache has all rows that a slot's table names.
        if isinstance(self.proposer, DraftModel):
            self.proposer.served.run(plan)
        self.counters.forward(plan, dense)
        # A clone, because a view of one row would keep the states of the whole pass in memory.
        self.scheduler.cached(plan, lambda i: hidden[i].clone())
        return hidden

    def _draw(self, at: np.ndarray, hidden: Tensor) -> tuple[np.ndarray, DrawnTokens]:
        """(slots, a token for each). Where nothing can be drawn, that request alone gets the error."""
        slots = self.scheduler.slots
        # Requests of rows that fail get the error, and their rows are taken out. The others are drawn again from fresh
        # logits, since the rules have overwritten the first ones. Every round has fewer rows, so it ends.
        while True:
            try:
                contracts, uniform = slots.contracts.at(at), slots.uniforms[at, slots.said[at]]
                return at, draw(self.served.logits(hidden), contracts, uniform, self.served.kernels)
            except NoDraw as error:
                for s in at[error.rows].tolist():
                    request = slots.of(s)
                    self.scheduler.free(s)
                    self._answer(request, EngineError(str(error)))
                others = np.delete(np.arange(len(at)), error.rows)
                at, hidden = at[others], hidden[torch.from_numpy(others).to(hidden.device)]

    def _verify_drafts(self, plan: Plan, drafts: Drafts, at: np.ndarray, hidden: Tensor, version: int) -> None:
        """Verify the drafts of the generating slots, and record what was accepted. Slots that begin draw with them."""
        slots, beginning = self.scheduler.slots, len(at) - len(plan.generating)
        # A generating slot has a row for each of its drafts and one more; a slot that begins has one. Row j has the
        # distribution after j drafts, which the rules treat as said, and the uniform of its token's place.
        padded = np.concatenate([drafts.ids, np.zeros((beginning, drafts.ids.shape[1]), np.int64)])
        drafts = Drafts(padded, np.append(drafts.counts, np.zeros(beginning, np.int64)), drafts.q)
        widths = drafts.counts + 1
        # Of every row: its slot, its j, and the j drafts before it, filled up with -1.
        row_slot, row_j = np.repeat(at, widths), ragged_arange(widths)
        before = np.where(np.arange(padded.shape[1]) < row_j[:, None], np.repeat(padded, widths, 0), -1)
        first_row = np.cumsum(widths) - widths  # of every slot
        accept = self.proposer.accepts(slots, row_slot, row_j) if isinstance(self.proposer, DraftModel) else None
        try:
            distributions = DrawDistributions.of(
                self.served.logits(hidden), slots.contracts.at(row_slot, before), self.served.kernels
            )
            uniforms = slots.uniforms[row_slot, slots.said[row_slot] + row_j]
            drawn, accepted = verify(distributions, drafts, uniforms, accept)
        # for some slot nothing can be drawn: a draw without drafts gives only that request the error
        except NoDraw:
            self._record(*self._draw(at, hidden[torch.from_numpy(first_row).to(hidden.device)]), version)
            self.counters.drafts(plan, 0, first_row[: len(plan.generating)])
            return
        # Token by token over all slots: the j-th round records each slot's j-th token. A slot leaves when its draft
        # was rejected, when its turn ended, or when nothing can be drawn after its draft: the next pass finds that out.
        speaking = np.arange(len(at))  # indices into `at`
        has_distribution = np.isin(np.arange(len(row_slot)), distributions.dead, invert=True)
        # Rows whose position was not computed in vain. A turn may end before its accepted drafts do, so only the rounds
        # show which: those of the generating slots' pending tokens, then those of drafts after which a slot goes on.
        accepted_drafts, needed = 0, [first_row[: len(plan.generating)]]
        for j in range(int(accepted.max()) + 1):
            if j:
                speaking = speaking[(accepted[speaking] >= j) & slots.generating[at[speaking]]]
                speaking = speaking[has_distribution[first_row[speaking] + j]]
                # Their keys and values were computed in this pass; `Scheduler.cached` counted the pending token alone.
                slots.cached[at[speaking]] += 1
                needed.append(first_row[speaking] + j)
            accepted_drafts += int(np.count_nonzero(accepted[speaking] > j))
            self._record(at[speaking], drawn.at(first_row[speaking] + j), version)
        self.counters.drafts(plan, accepted_drafts, np.concatenate(needed))

    def _record(self, at: np.ndarray, drawn: DrawnTokens, version: int) -> None:
        """Record one token in each of these slots, and answer the requests that have ended."""
        slots = self.scheduler.slots
        ended, stopped = slots.say(at, drawn, version)
        if slots.streaming:
            for i, s in enumerate(at.tolist()):
                self._stream_tokens(s, drawn.ids[i : i + 1].astype(np.int32), drawn.logp[i : i + 1])
        for s, by_id in zip(ended.tolist(), stopped.tolist(), strict=True):
            if (request := slots.request[s]) is not None:  # None: its callback has failed just now, which freed it
                turn = self._with_experts(s, slots.turn(s, by_id))
                self.scheduler.free(s)
                self._answer(request, turn)

    def _with_experts(self, s: int, turn: SampledTurn) -> SampledTurn:
        """A turn with the experts of every token that was computed for it, where the model is a mixture of them."""
        slots = self.scheduler.slots
        routed = self.served.routed(slots.table[s, : slots.cached[s]])
        return turn if routed is None else replace(turn, routed=routed.copy())

    def _stream_tokens(self, s: int, ids: np.ndarray, logp: np.ndarray) -> None:
        """Call the request's callback with its new tokens. If the callback fails, only this request gets the error."""
        request = self.scheduler.slots.request[s]
        if request is None or request.heard is None:
            return
        try:
            request.heard(ids, logp)
        except Exception as error:  # a caller's own code
            self.scheduler.free(s)
            self._answer(request, error)

    def _answer(self, request: GenerateCall, answer: SampledTurn | Exception) -> None:
        """End a request: its caller gets the turn, or the error is raised there."""
        self.mark(request, None)
        if not request.future.done():
            if isinstance(answer, Exception):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)
