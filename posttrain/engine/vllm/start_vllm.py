"""Starts vLLM in this process, and makes its arguments and files for a model, for a server too."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from posttrain.config.engines import VLLM
from posttrain.config.placement import Local, Placement
from posttrain.engine.head.readout import read_out
from posttrain.engine.model.policy_model import Policy, served_tensors
from posttrain.engine.model.tiny_models import generators_kept
from posttrain.engine.vllm.adapter_load import check_served, lora_arguments, write_base
from posttrain.engine.vllm.sampling_parameters import Capabilities
from posttrain.system.errors import ConfigError
from posttrain.system.machine import cores

EXTENSION = "posttrain.engine.vllm.vllm_worker.ServedWeights"
"""The extension of vLLM's workers. Importing it registers `BACKEND`."""
BACKEND = "posttrain"
"""Name of the weight transfer backend in vLLM's registry."""
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable of vLLM for CPU. Where it is not set, each server binds its threads to the same cores. Several
workers then want a memory node (NUMA) each, and do not start where there are too few."""
START = 600.0
"""Seconds vLLM may take to start."""


def whole_prompts() -> bool:
    """Returns whether vLLM must compute each prompt in one pass: where a pass ends inside of one, vLLM 0.32 takes back
    a draw of the request's generator, which the generators of a CPU cannot do: the engine would end."""
    return not (torch.cuda.is_available() or torch.xpu.is_available())


def capabilities_of(policy: Policy) -> Capabilities:
    """The sizes and abilities of a vLLM engine in this process for a policy."""
    eos: Any = policy.tokenizer.eos_token_id
    return Capabilities(read_out(policy.module).weight.shape[0], policy.context, eos, sequences=True)


def describe(policy: Policy, folder: str) -> None:
    """Write what vLLM needs of a model at its start: configuration, tokenizer, and the weights beneath an adapter."""
    config = copy.deepcopy(policy.module.config)
    # vLLM finds its own class by this name, and a config that was made in code has none.
    config.architectures = [type(policy.module).__name__]
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    if policy.lora is not None:
        write_base(policy, Path(folder))


def arguments(
    policy: Policy, folder: str, slots: int, cache_bytes: int, eager: bool, workers: int = 1
) -> dict[str, Any]:
    """vLLM's engine arguments for one policy. Those of the log-prob contract are in `build` and `launch.NEEDED`.

    Args:
        cache_bytes: bytes of the key-value cache of all workers together. vLLM is told the bytes of one worker.
    """
    several = {"tensor_parallel_size": workers, "distributed_executor_backend": "mp"} if workers > 1 else {}
    return {
        "model": folder,
        "runner": "generate",
        "dtype": str(policy.dtype).removeprefix("torch."),
        # No weights are read: the first push brings them. With an adapter, `lora_arguments` replaces this entry.
        "load_format": "dummy",
        "max_model_len": policy.context,
        "max_num_seqs": slots,
        "kv_cache_memory_bytes": cache_bytes // workers,
        "enable_prefix_caching": True,
        "enforce_eager": eager,
        "trust_remote_code": policy.remote_code,
        "disable_log_stats": True,
        "seed": 0,  # each request has a seed of its own
        **several,
        **lora_arguments(policy.lora),
    }


def workers_environment(workers: int, eager: bool) -> dict[str, str]:
    """Environment variables that vLLM's workers get beside this process's own. The workers share its threads."""
    if workers == 1:
        return {}
    variables = {
        BINDING: os.environ.get(BINDING, "nobind"),
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // workers)),
    }
    return variables | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})


def build(policy: Policy, slots: int, cache_bytes: int, eager: bool, workers: int = 1) -> Any:
    """The engine. What vLLM changes in this process is restored: random states, torch's thread setting, environment."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    for_workers = workers_environment(workers, eager)
    with (
        _program_hidden() if workers > 1 else nullcontext(),
        # 0: the engine's core runs in this process, where its steps can be called one by one.
        _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL=level, **for_workers),
        generators_kept(),
        _threads_kept(),
        # The description is needed during the start only.
        tempfile.TemporaryDirectory(prefix="posttrain-vllm-", dir=memory_folder()) as folder,
    ):
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        check_served(policy)
        describe(policy, folder)
        chosen = arguments(policy, folder, slots, cache_bytes, eager, workers)
        contract: dict[str, Any] = {
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "worker_extension_cls": EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            **({"enable_chunked_prefill": False} if whole_prompts() else {}),
        }
        return LLMEngine.from_engine_args(EngineArgs(**chosen, **contract))


def memory_folder(size: int = 0) -> Path:
    """A folder in memory. The temporary folder where there is none, or where it has no room for twice `size` bytes."""
    shm = Path("/dev/shm")
    fits = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= 2 * size
    return shm if fits else Path(tempfile.gettempdir())


def folder_for_weights(policy: Policy) -> Path:
    """A folder for the files of a policy's weights on their way to a server."""
    return memory_folder(sum(t.nbytes for _, t in served_tensors(policy.module)))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _program_hidden() -> Iterator[None]:
    """Inside, processes that `multiprocessing` begins do not import the user's program again: a run that it starts at
    its top would start once more in each worker."""
    # torch._dynamo reads TORCHDYNAMO_DISABLE once, as it is imported. So `build` enters this block before the one that
    # sets the variable, which is meant for the workers alone.
    import_module("torch._dynamo")
    program = sys.modules["__main__"]
    # multiprocessing imports the main program in a new process by its file or its spec; without both it imports none.
    file, spec = program.__dict__.pop("__file__", None), getattr(program, "__spec__", None)
    program.__spec__ = None
    try:
        yield
    finally:
        program.__spec__ = spec
        if file is not None:
            program.__file__ = file


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore torch's threads afterwards. vLLM lowers them and replaces `torch.set_num_threads`."""
    set_threads, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        # First torch's own function again, then the number.
        torch.set_num_threads = set_threads
        torch.set_num_threads(count)


@contextmanager
def quiet_compiler(eager: bool) -> Iterator[None]:
    """Inside, nothing is compiled if `eager`: what vLLM compiles of its sampler takes minutes at the first request."""
    if not eager:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_split(workers: int, config: Any) -> None:
    """ConfigError where the layers of a model with this configuration cannot be cut among this many workers."""
    if workers == 1:
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    for count, what in ((heads, "attention heads"), (inner, "channels of the feed-forward layers")):
        if count % workers:
            raise ConfigError(
                f"engine.workers={workers} cannot share the model's {count} {what}: take a number that divides {count}"
            )
    # Fewer key-value heads than workers are copied, which needs a whole number of workers for each.
    if kv_heads % workers and workers % kv_heads:
        raise ConfigError(
            f"engine.workers={workers} cannot share the model's {kv_heads} key-value heads: take a number that divides"
            f" {kv_heads}, or a multiple of it"
        )


def refuse_few(settings: VLLM, placement: Placement) -> None:
    """ConfigError where the machine lacks what each worker needs: a device, or on CPU a core."""
    if settings.workers == 1 or settings.url is not None:
        return
    if torch.cuda.is_available():
        if (have := torch.cuda.device_count()) < settings.workers:
            raise ConfigError(
                f"engine.workers={settings.workers} need a GPU each, and this process sees {have}: lower it"
            )
        return
    given_cores = 0 if isinstance(placement, Local) else placement.cores
    if (have := given_cores or cores()) < settings.workers:
        where = f"placement.cores={given_cores} gives an engine" if given_cores else "this process may use"
        raise ConfigError(
            f"engine.workers={settings.workers} need a core each, because they spin while they wait for each other, and"
            f" {where} {have}: lower engine.workers{', or raise placement.cores' if given_cores else ''}"
        )
