"""vLLM over HTTP: `core.ports.Sampler` over a server that `launch` started, for the run or by somebody else.

Tokens are sent and received over vLLM's token route. Weights are sent as safetensors files in a folder that both sides
can read, with vLLM's own update routes. A request that fails is sent again with the same seed, so the answer is the
same. If all tries fail, an `EndpointError` names the role, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.vllm.adapter_load import HotLoad, rank_for
from posttrain.engine.vllm.sampler_requests import ReadBack, UpdateGate, VLLMSampler, check_request, newer
from posttrain.engine.vllm.sampling_parameters import SCORE, Answer, fields, said
from posttrain.engine.vllm.start_vllm import capabilities_of
from posttrain.engine.vllm.worker_parts import StagedTensors, written_in
from posttrain.system.errors import ConfigError, EndpointError, EngineError
from posttrain.verifier.http_client import Endpoint

ROLE = "rollout"
START_ADVICE = (
    "start it with `python -m posttrain.engine.vllm.launch --model MODEL --dtype DTYPE --max-model-len CONTEXT`, and"
    " for model.lora with `--enable-lora --max-lora-rank RANK`, for engine.workers=N with `--tensor-parallel-size N`"
    " (docs/guides/engines.md)"
)
EMPTY_TRIES = 100
"""Most tries to empty the prefix cache, a tenth of a second apart: blocks are freed a step after their request ends."""
TokenCallback = Callable[[np.ndarray, np.ndarray], None]


class VLLMServer(VLLMSampler):
    """Samples from a copy of `policy` in a vLLM server. It generates nothing before the first `load`.

    Args:
        share: folder for weights during an update. This process and the server see it under the same path.
        timeout: seconds that one try of a turn, or one part of an update, may take. A turn is tried again a few times.
        ended: returns why this engine can never answer again; '' while it can, and always of a server that the run did
            not start.
        inflight: running turns go on under new weights (`VLLM.update`).
    """

    def __init__(
        self,
        policy: Policy,
        endpoint: Endpoint,
        *,
        share: Path,
        timeout: float = 600.0,
        ended: Callable[[], str] = lambda: "",
        inflight: bool = False,
        workers: int = 1,
    ) -> None:
        super().__init__(policy, replace(capabilities_of(policy), sequences=False), workers, inflight)
        self._hot = HotLoad.of(policy)  # None where all weights train
        self._adapter: str | None = None
        """Name under which the server holds the adapter."""
        self._dtype = str(policy.dtype).removeprefix("torch.")
        self._endpoint, self._share = endpoint, share
        self.ended = ended
        self._patience = replace(endpoint.patience, answer=timeout)
        self._name = uuid4().hex
        """A part of the names of its files, because others may write into the same folder."""
        self._gate = UpdateGate()
        self._checked = False

    async def generate(
        self, ids: np.ndarray, sampling: Sampling, place: int, *, heard: TokenCallback | None = None
    ) -> SampledTurn:
        """Continue int32 [T] `ids` by one turn; see `core.ports.Sampler`. Cancelling the call closes the connection,
        and the server then aborts the request.

        heard: called once, with the whole turn, when it has ended.
        """
        request = check_request(ids, sampling, place, self._capabilities)
        # The gate knows of this run's turns only. Another program that asks the same server is not held back.
        async with self._gate.turn(stays=self.inflight):
            if self.version == self._empty:
                raise EngineError(f"{ROLE} ({self._endpoint.url}) was sent no weights yet: push them first (Sync.push)")
            begun = time.perf_counter()
            reply = await self._generate(
                request.ids, fields(request.sampling, request.place, request.limit, self._capabilities)
            )
            self._counters.spent("engine/turn", begun)
        try:
            choice = reply["choices"][0]
            rows = [_row(entry) for entry in choice["logprobs"]["content"]]
            spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
            answer = Answer(choice["token_ids"], rows, choice["finish_reason"], choice["stop_reason"], spans)
            cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._broken(f"its answer lacks {error}: is it vLLM 0.32 or newer?") from error
        result = said(answer, request.sampling, request.limit, request.end, self._capabilities)
        self._counters.delivered(result, request.ids, cached)
        if heard is not None:
            heard(result.ids, result.logp)
        return result

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`."""
        token_ids = [int(i) for i in ids]
        async with self._gate.turn():
            reply = await self._generate(token_ids, SCORE)
        try:
            rows = zip(token_ids[1:], reply["prompt_logprobs"][1:], strict=True)
            return np.array([row[str(i)]["logprob"] for i, row in rows], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"its log-probs of a prompt cannot be read ({error!r})") from error

    async def _generate(self, ids: list[int], parameters: Mapping[str, Any]) -> Any:
        """The server's answer to these tokens, by the adapter where there is one."""
        body = {"token_ids": ids, "cache_salt": self._salt(), "sampling_params": parameters, **self._model()}
        return await self._post("/inference/v1/generate", body, again=True)

    def _model(self) -> dict[str, str]:
        """The part of a request that names the adapter; without one the server answers by its base model."""
        return {} if self._adapter is None else {"model": self._adapter}

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version` once this run's running turns have ended, or, with `inflight`, while they
        stand still. Returns the fingerprint of what the server's layers then multiply with. Names and shapes are
        checked before anything is sent."""
        newer(version, self.version)
        name, hot, checked = f"posttrain-{self._name}-{version}", self._hot, self._expected.checked(tensors)
        staged = StagedTensors(self._share, name)
        try:
            # Whole tensors are written before the gate closes: this takes long, and turns go on. An adapter is small.
            if hot is None:
                staged.write(checked)
                update = partial(self._send, staged, version)
            else:
                update = partial(self._load_adapter, hot, name, version, list(checked))
            await self._check_server()
            async with self._gate.update():
                # Again, because another update may have come first while this one waited.
                newer(version, self.version)
                begun = time.perf_counter()
                try:
                    served = await (self._paused(update) if self.inflight else update())
                # Also where the call is cancelled: the server may hold a part of the new weights, and nothing is asked
                # of it until a push has gone through.
                except BaseException:
                    self.version = self._empty
                    raise
                self.version = version
                self._counters.spent("engine/load", begun)
        finally:
            staged.remove()
        return served

    async def _paused(self, update: Callable[[], Awaitable[str]]) -> str:
        """Update while the server's running turns stand still. Afterwards they compute their keys and values again."""
        await self._post("/pause?mode=keep", None)
        try:
            return await update()
        finally:
            await self._post("/resume", None)

    async def _send(self, staged: StagedTensors, version: int) -> str:
        """Have the server read whole tensors from files, one after another."""
        for number, path in enumerate(staged.files):
            if not number:
                await self._post("/start_weight_update", None)
            await self._post("/update_weights", {"update_info": {"path": str(path.resolve())}})
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        self._counters.pushed(staged.bytes)
        return staged.fingerprint_served(await self._emptied_and_read_back(self._expected.wanted()))

    async def _emptied_and_read_back(self, wanted: ReadBack) -> list[dict[str, Any]]:
        """Empty the cache, then return what each worker answers about the tensors that it computes with."""
        await self._empty_cache()
        answers = await self._call("posttrain_digests", json.dumps(wanted))
        for error in [answer["error"] for answer in answers if "error" in answer]:
            raise self._broken(error)
        return answers

    async def _load_adapter(self, hot: HotLoad, name: str, version: int, given: list[tuple[str, Any]]) -> str:
        """Load the files of an adapter in the place of the last one.

        The adapter's name is new, because it is part of the keys of the prefix cache. The server keeps one adapter, so
        the last one is unloaded.
        """
        path, last = self._share / name, self._adapter
        try:
            with written_in(self._share):
                self._counters.pushed(await asyncio.to_thread(hot.write, path, given))
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())}, plain=True)
        finally:
            # The server has read the files when it answers.
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self._adapter = name
        if last is not None:
            await self._post("/v1/unload_lora_adapter", {"lora_name": last}, plain=True)
        await self._post("/update_weight_version", {"new_version": str(version)})
        return hot.confirm(await self._emptied_and_read_back(hot.wanted()), given)

    async def _empty_cache(self) -> None:
        """Empty the server's prefix cache. With `inflight` running turns compute their keys and values again."""
        path = f"/reset_prefix_cache?reset_running_requests={str(self.inflight).lower()}"
        for _ in range(EMPTY_TRIES):
            if (await self._post(path, None, again=True))["success"]:
                return
            await asyncio.sleep(0.1)
        raise self._broken("its prefix cache could not be emptied after an update; does anybody else ask it?")

    async def _check_server(self) -> None:
        """ConfigError where the server's settings do not fit the log-prob contract and the policy; checked once."""
        if self._checked:
            return
        # `of_all=False`: the number of workers is one of the facts, so a wrong one is reported with the other facts.
        facts = (await self._call("posttrain_facts", of_all=False))[0]
        wanted = {
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "max_logprobs": -1,
            "workers": self._workers,
            "tensor_parallel": self._workers,
            "dtype": self._dtype,
            "max_model_len": self._capabilities.context,
            "vocabulary": self._capabilities.vocabulary,
        }
        if self._hot is not None:
            rank = rank_for(self._hot.lora)
            # A server of somebody else may have more room than this adapter needs, but not less.
            wanted |= {"max_loras": 1, "max_lora_rank": max(rank, facts.get("max_lora_rank") or 0)}
        if wrong := [f"{k}={facts.get(k)!r} instead of {v!r}" for k, v in wanted.items() if facts.get(k) != v]:
            raise ConfigError(
                f"engine.url={self._endpoint.url}: this server cannot be trained against: {', '.join(wrong)};"
                f" {START_ADVICE}"
            )
        if self._hot is not None:
            places = await self._call("posttrain_places", json.dumps(list(self._hot.shapes)))
            self._hot.refuse(places[0]["missing"])
        self._checked = True

    async def _call(self, method: str, *args: str, of_all: bool = True) -> list[dict[str, Any]]:
        """Call a method of `vllm_worker.ServedWeights` on the server's workers; returns their answers. `of_all`: there
        must be `engine.workers` of them, else at least one."""
        try:
            reply = await self._post(
                "/collective_rpc", {"method": method, "args": list(args), "timeout": self._patience.answer}, again=True
            )
        except EndpointError as error:
            if error.status in (403, 404, 405, 501):
                raise ConfigError(
                    f"engine.url={self._endpoint.url}: this server has no remote calls; {START_ADVICE}"
                ) from error
            raise
        results = (reply or {}).get("results") or []
        enough = len(results) == self._workers if of_all else bool(results)
        if not enough or not all(isinstance(result, dict) for result in results):
            raise self._broken(
                f"{method} was answered by {len(results)} workers, and engine.workers={self._workers}; {START_ADVICE}"
            )
        return results

    async def _post(
        self, path: str, body: Mapping[str, Any] | None, *, again: bool = False, plain: bool = False
    ) -> Any:
        """POST to a route of the server; see `Endpoint.post`. With `again` a request that fails is tried again."""
        # Only what may be done twice is sent again, such as a turn with its seed; an update that was half received not.
        patience = self._patience if again else replace(self._patience, tries=1)
        try:
            return await self._endpoint.post(path, body, again=again, patience=patience, plain=plain)
        except EndpointError as error:
            if why := self.ended():
                raise EndpointError(
                    f"{ROLE} ({self._endpoint.url}): the vLLM server of this run: {why}", ROLE, None
                ) from error
            raise

    def _broken(self, why: str) -> EndpointError:
        return EndpointError(f"{ROLE} ({self._endpoint.url}): {why}", ROLE, None)

    @property
    def busy(self) -> bool:
        return self._gate.turns > 0


def _row(entry: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """(ids, log-probs) of one token, the said one first."""
    tokens = [entry, *(t for t in entry["top_logprobs"] if t["token_id"] != entry["token_id"])]
    return [t["token_id"] for t in tokens], [t["logprob"] for t in tokens]
