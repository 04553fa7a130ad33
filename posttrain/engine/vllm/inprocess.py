"""vLLM in this process: `core.ports.Sampler` over a V1 engine that runs in a thread of its own.

The thread owns the engine. Requests, cancellations and weights are put into one queue and handled between steps, so
nothing changes during a step. When weights come, running turns end first and new ones wait. The prefix cache is then
emptied, and its keys get the new version as salt.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.vllm import installed
from posttrain.engine.vllm.adapter_load import HotLoad
from posttrain.engine.vllm.sampler_requests import CheckedRequest, VLLMSampler, check_request, newer
from posttrain.engine.vllm.sampling_parameters import SCORE, Answer, fields, said
from posttrain.engine.vllm.start_vllm import START, build, capabilities_of, quiet_compiler
from posttrain.engine.vllm.weight_updates import WeightUpdates
from posttrain.system.errors import EngineError

ROLE = "the rollout engine (vLLM in this process)"
POLL = 5.0
"""Seconds between two checks that the engine's thread still runs."""
TokenCallback = Callable[[np.ndarray, np.ndarray], None]


@dataclass(eq=False)
class _Turn:
    """One turn that was asked for and has not ended."""

    request: CheckedRequest
    future: Future[SampledTurn]
    heard: TokenCallback | None
    delivered: int = 0
    """Tokens that the callback `heard` has received."""


class VLLMEngine(VLLMSampler):
    """Samples from a copy of `policy` in vLLM. It generates nothing before the first `load`. ConfigError where vllm is
    not installed, EngineError where it does not start with this model.

    Args:
        policy: gives configuration, tokenizer, dtype and the names of the tensors. Its weights are sent with `load`.
        slots: sequences that are generated at once.
        cache_bytes: bytes of the key-value cache.
        eager: use no compilation and no captured graphs. The start takes seconds, and steps are slower.
        timeout: seconds that a step or an update may take before the engine counts as hung.
        inflight: running turns go on under new weights (`VLLM.update`).
        workers: processes that compute; 1: none, this one does.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        cache_bytes: int,
        eager: bool = False,
        timeout: float = 600.0,
        inflight: bool = False,
        workers: int = 1,
    ) -> None:
        installed()
        super().__init__(policy, capabilities_of(policy), workers, inflight)
        self._timeout = timeout
        self._asked: dict[str, _Turn] = {}
        """The turns that are in vLLM, by the id of their request."""
        self._scored: dict[str, Future[np.ndarray]] = {}
        self._request_numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[_Turn] = []
        """Turns that came while an update was pending."""
        self._updates: list[Callable[[], None]] = []
        """New weights that wait until they can be loaded, in their order."""
        self._last_activity = time.monotonic()
        self._failure: BaseException | None = None
        self._eager = eager
        self._thread = threading.Thread(
            target=self._run, args=(policy, slots, cache_bytes, started := Future()), name="vllm", daemon=True
        )
        self._thread.start()
        try:
            started.result(START)
        except TimeoutError:
            raise EngineError(f"{ROLE} did not start in {START:g} s") from None

    async def generate(
        self, ids: np.ndarray, sampling: Sampling, place: int, *, heard: TokenCallback | None = None
    ) -> SampledTurn:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. Cancelling the call aborts the request.
        `heard` is called in this event loop with the new ids and log-probs as soon as they are drawn."""
        # In the caller's loop, so that a wrong request raises there and does not reach the engine's thread.
        turn = _Turn(check_request(ids, sampling, place, self._capabilities), Future(), self._in_loop(heard))
        if self.version == self._empty:
            raise EngineError(f"{ROLE} was sent no weights yet: push them first (Sync.push)")
        self._send(lambda: self._add(turn))
        try:
            return await self._answer(turn.future, "a turn")
        except asyncio.CancelledError:
            # An engine that has failed has nothing to abort, and its error must not replace the cancellation.
            with suppress(EngineError):
                self._send(lambda: self._abort(turn))
            raise

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`."""
        future: Future[np.ndarray] = Future()
        self._send(lambda: self._score([int(i) for i in ids], future))
        return await self._answer(future, "scoring a canary")

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version` once all running turns have ended, or, with `inflight`, between two steps.
        Returns the fingerprint of what vLLM's layers then multiply with. Names and shapes are checked first."""
        newer(version, self.version)
        tensors_to_load = list(self._expected.checked(tensors))
        future: Future[str] = Future()
        # This only registers the update. `_run_once` carries it out when its time has come.
        self._send(lambda: self._updates.append(lambda: self._update(version, tensors_to_load, future)))
        return await self._answer(future, f"loading weights of version {version}")

    @property
    def busy(self) -> bool:
        return bool(self._asked or self._scored or self._waiting or not self._inbox.empty())

    def ended(self) -> str:
        """Returns the reason why this engine can never answer again; '' while it can, and where it could not load
        weights: that is raised, and a new engine would not load them either."""
        return "" if self._failure is None or self.version == self._empty else f"vLLM has failed: {self._failure}"

    def close(self) -> None:
        """End the thread and free vLLM's memory. Requests that have not ended fail."""
        self._inbox.put(None)
        self._thread.join(60)

    def _send(self, command: Callable[[], None]) -> None:
        """Put a command into the queue of the engine's thread. EngineError where the engine has failed."""
        if self._failure is not None:
            raise EngineError(f"{ROLE} has failed before: {self._failure}") from self._failure
        self._inbox.put(command)

    async def _answer(self, future: Future[Any], what: str) -> Any:
        """The future's result. EngineError where the engine's thread has failed, or no step ends within the timeout."""
        # Looked at again and again, since a thread that hangs or has died sets no future.
        in_loop = asyncio.wrap_future(future)
        begun = time.monotonic()
        while True:
            done, _ = await asyncio.wait([in_loop], timeout=min(self._timeout, POLL))
            if done:
                return in_loop.result()
            if self._failure is not None:
                raise EngineError(f"{ROLE}: {what}: it has failed: {self._failure}") from self._failure
            if time.monotonic() - max(self._last_activity, begun) > self._timeout:
                raise EngineError(
                    f"{ROLE}: {what}: no step has ended for {self._timeout:g} s; raise engine.timeout if the model is"
                    " that slow"
                )

    def _in_loop(self, heard: TokenCallback | None) -> TokenCallback | None:
        """The callback, to be called from the engine's thread: it then runs in this event loop."""
        if heard is None:
            return None
        loop = asyncio.get_running_loop()

        def later(ids: np.ndarray, logp: np.ndarray) -> None:
            loop.call_soon_threadsafe(heard, ids, logp)

        return later

    def _run(self, policy: Policy, slots: int, cache_bytes: int, started: Future[None]) -> None:
        """Build the engine, then handle the queue and run steps until the engine is closed."""
        try:
            self._engine = build(policy, slots, cache_bytes, self._eager, self._workers)
            self._weights = WeightUpdates(
                self._engine, self._expected, HotLoad.of(policy), self._counters, self._workers
            )
            # One request before any weights were pushed: a model that cannot compute fails here, not at a turn.
            self._score([0, 0], proof := Future())
            while not proof.done():
                self._step()
            proof.result()
        except BaseException as error:
            self._failure = error
            started.set_exception(EngineError(f"{ROLE} did not start with this model: {error}"))
            return
        started.set_result(None)
        try:
            while self._run_once():
                pass
            self._failure = EngineError("it was closed")
        except BaseException as error:
            self._failure = error
        finally:
            # Calls that still wait get the error first: ending vLLM may take long.
            self._fail_waiting()
            self._engine.engine_core.shutdown()
            del self._engine

    def _run_once(self) -> bool:
        """Handle the queued commands and run one step; False: the engine was closed."""
        # Without work the thread sleeps in `get`. With work it takes what is there and goes on. A pending update lets
        # the running turns end first (`_add` lets no new one in), or, with inflight, only the scores, whose log-probs
        # must be of one version.
        while not (self._asked or self._scored or self._updates) or not self._inbox.empty():
            command = self._inbox.get()
            self._last_activity = time.monotonic()
            if command is None:
                return False
            command()
        if self._updates and not self._scored and (self.inflight or not self._asked):
            self._updates.pop(0)()
        if not self._updates and self._waiting:
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                self._add(turn)
        if self._asked or self._scored:
            self._step()
        self._last_activity = time.monotonic()
        return True

    def _step(self) -> None:
        """Run one step of vLLM; deliver the turns and scores that have ended, and tokens that are listened to."""
        begun = time.perf_counter()
        with quiet_compiler(self._eager):
            outputs = self._engine.step()
        self._counters.spent("engine/step", begun)
        # One answer that cannot be read fails its own turn; others go on.
        for output in outputs:
            if output.finished and (scored := self._scored.pop(output.request_id, None)) is not None:
                self._deliver_score(scored, output)
            if (asked := self._asked.get(output.request_id)) is None:
                continue
            try:
                self._deliver(asked, output)
            except Exception as error:
                self._asked.pop(output.request_id, None)
                asked.future.set_exception(error)

    def _deliver(self, asked: _Turn, output: Any) -> None:
        """Deliver a request's new tokens, and its turn once it has ended."""
        completion = output.outputs[0]
        if asked.heard is not None and len(completion.token_ids) > asked.delivered:
            # Outputs are cumulative for turns that are listened to, so the callback gets what is new.
            rows = _rows(completion.logprobs)[asked.delivered :]
            asked.heard(
                np.array(completion.token_ids[asked.delivered :], np.int32),
                np.array([logp[0] for _, logp in rows], np.float32),
            )
            asked.delivered = len(completion.token_ids)
        if not output.finished:
            return
        del self._asked[output.request_id]
        request = asked.request
        spans = [(s.version, s.start, s.end) for s in completion.weight_versions or ()]
        answer = Answer(
            completion.token_ids, _rows(completion.logprobs), completion.finish_reason, completion.stop_reason, spans
        )
        result = said(answer, request.sampling, request.limit, request.end, self._capabilities)
        self._counters.delivered(result, request.ids, output.num_cached_tokens)
        asked.future.set_result(result)

    def _add(self, asked: _Turn) -> None:
        """Give a turn to vLLM. While an update is pending it waits."""
        if asked.future.cancelled():  # while the command was in the queue
            return
        if self._updates:
            self._waiting.append(asked)
            return
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        request, request_id = asked.request, str(next(self._request_numbers))
        try:
            params = SamplingParams(
                **fields(request.sampling, request.place, request.limit, self._capabilities),
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY if asked.heard is None else RequestOutputKind.CUMULATIVE,
            )
            if request.sampling.bad_ids:
                # vLLM takes bad words as texts only. The contract has ids, so its private field is set.
                params._bad_words_token_ids = [list(b) for b in request.sampling.bad_ids]
            self._submit(request_id, request.ids, params)
            self._asked[request_id] = asked
        except Exception as error:
            asked.future.set_exception(EngineError(f"{ROLE} refused a request: {error}"))

    def _submit(self, request_id: str, ids: list[int], params: Any) -> None:
        """Add a request to vLLM, with the salt of this version and the adapter."""
        from vllm.inputs import tokens_input

        self._engine.add_request(
            request_id, tokens_input(ids, cache_salt=self._salt()), params, lora_request=self._weights.adapter
        )

    def _abort(self, asked: _Turn) -> None:
        """Take a cancelled turn out of the waiting ones and out of vLLM."""
        if asked in self._waiting:
            self._waiting.remove(asked)
        for request_id in [n for n, a in self._asked.items() if a is asked]:
            del self._asked[request_id]
            self._engine.abort_request([request_id])

    def _score(self, ids: list[int], future: Future[np.ndarray]) -> None:
        """Ask vLLM for the log-probs of a prompt. It also draws one token, which nobody reads."""
        from vllm.sampling_params import SamplingParams

        request_id = f"score-{next(self._request_numbers)}"
        try:
            self._submit(request_id, ids, SamplingParams(**SCORE))
            self._scored[request_id] = future
        except Exception as error:
            future.set_exception(EngineError(f"{ROLE} cannot score: {error}"))

    def _deliver_score(self, future: Future[np.ndarray], output: Any) -> None:
        """Set the future to the log-probs of the prompt's tokens, the first one left out."""
        rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        future.set_result(np.array([row[i].logprob for i, row in rows], np.float32))

    def _update(self, version: int, tensors: list[tuple[str, torch.Tensor]], future: Future[str]) -> None:
        """Load new weights while no step runs. If it fails half way, the engine is not used again."""
        begun = time.perf_counter()
        try:
            newer(version, self.version)
        except EngineError as error:
            future.set_exception(error)
            return
        try:
            fingerprint = self._weights.load(version, tensors, running=bool(self._asked))
        except Exception as error:
            # Nobody knows which weights the layers hold, so nothing is generated with them: the error ends the thread.
            self.version = self._empty
            failure = EngineError(
                f"{ROLE}: loading weights of version {version} failed, and it may hold parts of them: {error}"
            )
            future.set_exception(failure)
            raise failure from error
        self.version = version
        self._counters.spent("engine/load", begun)
        future.set_result(fingerprint)

    def _fail_waiting(self) -> None:
        """Raise the engine's failure in every waiting call."""
        error = EngineError(f"{ROLE} has failed: {type(self._failure).__name__}: {self._failure}")
        for future in (*(a.future for a in (*self._asked.values(), *self._waiting)), *self._scored.values()):
            if not future.done():
                future.set_exception(error)
        self._asked.clear()
        self._scored.clear()
        self._waiting.clear()


def _rows(logprobs: Any) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probs) of each token, the said one first."""
    bounds = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [(logprobs.token_ids[a:b], logprobs.logprobs[a:b]) for a, b in bounds]
