"""The embedded engine: `core.ports.Sampler` over a Hugging Face module it owns, in the running event loop.

A step is: admit, make room, plan, one forward pass over speaking slots and pieces of prompts, one draw per speaking slot,
record. Between steps the loop runs, so finished episodes ask for their next turn before the next admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.errors import EngineError
from posttrain.core.sampling import Sampling
from posttrain.core.types import Gauge, Gauges, Said
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.accept import accept
from posttrain.engine.embedded.blocks import BLOCK, Blocks, blocks_for
from posttrain.engine.embedded.cache import CachedLayout, Pool, ragged_arange
from posttrain.engine.embedded.counters import Counters
from posttrain.engine.embedded.door import Door
from posttrain.engine.embedded.fused import FAMILIES, FusedDecoder, fusable
from posttrain.engine.embedded.plan import Plan
from posttrain.engine.embedded.rules import NothingLeft
from posttrain.engine.embedded.sampler import Drawn, draw
from posttrain.engine.embedded.scheduler import BUDGET, Scheduler
from posttrain.engine.embedded.slots import Heard, Request
from posttrain.engine.embedded.stopping import Text
from posttrain.engine.embedded.timeline import Timeline
from posttrain.engine.embedded.weights import replace_weights
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.models import named_tensors

CACHE_BYTES = 4 << 30
"""Most bytes of the key-value cache; it grows as needed up to here."""
ROWS = 64
"""A deterministic forward pass has the number of slots rounded up to a multiple of this, whatever the work."""
FINE = 0.01
"""Most padding of dense prefill."""
Update = Literal["drain", "inflight", "stale"]


class EmbeddedEngine:
    """Samples from `module`, whose weights belong to the engine from now on.

    Args:
        slots: sequences that speak at once.
        context: most tokens of a sequence, prompt included.
        deterministic: fixed matrix shapes, so that a request's bits do not depend on what runs beside it.
        cache_bytes: upper bound of the key-value cache.
        budget: most positions of a forward pass; speaking slots come first, pieces of prompts fill it up.
        retain: tokens of ended sequences kept in the cache for later turns; None: half of what all slots could hold at most, and
            an eighth of the cache.
        update: what new weights do to sequences being said. drain: they end first. inflight: they go on under the new weights,
            with their cache computed again. stale: they go on over keys and values of the old weights, and the gap is a gauge.
        timeline: record when each request was queued, admitted and done (`EmbeddedEngine.timeline`).
        fused: run the decoder in fewer calls; None: wherever it can be.
        text: reads token ids, special tokens included; without it contracts with stop strings are refused.

    Raises:
        EngineError: the architecture remembers its past elsewhere than in keys and values; or sizes do not fit.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        slots: int,
        context: int,
        deterministic: bool = False,
        device: str = "cpu",
        cache_bytes: int = CACHE_BYTES,
        fused: bool | None = None,
        budget: int = BUDGET,
        retain: int | None = None,
        update: Update = "drain",
        timeline: bool = False,
        text: Text | None = None,
    ) -> None:
        if slots < 1 or context < 2:
            raise EngineError(f"slots={slots}, context={context}: an engine needs at least one slot and room for a prompt and a token")
        self._module = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._read_out, shapes = accept(module, context, deterministic)
        self.fused = fusable(module) if fused is None else fused
        if self.fused and not fusable(module):
            raise EngineError(f"fused=True serves plain float32 models of {', '.join(FAMILIES)}, not this {type(module).__name__}")
        decoder = FusedDecoder(module, self._read_out, context) if self.fused else self._read_out
        self._hidden = decoder.hidden
        self._pool = Pool(shapes, module.dtype, self._read_out.weight.device)
        self._context, self._slots = context, slots
        self._most = cache_bytes // (BLOCK * self._pool.row_bytes)
        if self._most < 2:
            raise EngineError(f"cache_bytes={cache_bytes} holds no two blocks of {BLOCK * self._pool.row_bytes} bytes: raise it")
        self._rows = -(-slots // ROWS) * ROWS if deterministic else None
        if budget < 1:
            raise EngineError(f"budget={budget}: a forward pass needs at least one position")
        self._budget, self._update = budget, update
        held = min(slots * blocks_for(context) // 2, self._most // 8)
        self._retain = held if retain is None else blocks_for(retain)
        self._door = Door(context, self._read_out.weight.shape[0], self._most, text)
        self._version = 0
        self._counters = Counters(slots)
        self.timeline = Timeline() if timeline else None
        self._loading = 0
        self._paused = False
        self._drained: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduler = self._fresh()

    @property
    def version(self) -> int:
        """Version of the weights that would say the next token; 0 for those it was built with."""
        return self._version

    @property
    def keeps_sets(self) -> bool:
        return True

    @property
    def context(self) -> int:
        return self._context

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int, *, heard: Heard | None = None) -> Said:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. Cancelling it frees its slot and blocks.

        heard: called with the new ids and log-probs as soon as they are said.
        """
        request = self._door.request(np.ascontiguousarray(ids, np.int32), sampling, place, heard)
        self._wake()
        self._scheduler.submit(request)
        self._mark(request, "queued")
        try:
            said = await request.future
        except asyncio.CancelledError:
            self._scheduler.cancel(request)
            self._mark(request, None)
            raise
        self._counters.said(len(said.ids))
        return said

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`."""
        with torch.inference_mode():
            whole = torch.from_numpy(np.asarray(ids, np.int64)).to(self._pool.device)
            hidden = self._hidden(whole, torch.arange(len(whole), device=whole.device), PackedLayout([len(whole)]))
            logp = self._read_out.logits(hidden[:-1]).log_softmax(-1)
        return logp.gather(1, whole[1:, None])[:, 0].float().cpu().numpy()

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version`; what is being said meanwhile ends first or goes on, as `update` says.

        All names and shapes are checked before the first tensor is copied. No cached block is found again. Returns the
        fingerprint of what is now being served.
        """
        self._newer(version)
        self._loading += 1
        try:
            if self._update == "drain" and self._scheduler.busy:
                if self._paused:
                    raise EngineError("new weights wait for the sequences being said, and the engine is paused: resume() it first")
                self._wake()
                drained = asyncio.get_running_loop().create_future()
                self._drained.append(drained)
                await drained
            self._newer(version)
            replace_weights(self._module, tensors)
            self._renew(version)
        finally:
            self._loading -= 1
            self._wake()
        return fingerprint(named_tensors(self._module))

    def pause(self) -> None:
        """Say nothing more until `resume`; what was said stays, requests may come."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self._loop is not None and self._loop.is_running():
            self._wake()

    def gauges(self) -> Gauges:
        """Counters since the last call; names and meaning in `counters.Counters`."""
        return self._counters.take(self._scheduler)

    def clock(self) -> dict[str, float]:
        """Seconds since the last call; names in `counters.Counters.clock`."""
        return self._counters.clock()

    @property
    def blocks_in_use(self) -> int:
        """Cache blocks that belong to a slot or a prompt."""
        return self._scheduler.blocks.in_use

    @property
    def cache_size(self) -> int:
        """Bytes the key-value cache takes now."""
        return self._pool.rows * self._pool.row_bytes

    def _newer(self, version: int) -> None:
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only increase")

    def _renew(self, version: int) -> None:
        """The weights were replaced."""
        stale = self._update == "stale"
        self._scheduler.renew(version, stale=stale)
        self._version = version
        if stale:
            self._counters.stale += self._stale_gap()

    @torch.inference_mode()
    def _stale_gap(self) -> Gauge:
        """|log-prob of the tokens said last, over the blocks of the old weights, minus that over fresh ones|, all speaking slots."""
        scheduler = self._scheduler
        at = scheduler.make_room()
        if not len(at):
            return Gauge(0, 0)
        s = scheduler.slots
        rows = np.repeat(at * s.table.shape[1], s.cached[at] + 1) + ragged_arange(s.cached[at] + 1)
        layout = CachedLayout(self._pool, s.table[at, s.cached[at]], s.table.ravel()[rows], s.cached[at] + 1, None)
        ids, positions = (torch.from_numpy(x).to(self._pool.device) for x in (s.pending[at], s.cached[at]))
        stale = self._read_out.logits(self._hidden(ids, positions, layout)).log_softmax(-1)
        whole = [np.append(s.sequence(i), s.pending[i]).astype(np.int64) for i in at.tolist()]
        lengths = np.array([len(w) for w in whole])
        packed, places = (torch.from_numpy(x).to(self._pool.device) for x in (np.concatenate(whole), ragged_arange(lengths)))
        ends = torch.from_numpy(np.cumsum(lengths) - 1).to(self._pool.device)
        fresh = self._read_out.logits(self._hidden(packed, places, PackedLayout(lengths))[ends]).log_softmax(-1)
        gap = (fresh.exp() * (fresh - stale).abs()).sum(-1)
        return Gauge(float(gap.sum()), len(at))

    def _mark(self, request: Request, phase: str | None) -> None:
        if self.timeline is not None:
            self.timeline.phase(request, phase)

    def _wake(self) -> None:
        """Make sure that a task of the running loop steps while there is work."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and (self._scheduler.busy or self._scheduler.queue):
                raise EngineError("this engine is at work in another event loop: use one engine per loop, or one loop")
            if self._scheduler.busy or self._scheduler.queue:
                self._scheduler = self._fresh()
            self._loop, self._task, self._drained = loop, None, []
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._pump())

    async def _pump(self) -> None:
        """Step until there is nothing to do, letting the loop run between steps."""
        await asyncio.sleep(0)
        while not self._paused and (self._scheduler.busy or (self._scheduler.queue and not self._loading)):
            try:
                self._step()
            except Exception as error:
                self._fail(error)
            except BaseException as error:
                self._fail(EngineError(f"the engine was interrupted ({type(error).__name__})"))
                raise
            if not self._scheduler.busy:
                for waiter in self._drained:
                    if not waiter.done():
                        waiter.set_result(None)
                self._drained = []
            await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        """Hand an error to everyone who waits, and start over with an empty cache."""
        waiting = [r for r in (*self._scheduler.slots.request, *self._scheduler.queue) if r is not None]
        self._scheduler = self._fresh()
        for future in (*(r.future for r in waiting), *self._drained):
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
        self._drained = []

    def _fresh(self) -> Scheduler:
        blocks = Blocks(self._most)
        if self._pool.rows:
            blocks.grow(self._pool.rows // BLOCK)
        scheduler = Scheduler(
            self._slots,
            self._context,
            blocks,
            self._grow,
            rows=self._rows,
            budget=self._budget,
            retain=self._retain,
            version=self._version,
        )
        scheduler.slots.strings.text = self._door.text
        return scheduler

    def _grow(self, blocks: int) -> None:
        with torch.inference_mode():
            self._pool.grow(blocks)

    def _step(self) -> None:
        """One forward pass and one token in every slot that speaks."""
        scheduler, begun = self._scheduler, time.perf_counter()
        if not self._loading:
            self._admit()
        with torch.inference_mode():
            self._copy()
            plan = scheduler.plan(scheduler.make_room())
            rows = [self._forward(plan)[: len(plan.speaking)]] if len(plan.ids) else []
            beginning = scheduler.begin()
            self._copy()
            at = np.append(plan.speaking, np.array([s for s, _ in beginning], np.int64))
            self._counters.step(scheduler, len(at))
            if len(at):
                if beginning:
                    rows.append(torch.stack([h for _, h in beginning]))
                hidden = rows[0] if len(rows) == 1 else torch.cat(rows)
                self._say(*self._draw(at, hidden))
        self._counters.spent("engine/step", time.perf_counter() - begun)
        if self.timeline is not None:
            self.timeline.step(begun, len(plan.ids), len(at))
            for s, _ in beginning:
                if (request := scheduler.slots.request[s]) is not None:
                    self._mark(request, "speak")

    def _admit(self) -> None:
        now = time.perf_counter()
        for request in self._scheduler.admit():
            self._counters.spent("engine/queue", now - request.since)
            self._mark(request, "prefill")

    def _copy(self) -> None:
        """Rows of forked blocks."""
        if copies := self._scheduler.copies:
            self._pool.copy(*(np.concatenate(x) for x in zip(*copies, strict=True)))
            self._scheduler.copies = []

    def _say(self, at: np.ndarray, drawn: Drawn) -> None:
        """Record one token in each of these slots; who has ended is answered."""
        slots = self._scheduler.slots
        ended, stopped = slots.say(at, drawn, self._version)
        if slots.listening:
            for i, s in enumerate(at.tolist()):
                request = slots.request[s]
                if request is not None and request.heard is not None:
                    request.heard(drawn.ids[i : i + 1].astype(np.int32), drawn.logp[i : i + 1])
        for s, by_id in zip(ended.tolist(), stopped.tolist(), strict=True):
            self._deliver(s, by_id)

    def _draw(self, at: np.ndarray, hidden: Tensor) -> tuple[np.ndarray, Drawn]:
        """A token for each slot of `at`. A request whose contract leaves it nothing to say gets the error, and the others go on."""
        slots = self._scheduler.slots
        while True:
            try:
                return at, draw(self._logits(hidden), slots.contracts.at(at), slots.uniforms[at, slots.said[at]])
            except NothingLeft as error:
                for s in at[error.rows].tolist():
                    request = slots.request[s]
                    self._scheduler.free(s)
                    if request is not None and not request.future.done():
                        self._mark(request, None)
                        request.future.set_exception(EngineError(str(error)))
                others = np.delete(np.arange(len(at)), error.rows)
                at, hidden = at[others], hidden[torch.from_numpy(others).to(hidden.device)]

    def _forward(self, plan: Plan) -> Tensor:
        """Hidden states [N, H] of a plan's positions, whose keys and values are cached on the way."""
        dense = PackedLayout(plan.dense, waste=FINE) if plan.dense else None
        layout = CachedLayout(self._pool, plan.rows, plan.visible, plan.lengths, dense, plan.chunks)
        ids, positions = (torch.from_numpy(x).to(self._pool.device) for x in (plan.ids, plan.positions))
        hidden = self._hidden(ids, positions, layout)
        self._counters.forward(plan, dense)
        self._scheduler.cached(plan, lambda i: hidden[i].clone())
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, V]; computed on a fixed number of rows where the engine is deterministic."""
        if self._rows is None:
            return self._read_out.logits(hidden)
        padded = hidden.new_zeros((self._rows, hidden.shape[1]))
        padded[: len(hidden)] = hidden
        return self._read_out.logits(padded)[: len(hidden)]

    def _deliver(self, s: int, stopped: bool) -> None:
        """The request in slot `s` has ended: free the slot and answer."""
        request = self._scheduler.slots.request[s]
        assert request is not None
        said = self._scheduler.slots.turn(s, stopped)
        self._scheduler.free(s)
        self._mark(request, None)
        if not request.future.done():
            request.future.set_result(said)
