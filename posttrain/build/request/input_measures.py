"""Sizes of a model, of the data and of the machine, measured before anything is loaded; `build.request.defaults`
chooses settings by them. Of a model only config.json and the sizes of its files are read, of the data only lengths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.env import Env
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system import read_untrusted
from posttrain.system.errors import DataError
from posttrain.system.machine import cores

GIB = 1 << 30
LARGEST_CONFIG = 16 * read_untrusted.MiB
"""Most bytes of a config.json that is read."""
WEIGHTS = (".safetensors", ".bin")
"""Ends of the names of weight files; the first kind that a folder has is counted."""
STORED_BYTES = {"float32": 4, "float64": 8}
"""Bytes of a stored weight by the dtype that config.json names; any other dtype has 2."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model, from its config.json and its files. None: config.json does not say."""

    parameters: int
    positions: int | None
    hidden: int
    layers: int
    ffn: int
    cache_width: int
    """Numbers that one token adds to the key-value cache in one layer."""


def model_size(path: str) -> ModelSize | None:
    """The sizes of a model directory or hub id; None where its config.json cannot be read, or describes no decoder.

    What is wrong with it is reported where the model is loaded.
    """
    saved = saved_adapter(path)
    path = path if saved is None else saved.base
    config = _config(Path(path).expanduser(), path)
    if config is None:
        return None
    # Models that also read pictures describe their decoder in an inner object.
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    hidden, layers = _whole(config, "hidden_size", "n_embd"), _whole(config, "num_hidden_layers", "n_layer")
    heads = _whole(config, "num_attention_heads", "n_head")
    if hidden is None or layers is None or heads is None:
        return None
    ffn = _whole(config, "intermediate_size", "n_inner") or 4 * hidden
    kv_heads = _whole(config, "num_key_value_heads") or heads
    head_dim = _whole(config, "head_dim") or hidden // heads
    vocabulary = _whole(config, "vocab_size") or 0
    stored = STORED_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or ""), 2)
    tables = 1 if config.get("tie_word_embeddings") else 2
    block = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * ffn
    return ModelSize(
        # By the files, or counted: the tables of the vocabulary and, in each layer (`block`), the matrices of attention
        # (query and output, key and value) and the three of a gated feed-forward part.
        parameters=_weight_bytes(Path(path).expanduser()) // stored or tables * vocabulary * hidden + layers * block,
        positions=_whole(config, "max_position_embeddings", "n_positions"),
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        cache_width=2 * kv_heads * head_dim,
    )


def _config(folder: Path, path: str) -> dict[str, Any] | None:
    """config.json as an object; None where it cannot be read. For a hub id only this one file is fetched."""
    file = folder / "config.json"
    if not folder.is_dir():
        if folder.exists() or (fetched := _fetched(path)) is None:
            return None
        file = fetched
    try:
        return read_untrusted.parse_object(
            read_untrusted.read_bytes(file, LARGEST_CONFIG, DataError), str(file), DataError
        )
    except (DataError, OSError):
        return None


def _fetched(path: str) -> Path | None:
    """config.json of a hub id, from the cache of the hub or from the hub itself."""
    import huggingface_hub as hub

    try:
        cached = hub.try_to_load_from_cache(path, "config.json")
        return Path(cached if isinstance(cached, str) else hub.hf_hub_download(path, "config.json", etag_timeout=5))
    except Exception:  # the network, the hub, a name that is no id: loading the model says which
        return None


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these entries that is a whole number, if it is above 0; else None."""
    number = next((config[n] for n in names if isinstance(config.get(n), int)), None)
    return number if number is not None and number > 0 else None


def _weight_bytes(folder: Path) -> int:
    """Bytes of all weight files in a folder; 0 where it has none or is no folder."""
    files = [f for f in folder.iterdir() if f.suffix in WEIGHTS] if folder.is_dir() else []
    # Only files of one kind are counted: many folders have the same weights in both.
    kind = next((k for k in WEIGHTS if any(f.suffix == k for f in files)), "")
    return sum(f.stat().st_size for f in files if f.suffix == kind)


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """How many rows the user's data has, and the lengths of its longest texts in bytes (UTF-8).

    A token has at least one byte, and about four in English.
    """

    rows: int
    completions: int
    """Rows with a demonstration."""
    judged: int = 0
    """Rows whose completions were judged."""
    longest_prompt: int
    longest_completion: int
    longest: int
    """The longest prompt together with its completion."""


def data_size(env: Env, objects: RuntimeObjects = RuntimeObjects()) -> DataSize | None:
    """The size of the user's data; None where the environment makes its tasks itself. `objects`: those of the program.

    Raises:
        DataError, ConfigError: the data cannot be read; the message names the row.
    """
    if env.name != "prompts" or env.prompts is None:
        return None
    from posttrain.environment.make import checked
    from posttrain.environment.rows.data_rows import checked_rows
    from posttrain.environment.rows.own_prompts import PromptsEnv
    from posttrain.environment.rows.row_reader import PromptRow, texts_of

    columns = PromptsEnv(**checked(env.name, PromptsEnv, env.args))
    rows = completions = judged = longest_prompt = longest_completion = longest = 0
    rows_with_place = (pair for path, _ in env.data for pair in checked_rows(path, columns, objects))
    for _, row in rows_with_place:
        if not isinstance(row, PromptRow):  # it is left out
            continue
        # Counted in bytes: a token may be a single byte, so a length in bytes bounds the tokens for every tokenizer.
        prompt_bytes = sum(len(t.encode()) for t in texts_of(row.task.prompt))
        texts = [row.completion or "", *(row.judged.completions if row.judged is not None else ())]
        answer_bytes, talk = max(len(t.encode()) for t in texts), row.conversation
        if talk is not None:
            answer_bytes = max(answer_bytes, sum(len(t.encode()) for t in texts_of(talk.messages)) - prompt_bytes)
        rows, completions = rows + 1, completions + (row.completion is not None or talk is not None)
        judged += row.judged is not None
        longest_prompt, longest_completion = max(longest_prompt, prompt_bytes), max(longest_completion, answer_bytes)
        longest = max(longest, prompt_bytes + answer_bytes)
    return DataSize(
        rows=rows,
        completions=completions,
        judged=judged,
        longest_prompt=longest_prompt,
        longest_completion=longest_completion,
        longest=longest,
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which a run computes. `device` is the one to use, and `why` gives the reason."""

    device: str
    why: str
    memory: float
    """GiB of the device; of the machine where it is the CPU."""
    cores: int

    @property
    def accelerated(self) -> bool:
        return self.device != "cpu"


def machine(asked: str | None = None) -> Machine:
    """This machine. `asked`: the device that the user set; None: the best one."""
    import torch

    device, why = (asked, "") if asked is not None else best_device(_seen(torch))
    if device.startswith("cuda") and torch.cuda.is_available():
        index = torch.device(device).index or 0
        memory = torch.cuda.get_device_properties(index).total_memory / GIB
        why = f"one GPU: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB"
        return Machine(device=device, why=why, memory=memory, cores=cores())
    return Machine(device=device, why=why, memory=memory_here() / GIB, cores=cores())


def memory_here() -> int:
    """Bytes of this machine's memory."""
    # A system without `sysconf`, such as Windows, does not say: 16 GiB are assumed.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 16 * GIB


@dataclass(frozen=True, kw_only=True)
class SeenDevices:
    """The devices that torch sees on this machine."""

    cuda: bool = False
    mps: bool = False
    mps_float64: bool = False
    """Whether MPS has float64. No torch up to now has it there."""
    built_with_cuda: bool = True


def best_device(seen: SeenDevices) -> tuple[str, str]:
    """(the device to compute on, why): CUDA, else MPS where it has float64, else the CPU.

    >>> best_device(SeenDevices(cuda=True))[0], best_device(SeenDevices(mps=True))[0]
    ('cuda', 'cpu')
    """
    if seen.cuda:
        return "cuda", ""
    if seen.mps and not seen.mps_float64:
        return "cpu", "torch's MPS has no float64, by which tokens are drawn and weights are checked"
    if seen.mps:
        return "mps", "the GPU of this Mac"
    return "cpu", f"torch sees no GPU here{'' if seen.built_with_cuda else ' (it is built without CUDA)'}"


def _seen(torch: Any) -> SeenDevices:
    mps = getattr(torch.backends, "mps", None)
    mps = mps is not None and mps.is_available()
    return SeenDevices(
        cuda=torch.cuda.is_available(),
        mps=mps,
        mps_float64=mps and _has_float64(torch, "mps"),
        built_with_cuda=bool(getattr(torch.version, "cuda", None)),
    )


def _has_float64(torch: Any, device: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True
