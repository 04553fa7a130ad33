"""The embedded engine: `core.ports.Sampler` over a Hugging Face module it owns, in the running event loop.

A step is: admit, plan, one forward pass over ragged positions, one draw per speaking slot, record. Between steps the
loop runs, so finished episodes ask for their next turn before the next admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.errors import DataError, EngineError
from posttrain.core.sampling import Sampling
from posttrain.core.types import Gauges, Said, Stop
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.accept import accept
from posttrain.engine.embedded.blocks import BLOCK, Blocks, blocks_for
from posttrain.engine.embedded.cache import CachedLayout, Pool
from posttrain.engine.embedded.counters import Counters
from posttrain.engine.embedded.fused import FAMILIES, FusedDecoder, fusable
from posttrain.engine.embedded.sampler import draw
from posttrain.engine.embedded.scheduler import Plan, Scheduler
from posttrain.engine.embedded.slots import Request
from posttrain.engine.embedded.weights import replace_weights
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.models import named_tensors

CACHE_BYTES = 4 << 30
"""Most bytes of the key-value cache; it grows as needed up to here."""
ROWS = 64
"""A deterministic forward pass has the number of slots rounded up to a multiple of this, whatever the work."""
FINE = 0.01
"""Most padding of dense prefill."""


class EmbeddedEngine:
    """Samples from `module`, whose weights belong to the engine from now on.

    Args:
        slots: sequences that speak at once.
        context: most tokens of a sequence, prompt included.
        deterministic: fixed matrix shapes, so that a request's bits do not depend on what runs beside it.
        cache_bytes: upper bound of the key-value cache.
        fused: run the decoder in fewer calls; None: wherever it can be.

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
        self._version = 0
        self._counters = Counters(slots)
        self._loading = 0
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

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> Said:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. Cancelling it frees its slot and blocks."""
        request = self._request(np.ascontiguousarray(ids, np.int32), sampling, place)
        self._wake()
        self._scheduler.submit(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._scheduler.cancel(request)
            raise

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version` once nothing is in flight; what is queued will be said under them.

        All names and shapes are checked before the first tensor is copied. Every cached block is dropped. Returns the
        fingerprint of what is now being served.
        """
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only increase")
        self._loading += 1
        try:
            if self._scheduler.busy:
                self._wake()
                drained = asyncio.get_running_loop().create_future()
                self._drained.append(drained)
                await drained
            if version <= self._version:
                raise EngineError(f"weights of version {version} after version {self._version}: versions only increase")
            self._scheduler.drop_prompts()
            replace_weights(self._module, tensors)
            self._version = version
        finally:
            self._loading -= 1
            self._wake()
        return fingerprint(named_tensors(self._module))

    def gauges(self) -> Gauges:
        """Counters since the last call; names and meaning in `counters.Counters`."""
        return self._counters.take(self._scheduler)

    @property
    def blocks_in_use(self) -> int:
        """Cache blocks that belong to a slot or a prompt."""
        return self._scheduler.blocks.in_use

    def _request(self, ids: np.ndarray, sampling: Sampling, place: int) -> Request:
        vocabulary = self._read_out.weight.shape[0]
        if ids.ndim != 1 or len(ids) == 0:
            raise DataError(f"a prompt is a non-empty list of token ids, got shape {ids.shape}: check the task and its chat template")
        if len(ids) >= self._context:
            raise DataError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self._context}: shorten one or raise the other")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise DataError(f"prompt ids span {ids.min()}..{ids.max()}, the model has 0..{vocabulary - 1}: use its own tokenizer")
        if sampling.stop_ids is None:
            raise EngineError("sampling.stop_ids is not resolved: call sampling.resolve(stop_ids) once at load, or set stop_ids=()")
        room = self._context - len(ids)
        limit = min(sampling.max_tokens, room)
        end = Stop.LENGTH if sampling.max_tokens <= room else Stop.CONTEXT
        request = Request(ids, sampling, place, limit, end, asyncio.get_running_loop().create_future())
        if request.own_blocks + blocks_for(len(ids)) > self._most:
            raise EngineError(
                f"a sequence of {len(ids) + limit} tokens does not fit the key-value cache of {self._most * BLOCK} tokens: "
                "raise cache_bytes, or lower the context or max_tokens"
            )
        return request

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
        while self._scheduler.busy or (self._scheduler.queue and not self._loading):
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
        return Scheduler(self._slots, self._context, blocks, self._grow, self._rows)

    def _grow(self, blocks: int) -> None:
        with torch.inference_mode():
            self._pool.grow(blocks)

    def _step(self) -> None:
        """One forward pass and one token in every slot that speaks."""
        scheduler = self._scheduler
        if not self._loading:
            scheduler.admit()
        plan = scheduler.plan()
        with torch.inference_mode():
            rows = [self._forward(plan)[: len(plan.speaking)]] if len(plan.ids) else []
            beginning = scheduler.begin()
            if scheduler.copies:
                self._pool.copy(*(np.concatenate(x) for x in zip(*scheduler.copies, strict=True)))
                scheduler.copies = []
            at = np.append(plan.speaking, np.array([s for s, _ in beginning], np.int64))
            self._counters.step(plan, len(at))
            if not len(at):
                return
            if beginning:
                rows.append(torch.stack([h for _, h in beginning]))
            hidden = rows[0] if len(rows) == 1 else torch.cat(rows)
            uniform = scheduler.slots.uniforms[at, scheduler.slots.said[at]]
            drawn = draw(self._logits(hidden), scheduler.slots.contracts.at(at), uniform)
        for s, stopped in zip(*(x.tolist() for x in scheduler.slots.say(at, drawn)), strict=True):
            self._deliver(s, stopped)

    def _forward(self, plan: Plan) -> Tensor:
        """Hidden states [N, H] of a plan's positions, whose keys and values are cached on the way."""
        dense = PackedLayout(plan.dense, waste=FINE) if plan.dense else None
        layout = CachedLayout(self._pool, plan.rows, plan.visible, plan.lengths, dense)
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
        said = self._scheduler.slots.turn(s, stopped, self._version)
        self._scheduler.free(s)
        if not request.future.done():
            self._counters.said(len(said.ids))
            request.future.set_result(said)
