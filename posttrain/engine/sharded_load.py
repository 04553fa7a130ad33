"""A model loaded over ranks without a whole copy of it on any of them. It is built without memory (torch's device
`meta`), cut, and then each rank reads its own rows of each weight from the model's safetensors files.

The model's checks at load run afterwards, on all ranks together, where its weights come together a layer at a time. Its
layers are the plain ones (`training_layers`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.core.adapter import check_frozen
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.machine import freed_at_once
from posttrain.core.ranks import check_same
from posttrain.core.run import Model
from posttrain.engine import attention
from posttrain.engine.accept import accept
from posttrain.engine.adapter import attach
from posttrain.engine.checkpoint import read_skeleton
from posttrain.engine.models import Policy, prepared
from posttrain.engine.process_ranks import ProcessRanks
from posttrain.engine.saved_adapter import saved_adapter
from posttrain.engine.sharded import ShardedLearner
from posttrain.engine.sharded_cut import remade
from posttrain.engine.silence import silence
from posttrain.engine.stops import resolve_stops

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"


def load_by_rows(
    model: Model, ranks: ProcessRanks, *, seed: int = 0, most: int | None = None, **how: Any
) -> ShardedLearner:
    """The learner of one rank over the model in the directory `model.path`. Every rank calls it.

    Args:
        seed: of the adapter that `model.lora` asks for.
        most: tokens of the longest sequence, where `model.context` is not set.
        how: further arguments of `ShardedLearner`.

    Raises:
        ConfigError: `model.path` is no directory of a model, or asks for what is not offered this way.
        DataError: the files lack a weight, or name weights otherwise than the module does.
        InvariantError: the ranks see different files.
    """
    folder = Path(model.path or "").expanduser()
    if model.path is None or not folder.is_dir() or saved_adapter(model.path) is not None:
        raise ConfigError(
            f"model.path={model.path}: rows are read from the directory of a model, and this is none. Give one, or load"
            " the model whole on each rank (`load_policy`)"
        )
    if model.lora is not None and model.lora.dora:
        raise ConfigError(
            "model.lora.dora=true reads whole weights when it begins, which no rank has here. Set it to false, or load"
            " the model whole on each rank (`load_policy`)"
        )
    check_frozen(model.lora, model.quantize)
    files = RowFiles(folder)
    check_same(
        ranks, files.digest, "weight files", "Give every rank the same model: copy its directory to each machine"
    )
    config, tokenizer, notes = read_skeleton(str(folder), model.trust_remote_code)
    attention.register()
    with without_memory():
        module = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, model.dtype),
            attn_implementation=attention.NAME,
            trust_remote_code=model.trust_remote_code,
        )
    stops = resolve_stops(tokenizer, module.generation_config)
    policy = prepared(model, module, tokenizer, stops, f"from {model.path}, each rank its rows", notes, most)
    if model.lora is not None:
        policy = _adapted(policy, model, seed)
    with freed_at_once():  # what the passes of the checks free is several times a rank's rows
        return ShardedLearner(policy, ranks, fill=files.fill, prove=_prove, **how)


def _prove(policy: Policy) -> None:
    """The checks at load, inside a pass."""
    silence(policy.module, accept(policy.module, policy.context)[0])


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, parameters of new modules are on `meta`. Their buffers are real."""
    real = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # those on it are ties
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        real(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = real


def _adapted(policy: Policy, model: Model, seed: int) -> Policy:
    """With a new adapter, whose numbers are real and those of one process. While it is attached the weights beneath are
    memory that nobody touches, because PEFT puts an adapter where they are."""
    assert model.lora is not None
    blanks = set[int]()

    def blank(p: nn.Parameter) -> nn.Parameter:
        new = nn.Parameter(torch.empty_like(p, device="cpu"))
        blanks.add(id(new))
        return new

    remade(policy.module, blank)
    attach(policy.module, model.lora, seed)
    remade(policy.module, lambda p: nn.Parameter(p.detach().to("meta"), False) if id(p) in blanks else None)
    return replace(policy, lora=model.lora)


class RowFiles:
    """The safetensors files of a model, of which any rows can be read.

    `digest` is that of what they hold by name, type, shape and size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of: dict[str, Path] = {}
        listed = hashlib.blake2b(digest_size=16)
        for path in self._paths():
            try:
                with safe_open(path, "pt") as file:
                    for name in sorted(file.keys()):
                        part = file.get_slice(name)
                        self._of[name] = path
                        listed.update(f"{name} {part.get_dtype()} {part.get_shape()};".encode())
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path}: its weights cannot be read ({error}). Copy or download them again") from error
            listed.update(f"{path.name} {path.stat().st_size};".encode())
        self.digest = listed.hexdigest()

    def _paths(self) -> list[Path]:
        if (self.folder / INDEX).is_file():
            try:
                names = set(json.loads((self.folder / INDEX).read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise DataError(f"{self.folder / INDEX} is no index of weights ({error}). Copy it again") from error
            found = [self.folder / name for name in sorted(names) if Path(name).name == name]
        else:
            found = [self.folder / ALONE]
        if missing := [p for p in found if not p.is_file()]:
            raise DataError(
                f"{missing[0]} is not there: rows are read from safetensors files. Save the model again with"
                " save_pretrained, or load it whole on each rank"
            )
        return found

    def fill(self, module: PreTrainedModel, name: str, into: Tensor, begin: int, dtype: torch.dtype) -> None:
        """Read the rows from `begin` of one weight into `into`, rounded to `dtype` first.

        Raises:
            DataError: no file has it, or with another shape.
        """
        key = next((n for n in self._names(module, name) if n in self._of), None)
        if key is None:
            raise DataError(
                f"{self.folder}: {name} is in none of its files under this name, so rows of it cannot be read. Load the"
                " model whole on each rank (`load_policy`), which converts names"
            )
        with safe_open(self._of[key], "pt") as file:
            part = file.get_slice(key)
            shape = list(part.get_shape())
            if shape[1:] != list(into.shape[1:]) or begin + len(into) > shape[0]:
                raise DataError(f"{self.folder}: {name} has the shape {shape} in its file, and another in the model")
            if len(into):
                into.copy_(part[begin : begin + len(into)].to(dtype))

    @staticmethod
    def _names(module: PreTrainedModel, name: str) -> list[str]:
        """Names that a weight may have in a file: its own, without the layers of an adapter, and those of its ties."""
        plain = name.replace(".base_layer.", ".")
        tied: Any = getattr(module, "all_tied_weights_keys", None) or {}
        return [plain, *(a for pair in tied.items() for a in pair if plain in pair and a != plain)]
