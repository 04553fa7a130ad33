"""The embedded engine: `core.ports.Sampler` over a Hugging Face module it owns, in the running event loop.

It steps (`step.Stepper`) while there is work. Between steps the loop runs, so finished episodes ask for their next turn
before the next admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from posttrain.core.engines import KernelChoice
from posttrain.core.errors import EngineError
from posttrain.core.gauge import Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import Said
from posttrain.engine.embedded.admission import Admission
from posttrain.engine.embedded.blocks import BLOCK, Blocks, blocks_for
from posttrain.engine.embedded.cached_model import CachedModel
from posttrain.engine.embedded.counters import EngineCounters
from posttrain.engine.embedded.plan import BUDGET
from posttrain.engine.embedded.scheduler import Scheduler
from posttrain.engine.embedded.slots import GenerateCall, TokenCallback
from posttrain.engine.embedded.speculate import Draft, DraftModel, Lookup, PromptLookup, Proposer
from posttrain.engine.embedded.stepper import Stepper
from posttrain.engine.embedded.stopping import Text
from posttrain.engine.embedded.timeline import Timeline
from posttrain.engine.embedded.weights import replace_weights
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.kernels import TABLE
from posttrain.engine.models import named_tensors

CACHE_BYTES = 4 << 30
"""Most bytes of the key-value cache; it grows as needed up to here."""
ROWS = 64
"""A deterministic forward pass has the number of slots rounded up to a multiple of this, whatever the work."""
Update = Literal["drain", "inflight", "stale"]


class EmbeddedEngine:
    """Samples from `module`, whose weights belong to the engine from now on.

    Args:
        slots: sequences that speak at once.
        context: most tokens of a sequence, prompt included.
        deterministic: fixed matrix shapes, so that a request's bits do not depend on what runs beside it.
        cache_bytes: upper bound of the key-value cache.
        budget: most positions of a forward pass; speaking slots come first, pieces of prompts fill it up.
        retain: tokens of ended sequences kept in the cache for later turns; None: half of what all slots could hold at
            most, and an eighth of the cache.
        update: what new weights do to sequences being said. drain: they end first. inflight: they go on under the new
            weights, with their cache computed again. stale: they go on over keys and values of the old weights, and the
            gap is a gauge.
        timeline: record when each request was queued, admitted and done (`EmbeddedEngine.timeline`).
        kernels: by which code it computes (`Model.kernels`).
        text: reads token ids, special tokens included; without it contracts with stop strings are refused.
        speculate: draft several tokens a pass (see `speculate`); None: one token a pass.

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
        kernels: KernelChoice = "auto",
        budget: int = BUDGET,
        retain: int | None = None,
        update: Update = "drain",
        timeline: bool = False,
        text: Text | None = None,
        speculate: Lookup | Draft | None = None,
    ) -> None:
        if slots < 1 or context < 2:
            raise EngineError(
                f"slots={slots}, context={context}: an engine needs at least one slot and room for a prompt and a token"
            )
        self._rows = -(-slots // ROWS) * ROWS if deterministic else None
        self._served = CachedModel(module, context, device=device, rows=self._rows, kernels=kernels)
        self._module, self._pool = self._served.module, self._served.pool
        self._context, self._slots = context, slots
        self._most = cache_bytes // (BLOCK * self._pool.row_bytes)
        if self._most < 2:
            raise EngineError(
                f"cache_bytes={cache_bytes} holds no two blocks of {BLOCK * self._pool.row_bytes} bytes: raise it"
            )
        if budget < 1:
            raise EngineError(f"budget={budget}: a forward pass needs at least one position")
        self._budget, self._update = budget, update
        held = min(slots * blocks_for(context) // 2, self._most // 8)
        self._retain = held if retain is None else blocks_for(retain)
        self._admission = Admission(context, self._served.vocabulary, self._most, text)
        self._version = 0
        self._counters = EngineCounters(slots)
        self._proposer = self._proposes(speculate, device)
        self._stepper = Stepper(
            self._served, self._fresh(), self._counters, self._proposer, Timeline() if timeline else None
        )
        self._loading = 0
        self._paused = False
        self._drained: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def _scheduler(self) -> Scheduler:
        return self._stepper.scheduler

    @property
    def timeline(self) -> Timeline | None:
        """When each request was queued, admitted and done, where the engine was built to record it."""
        return self._stepper.timeline

    @property
    def fused(self) -> bool:
        """Whether the decoder runs in fewer calls."""
        return self._served.fused

    def describe(self) -> str:
        """What a run says of its engine at its start: by which code it computes, and why not by the faster one."""
        pool = self._pool
        if pool.kernel.form == "compiled":
            return "engine: embedded, compiled kernels"
        fastest = TABLE[pool.kernel.operation][0]
        why = fastest.unfit(pool.device, pool.dtype) if pool.kernels == "auto" else f"model.kernels={pool.kernels}"
        return f"engine: embedded, torch's operations ({why})"

    @property
    def version(self) -> int:
        """Version of the weights that would say the next token; 0 for those it was built with."""
        return self._version

    @property
    def keeps_sets(self) -> bool:
        return True

    @property
    def draws_by_place(self) -> bool:
        """Not where a draft model's tokens are accepted and replaced with numbers of their own."""
        return not isinstance(self._proposer, DraftModel)

    @property
    def context(self) -> int:
        return self._context

    async def generate(
        self, ids: np.ndarray, sampling: Sampling, place: int, *, heard: TokenCallback | None = None
    ) -> Said:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. Cancelling it frees its slot and blocks.

        heard: called with the new ids and log-probs as soon as they are said.
        """
        request = self._admission.request(ids, sampling, place, heard)
        self._wake()
        self._scheduler.submit(request)
        self._mark(request, "queued")
        try:
            said = await request.future
        except asyncio.CancelledError:
            self._scheduler.cancel(request)
            self._resolve_drained()
            self._mark(request, None)
            raise
        self._counters.said(len(said.ids))
        return said

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`; T at most the context."""
        return self._served.score(self._admission.ids(ids))

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version`; what is being said meanwhile ends first or goes on, as `update` says.

        All names and shapes are checked before the first tensor is copied. No cached block is found again. Returns the
        fingerprint of what is now being served.
        """
        self._newer(version)
        self._loading += 1
        try:
            if self._update == "drain" and self._scheduler.unfinished:
                if self._paused:
                    raise EngineError(
                        "new weights wait for the sequences being said, and the engine is paused: resume() it first"
                    )
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
        """Counters since the last call; names and meaning in `counters.EngineCounters`."""
        return self._counters.take(self._scheduler)

    def clock(self) -> dict[str, float]:
        """Seconds since the last call; names in `counters.EngineCounters.clock`."""
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
            self._counters.stale += self._served.stale_gap(self._scheduler.slots, self._scheduler.make_room())

    def _proposes(self, speculate: Lookup | Draft | None, device: str) -> Proposer | None:
        if speculate is None:
            return None
        if self._rows is not None:
            raise EngineError(
                "deterministic=true computes fixed shapes, and speculation computes as many drafts as there are."
                " Choose one"
            )
        if isinstance(speculate, Lookup):
            return PromptLookup(speculate)
        return DraftModel(speculate, self._context, self._served.vocabulary, self._slots, device, self._served.kernels)

    def _mark(self, request: GenerateCall, phase: str | None) -> None:
        if self.timeline is not None:
            self.timeline.phase(request, phase)

    def _wake(self) -> None:
        """Make sure that a task of the running loop steps while there is work."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if (
                self._loop is not None
                and not self._loop.is_closed()
                and (self._scheduler.busy or self._scheduler.queue)
            ):
                raise EngineError("this engine is at work in another event loop: use one engine per loop, or one loop")
            if self._scheduler.busy or self._scheduler.queue:
                self._stepper.scheduler = self._fresh()
            self._loop, self._task, self._drained = loop, None, []
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Step until there is nothing to do, letting the loop run between steps."""
        await asyncio.sleep(0)
        while not self._paused and (self._scheduler.unfinished or (self._scheduler.queue and not self._loading)):
            try:
                self._stepper.step(self._version, admit=not self._loading)
            except Exception as error:
                self._fail(error)
            except BaseException as error:
                self._fail(EngineError(f"the engine was interrupted ({type(error).__name__})"))
                raise
            self._resolve_drained()
            await asyncio.sleep(0)

    def _resolve_drained(self) -> None:
        """Let new weights come once nothing is being said. The last turn may end in a step, or by being cancelled
        between two."""
        if not self._scheduler.unfinished:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained = []

    def _fail(self, error: Exception) -> None:
        """Hand an error to everyone who waits, and start over with an empty cache."""
        waiting = [r for r in (*self._scheduler.slots.request, *self._scheduler.queue) if r is not None]
        self._stepper.scheduler = self._fresh()
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
            lanes=self._served.lanes,
        )
        scheduler.slots.strings.text = self._admission.text
        return scheduler

    def _grow(self, blocks: int) -> None:
        with torch.inference_mode():
            self._pool.grow(blocks)
            if isinstance(self._proposer, DraftModel):
                self._proposer.served.pool.grow(blocks)
