"""A model loaded over ranks without a whole copy of it on any of them. It is built without memory (torch's device
`meta`), cut, and then each rank reads its own rows of each weight from the model's safetensors files.

The model's checks at load run afterwards, on all ranks together, where its weights come together a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from posttrain.config.model_settings import check_frozen
from posttrain.config.run import Model
from posttrain.core.exchange.ranks import check_same
from posttrain.engine.adapters.adapter_modules import attach
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.files.pretrained_files import read_generation, read_skeleton, unreadable
from posttrain.engine.files.safetensors_rows import RowFiles
from posttrain.engine.layers import attention
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.disable_dropout import silence
from posttrain.engine.model.policy_model import Policy, prepared
from posttrain.engine.model.stop_tokens import resolve_stops
from posttrain.engine.model.supported_models import accept
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.shard_modules import remade
from posttrain.system.errors import ConfigError, InvariantError
from posttrain.system.machine import freed_at_once

L = TypeVar("L", bound=HFLearner)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlankPolicy(Policy):
    """A policy whose weights are on `meta`, without memory; their values are in `files`. A new adapter has both."""

    files: RowFiles

    def numbers(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each weight is read when it is asked for, so one is in memory at a time."""
        with freed_at_once():
            for name, tensor in tensors:
                yield name, self.files.whole(self.module, name, tensor) if tensor.is_meta else tensor

    def describe(self) -> tuple[str, ...]:
        first, *others = super().describe()
        return (first.replace(" on meta", ", of which each rank reads its rows"), *others)


def blank_policy(model: Model, seed: int = 0) -> BlankPolicy:
    """The policy of the directory `model.path`, without its weights.

    Args:
        seed: of the adapter that `model.lora` asks for.

    Raises:
        ConfigError: `model.path` is no directory of a model, or asks for what is not offered this way.
        DataError: its files cannot be read.
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
    config, tokenizer, notes = read_skeleton(str(folder), model.trust_remote_code)
    attention.register()
    try:
        with freed_at_once(), without_memory():
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, model.dtype),
                attn_implementation=attention.NAME,
                trust_remote_code=model.trust_remote_code,
            )
    except Exception as error:  # of a config that describes no model
        raise unreadable(str(folder), error) from error
    module.generation_config = read_generation(str(folder)) or module.generation_config
    stops = resolve_stops(tokenizer, module.generation_config)
    parts_of_policy = prepared(model, module, tokenizer, stops, f"from {model.path}", notes, None)
    policy = BlankPolicy(files=files, **{f.name: getattr(parts_of_policy, f.name) for f in fields(Policy)})
    return policy if model.lora is None else _with_adapter(policy, model, seed)


def read_rows(
    policy: BlankPolicy, ranks: ProcessRanks, make: Callable[..., L], *arguments: Any, digest: str = "", **options: Any
) -> L:
    """The learner of one rank over a policy without memory, as `make(policy, ...)` makes it. Every rank calls it.

    Args:
        arguments, options: what `make` takes after the policy, such as the ranks.
        digest: the fingerprint of the model where it is known. All ranks together must have read that.

    Raises:
        InvariantError: the ranks see different files, or have read another model.
    """
    check_same(
        ranks, policy.files.digest, "weight files", "Give every rank the same model: copy its directory to each machine"
    )
    with freed_at_once():  # what the passes of the checks free is several times a rank's rows
        learner = make(policy, *arguments, fill=policy.files.fill, prove=_prove, **options)
        if digest and learner.fingerprint() != digest:
            raise InvariantError(
                f"the rows that the ranks have read in {policy.files.folder} are not those of the model that rank 0 has"
                " read there: give every machine the same files, and change none while they are read"
            )
    return learner


def _prove(policy: Policy) -> None:
    """The checks that a model in one process gets at load. They run inside a pass, where weights are whole."""
    silence(policy.module, accept(policy.module, policy.context)[0])


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, parameters of new modules are on `meta`. Their buffers are real."""
    # torch.device("meta") would put buffers there too, such as the frequencies of a rope, and no file has those. So
    # only parameters are caught, where modules register them.
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


def _with_adapter(policy: BlankPolicy, model: Model, seed: int) -> BlankPolicy:
    """The policy with a new adapter, whose numbers are those that one process would draw. PEFT puts it on the device of
    the weights beneath, so while it is attached these get memory on the CPU, to which nobody writes."""
    assert model.lora is not None
    blanks = set[int]()

    def blank(p: nn.Parameter) -> nn.Parameter:
        # The system gives memory to a page when it is first written, so these tensors cost addresses only.
        new = nn.Parameter(torch.empty_like(p, device="cpu"))
        blanks.add(id(new))
        return new

    remade(policy.module, blank)
    attach(policy.module, model.lora, seed)
    # Back to meta what was blank; the adapter's own parameters are new and stay.
    remade(policy.module, lambda p: nn.Parameter(p.detach().to("meta"), False) if id(p) in blanks else None)
    return replace(policy, lora=model.lora)
