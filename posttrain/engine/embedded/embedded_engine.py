"""The embedded engine: `core.ports.Sampler` over a Hugging Face module that it owns, in the running event loop.

It runs steps (`engine_step.Stepper`) while there is work. The event loop runs between steps, so an episode can ask for
its next turn before the next admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.core.gauge import Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.embedded.cache.cache_blocks import BLOCK, Blocks, blocks_for
from posttrain.engine.embedded.cache.forward_plan import BUDGET
from posttrain.engine.embedded.cache.recurrent_recompute import RecomputedModel
from posttrain.engine.embedded.engine_step import Stepper
from posttrain.engine.embedded.exact_replay import fixed_rows
from posttrain.engine.embedded.policy_mixture import MixedModel, Mixture, served_model
from posttrain.engine.embedded.schedule.admission import Admission
from posttrain.engine.embedded.schedule.engine_counters import EngineCounters
from posttrain.engine.embedded.schedule.scheduler import Scheduler
from posttrain.engine.embedded.schedule.slots import TokenCallback
from posttrain.engine.embedded.schedule.stop_strings import Text
from posttrain.engine.embedded.schedule.timeline import Timeline
from posttrain.engine.embedded.speculation import Draft, DraftModel, Lookup, PromptLookup, Proposer
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.head.kernel_table import TABLE
from posttrain.engine.model.policy_model import named_tensors
from posttrain.system.errors import EngineError

CACHE_BYTES = 4 << 30
"""Most bytes of the key-value cache. The cache grows up to this size when needed."""
SETTLED = 8
"""Rounds of the event loop that `idle` waits for, in which an episode whose turn has ended may ask for its next one."""
Update = Literal["drain", "inflight", "stale"]


class EmbeddedEngine:
    """Samples from `module`, and owns its weights from now on.

    Args:
        slots: sequences that are generated at once.
        context: most tokens of a sequence, prompt included.
        deterministic: use fixed matrix shapes, so that the bits of a turn do not depend on other requests.
        cache_bytes: upper bound of the key-value cache.
        budget: most positions of a forward pass. Generating slots come first; pieces of prompts take the rest.
        retain: tokens of ended sequences that the cache keeps for later turns; None: half of what all slots can hold,
            but at most an eighth of the cache.
        update: what happens to unfinished sequences when new weights come. drain: they end first. inflight: they
            continue under the new weights, and their cache is computed again. stale: they continue over keys and values
            of the old weights, and a gauge reports the difference.
        timeline: record when each request was queued, admitted and finished (`EmbeddedEngine.timeline`).
        kernels: the choice of kernels (`Model.kernels`).
        text: decodes token ids, special tokens included. Without it, contracts with stop strings are refused.
        speculate: draft several tokens per pass (module `speculation`); None: one token per pass.
        mixture: a second model; tokens are drawn from the mixture of the two (`policy_mixture`). None: from `module`.
        version: the version of the weights that the module holds.

    Raises:
        EngineError: the architecture keeps state outside of keys and values, or the sizes do not fit.
    """

    keeps_sets = True

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
        mixture: Mixture | None = None,
        version: int = 0,
    ) -> None:
        if slots < 1 or context < 2:
            raise EngineError(
                f"slots={slots}, context={context}: an engine needs at least one slot and room for a prompt and a token"
            )
        self._rows = fixed_rows(slots) if deterministic else None
        self._served = served_model(module, context, mixture, device=device, rows=self._rows, kernels=kernels)
        self._module, self._pool = self._served.module, self._served.pool
        self.context, self._slots = context, slots
        self._pools = (self._pool, *self._served.others)
        self._row_bytes = sum(pool.row_bytes for pool in self._pools)
        self._most_blocks = cache_bytes // (BLOCK * self._row_bytes)
        # One block for a sequence, and one for the copy of a last block that it shares (`Admission.request`).
        if self._most_blocks < 2:
            raise EngineError(
                f"cache_bytes={cache_bytes} holds no two blocks of {BLOCK * self._row_bytes} bytes: raise it"
            )
        if budget < 1:
            raise EngineError(f"budget={budget}: a forward pass needs at least one position")
        self._budget, self._update = budget, update
        kept_blocks = min(slots * blocks_for(context) // 2, self._most_blocks // 8)
        self._retain = kept_blocks if retain is None else blocks_for(retain)
        self._admission = Admission(context, self._served.vocabulary, self._most_blocks, text)
        self._version = version
        self._counters = EngineCounters(slots)
        proposer = self._make_proposer(speculate, device)
        # A draft model's cache has the same rows, so both grow and are freed together. `cache_bytes` does not bound it.
        if isinstance(proposer, DraftModel):
            self._pools += (proposer.served.pool,)
        self.draws_by_place = not isinstance(proposer, DraftModel)
        """False with a draft model: accepting and replacing its drafts uses random numbers of their own."""
        trace = Timeline() if timeline else None
        self._stepper = Stepper(
            self._served, self._new_scheduler(), self._counters, proposer, trace, others=self._pools[1:]
        )
        self._loading = 0
        """Calls of `load` that have not ended. No new turn is admitted meanwhile."""
        self._slept = 0
        """Blocks of the cache before the engine slept; 0: it is awake."""
        self._paused = False
        self._drained: list[asyncio.Future[None]] = []
        """One for each `load` that waits: set once no turn is unfinished."""
        # Runs the steps, in the loop that all waiting calls belong to. It ends where there is nothing to do, and
        # `_go_on` starts another one.
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def _scheduler(self) -> Scheduler:
        return self._stepper.scheduler

    @property
    def timeline(self) -> Timeline | None:
        """When each request was queued, admitted and finished; None where the engine does not record it."""
        return self._stepper.timeline

    @property
    def fused(self) -> bool:
        """True where the decoder is the fused one (`fused_decoder.FusedDecoder`)."""
        return self._served.fused

    def describe(self) -> str:
        """The line that a run prints about its engine: which kernels it uses, and why not the faster ones."""
        pool = self._pool
        if isinstance(self._served, RecomputedModel):
            return (
                "engine: embedded; the model keeps a recurrent state, so each token costs a pass over its whole"
                " sequence (engine=vllm is faster)"
            )
        if pool.kernel.form == "compiled":
            return "engine: embedded, compiled kernels" + ("" if self.fused else "; the decoder is the model's own")
        fastest = TABLE[pool.kernel.operation][0]
        why = fastest.unfit(pool.device, pool.dtype) if pool.kernels == "auto" else f"model.kernels={pool.kernels}"
        form = "the reference definitions" if pool.kernel.form == "reference" else "torch's operations"
        return f"engine: embedded, {form} ({why})"

    @property
    def version(self) -> int:
        """Version of the weights that the next token is drawn with: at first the argument `version`."""
        return self._version

    async def generate(
        self, ids: np.ndarray, sampling: Sampling, place: int, *, heard: TokenCallback | None = None
    ) -> SampledTurn:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. `heard` is called with the new ids and
        log-probs as soon as they are drawn. Cancelling the call frees its slot and blocks."""
        # The order matters. A refused request changes nothing. In another event loop `_go_on` replaces the scheduler,
        # and the request belongs to the new one. The cache has to be there before a step admits the request.
        request = self._admission.request(ids, sampling, place, heard)
        self._go_on()
        self.wake()
        self._scheduler.submit(request)
        self._stepper.mark(request, "queued")
        try:
            turn = await request.future
        # The cancelled turn may be the last one that `load` waits for.
        except asyncio.CancelledError:
            self._scheduler.cancel(request)
            self._resolve_drained()
            self._stepper.mark(request, None)
            raise
        self._counters.said(len(turn.ids))
        return turn

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`. T is at most the context."""
        return self._served.score(self._admission.ids(ids))

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version`, with an empty prefix cache; returns their fingerprint. All names and shapes
        are checked before the first is copied. Unfinished sequences end first or continue, depending on `update`."""
        self._check_newer(version)
        self._loading += 1
        try:
            if self._update == "drain" and self._scheduler.unfinished:
                if self._paused:
                    raise EngineError(
                        "new weights wait for the sequences being said, and the engine is paused: resume() it first"
                    )
                self._go_on()
                drained = asyncio.get_running_loop().create_future()
                self._drained.append(drained)
                await drained
            # Again, because another load may have come while this one waited.
            self._check_newer(version)
            self._served.load(tensors)
            self._renew(version)
        finally:
            # New requests were not admitted meanwhile, and no step may be running that would take them now.
            self._loading -= 1
            self._go_on()
        return fingerprint(named_tensors(self._module))

    async def idle(self) -> None:
        """Wait until no turn can be said: each episode has ended, or waits for something else."""
        # With an ended task not all is said: an episode may ask for its next turn some rounds of the event loop later.
        quiet = 0
        while quiet < SETTLED:
            if self._task is None or self._task.done() or self._paused:
                quiet += 1
                await asyncio.sleep(0)
            else:
                quiet = 0
                await asyncio.wait([self._task])

    def forget(self) -> None:
        """Empty the prefix cache. Turns that are being said keep what they hold."""
        self._scheduler.tree.renew(self._version)

    def sleep(self) -> None:
        """Free the memory of the key-value cache. The next turn wakes the engine. EngineError: a turn has not ended."""
        scheduler, begun = self._scheduler, time.perf_counter()
        if scheduler.busy or any(not r.gone for r in scheduler.queue):
            raise EngineError("the engine cannot sleep before every turn has ended: wait for idle() first")
        if not self._pool.rows:
            return
        # From the owners down: the tree gives its blocks up, then no block has an owner, then the rows can go.
        freed = sum(pool.rows * pool.row_bytes for pool in self._pools)
        self._slept = scheduler.blocks.capacity
        scheduler.tree.renew(self._version)
        scheduler.blocks.clear()
        for pool in self._pools:
            pool.release()
        self._counters.spent("engine/freed", freed)
        self._counters.spent("engine/sleep", time.perf_counter() - begun)

    def wake(self) -> None:
        """Make the cache anew, at the size that it had before the engine slept. An engine that is awake stays so."""
        if self._slept:
            begun, blocks, self._slept = time.perf_counter(), self._slept, 0
            self._grow(blocks)
            self._scheduler.blocks.grow(blocks)
            self._counters.spent("engine/wake", time.perf_counter() - begun)

    def pause(self) -> None:
        """Draw no more tokens until `resume`. Turns keep their tokens, and new requests are queued."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self._loop is not None and self._loop.is_running():
            self._go_on()

    def gauges(self) -> Gauges:
        """Gauges since the last call; `schedule.engine_counters` lists their names and meaning."""
        return self._counters.take(self._scheduler)

    def clock(self) -> dict[str, float]:
        """Seconds since the last call; names in `engine_counters.EngineCounters.clock`."""
        return self._counters.clock()

    @property
    def blocks_in_use(self) -> int:
        """Cache blocks owned by a slot or a prompt."""
        return self._scheduler.blocks.in_use

    @property
    def cache_size(self) -> int:
        """Bytes of the key-value cache now, without that of a draft model."""
        return self._pool.rows * self._row_bytes

    def _check_newer(self, version: int) -> None:
        """EngineError where the version is not newer than the served one."""
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only increase")

    def _renew(self, version: int) -> None:
        """Prepare the scheduler for the weights that were just copied."""
        stale = self._update == "stale"
        self._scheduler.renew(version, stale=stale)
        self._version = version
        if stale:
            # The gap is measured by computing the pending tokens, whose keys and values need rows: so `make_room`.
            self._counters.stale += self._served.stale_gap(self._scheduler.slots, self._scheduler.make_room())

    def _make_proposer(self, speculate: Lookup | Draft | None, device: str) -> Proposer | None:
        """The proposer of drafts; None without speculation. EngineError where drafts do not fit the engine."""
        if speculate is None:
            return None
        if isinstance(self._served, MixedModel):
            raise EngineError("drafts are of one model, and this engine samples a mixture of two: leave speculate out")
        if isinstance(self._served, RecomputedModel):
            raise EngineError(
                f"{type(self._module).__name__} keeps a recurrent state and is computed again for every token, so"
                " drafts save nothing: set engine.lookup=0 engine.draft=none"
            )
        if self._rows is not None:
            raise EngineError(
                "deterministic=true computes fixed shapes, and speculation computes as many drafts as there are."
                " Choose one"
            )
        if isinstance(speculate, Lookup):
            return PromptLookup(speculate)
        return DraftModel(speculate, self.context, self._served.vocabulary, self._slots, device, self._served.kernels)

    def _go_on(self) -> None:
        """Start a task of the running loop that steps while there is work, unless one runs."""
        loop = asyncio.get_running_loop()
        # Turns of a loop that is closed can never be answered, and are dropped. Those of an open one can.
        if self._loop is not loop:
            at_work = self._scheduler.busy or bool(self._scheduler.queue)
            if at_work and self._loop is not None and not self._loop.is_closed():
                raise EngineError("this engine is at work in another event loop: use one engine per loop, or one loop")
            if at_work:
                self._stepper.scheduler = self._new_scheduler()
            self._loop, self._task, self._drained = loop, None, []
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Run steps until there is nothing to do. The event loop runs between steps."""
        # All siblings of a group submit before the first admission, so that they share one prompt.
        await asyncio.sleep(0)
        while not self._paused and (self._scheduler.unfinished or (self._scheduler.queue and not self._loading)):
            try:
                self._stepper.step(self._version, admit=not self._loading)
            except Exception as error:
                self._fail(error)
            # After an interrupt no step follows, and calls that wait for a turn would wait for ever.
            except BaseException as error:
                self._fail(EngineError(f"the engine was interrupted ({type(error).__name__})"))
                raise
            self._resolve_drained()
            await asyncio.sleep(0)

    def _resolve_drained(self) -> None:
        """Let `load` continue once no turn is unfinished: the last one ended in a step, or was cancelled."""
        if not self._scheduler.unfinished:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained = []

    def _fail(self, error: Exception) -> None:
        """Raise an error in every waiting call, and start again with an empty cache."""
        # What the failed step has left half done is unknown, so nothing of its state is kept, the cache included.
        waiting = [r for r in (*self._scheduler.slots.request, *self._scheduler.queue) if r is not None]
        self._stepper.scheduler = self._new_scheduler()
        for future in (*(r.future for r in waiting), *self._drained):
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
        self._drained = []

    def _new_scheduler(self) -> Scheduler:
        """A new scheduler without requests, over the blocks that the pool has."""
        blocks = Blocks(self._most_blocks)
        # The pool keeps its memory, and all its blocks are free for the new scheduler.
        if self._pool.rows:
            blocks.grow(self._pool.rows // BLOCK)
        scheduler = Scheduler(
            self._slots,
            self.context,
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
        """Make room for this many blocks in the cache, and in that of a draft model."""
        with torch.inference_mode():
            for pool in self._pools:
                pool.grow(blocks)
