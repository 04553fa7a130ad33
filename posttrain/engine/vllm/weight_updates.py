"""New weights for vLLM in this process, while no step runs: whole tensors, or the files of an adapter."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.vllm.adapter_load import HotLoad
from posttrain.engine.vllm.sampler_requests import ClientCounters, ExpectedTensors
from posttrain.engine.vllm.start_vllm import memory_folder
from posttrain.engine.vllm.worker_parts import buckets, fingerprint_served
from posttrain.system.errors import EngineError


class WeightUpdates:
    """Loads weights into an engine, and reads back what it then computes with. EngineError where vLLM has no place for
    the adapter on some layer.

    Args:
        expected: the whole weights that the engine should serve.
        hot: what is needed to serve an adapter; None where all weights train.
        workers: processes among which the model is cut; 1: it is in this process.
    """

    def __init__(
        self, engine: Any, expected: ExpectedTensors, hot: HotLoad | None, counters: ClientCounters, workers: int = 1
    ) -> None:
        self._engine, self._expected, self._hot, self._counters = engine, expected, hot, counters
        self._workers = workers
        self.adapter: Any = None
        """The object that a request names so that the adapter is used; None: there is no adapter."""
        if hot is not None:
            # The worker answers which of the adapter's tensors vLLM has no layer for.
            hot.refuse(self._ask("posttrain_places", list(hot.shapes))[0]["missing"])

    def load(self, version: int, tensors: list[tuple[str, Tensor]], *, running: bool = False) -> str:
        """Serve these tensors as `version`; returns the fingerprint of what is then served.

        Where all weights train and other ones are served than were sent, it is a text that equals no fingerprint, and
        the learner's side refuses it.

        Args:
            running: whether turns are under way. They stand still meanwhile, and then compute their keys and values
                again.

        Raises:
            EngineError: an adapter is served with other numbers than were sent (`HotLoad.confirm`).
        """
        engine, hot = self._engine, self._hot
        if hot is None:
            engine.collective_rpc("start_weight_update")
            if self._workers == 1:
                engine.collective_rpc("update_weights", kwargs={"update_info": {"tensors": tensors}})
            else:
                self._send_files(tensors)
            engine.collective_rpc("finish_weight_update")
            self._counters.pushed(sum(t.nbytes for _, t in tensors))
        else:
            self._load_adapter(version, hot, tensors)
        # First the cache: no key or value of the old weights is left when tokens count as those of the new version.
        # Last the weights are read back, so they are what the next step computes with.
        if not engine.reset_prefix_cache(reset_running_requests=running):
            raise EngineError("its prefix cache could not be emptied")
        engine.set_weight_version(str(version))
        answers = self._ask("posttrain_digests", (hot or self._expected).wanted())
        if hot is not None:
            return hot.confirm(answers, tensors)
        return fingerprint_served(answers, dict(tensors).get, lambda: fingerprints(tensors))

    def _send_files(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Files in memory, one bucket at a time: each worker maps them and takes its own part of every tensor."""
        with tempfile.TemporaryDirectory(prefix="posttrain-weights-", dir=memory_folder()) as folder:
            for number, bucket in enumerate(buckets(tensors)):
                path = Path(folder) / f"{number}.safetensors"
                save_file(bucket, path)
                self._engine.collective_rpc("update_weights", kwargs={"update_info": {"path": str(path)}})
                path.unlink()  # all workers have read it: one bucket is in memory at a time

    def _load_adapter(self, version: int, hot: HotLoad, tensors: list[tuple[str, Tensor]]) -> None:
        """Load the adapter in the place of the last one. Its name and path are new, as the cache's keys have both."""
        from vllm.lora.request import LoRARequest

        last = self.adapter
        number = 1 if last is None else last.lora_int_id + 1
        with tempfile.TemporaryDirectory(prefix="posttrain-adapter-", dir=memory_folder()) as folder:
            path = Path(folder) / "adapter"
            self._counters.pushed(hot.write(path, tensors))
            self.adapter = LoRARequest(f"version {version}", number, str(path))
            if not self._engine.add_lora(self.adapter):
                raise EngineError("it did not take the adapter")
        if last is not None:
            self._engine.remove_lora(last.lora_int_id)
        # The engine is asked which adapters it holds, because it may keep some in a cache of its own.
        if (adapters := set(self._engine.list_loras())) != {number}:
            raise EngineError(f"it holds the adapters {sorted(adapters)}, and should hold number {number} alone")

    def _ask(self, method: str, argument: Any) -> list[dict[str, Any]]:
        """Returns the answers of a method of `vllm_worker.ServedWeights`, one of each worker."""
        answers = self._engine.collective_rpc(method, args=(json.dumps(argument),))
        for answer in answers:
            if "error" in answer:
                raise EngineError(answer["error"])
        return answers
