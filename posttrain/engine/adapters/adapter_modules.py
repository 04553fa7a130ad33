"""Adapters over frozen weights, by PEFT: attach, switch off, merge into a copy, write and read.

PEFT's layers take the place of linear layers inside the module, so the module stays the Hugging Face class that it was,
and learner, reference and engine read it as they read any other. Nothing here changes a frozen weight.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.config.model_settings import ALL_LINEAR, Lora
from posttrain.engine.adapters.quantise import float_layer, make_float, put, saved_bytes
from posttrain.engine.head.readout import read_out
from posttrain.system.errors import ConfigError, EngineError, first_line

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

NAME = "default"
"""Name of the adapter inside PEFT's layers."""
MERGE_BOUND = 6.0
"""Allowed error of an output of a merged layer, in machine epsilons of the weights' type, per root of the sum of
(input x weight)^2. A weight is rounded at most three times (product, sum, storing), each time by at most half an
epsilon, with independent signs: this is 12 standard deviations at least, also for a rounded norm (DoRA)."""


def attach(module: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze the weights of `module` and put new adapters into it, in place.

    Args:
        seed: of the matrices A; B is 0.

    Raises:
        ConfigError: no layer has a name of `lora.targets`, or one of them is the head.
    """
    from peft import inject_adapter_in_model

    module.requires_grad_(False)
    # Before PEFT comes in: afterwards its own matrices A and B are linear layers of the module too.
    full_names, names = _linear(module), linear_names(module)
    # torch.manual_seed seeds every device. None puts back the generators of all of them.
    with torch.random.fork_rng(devices=[] if module.device.type == "cpu" else None):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_config(lora, module), module, NAME)
        except ValueError as error:
            raise ConfigError(
                f"model.lora.targets={','.join(lora.targets)}: PEFT puts no such adapters into {type(module).__name__}"
                f" ({first_line(error)}). Its linear layers are {', '.join(names)}"
            ) from error
    # PEFT's ParamWrapper is an adapter over a bare parameter, the form in which experts are stored: it is refused.
    # Under all-linear a linear layer that got no adapter is refused as well, because the setting promises all layers.
    kinds = {n: type(layer).__name__ for n, layer in layers(module).items()}
    without_adapter = [n for n in full_names if n not in kinds] if lora.targets == (ALL_LINEAR,) else []
    if refused := [n for n, kind in kinds.items() if kind == "ParamWrapper"] or without_adapter:
        fit = dict.fromkeys(n.rpartition(".")[2] for n in kinds if n not in refused)
        raise ConfigError(
            f"model.lora.targets={','.join(lora.targets)}: {refused[0]} of {type(module).__name__} can have no adapter."
            " Experts and routers of a mixture are parameters of another form than linear layers, adapters on them are"
            " not built, and PEFT takes layers that have their names for them. Set"
            f" model.lora.targets={','.join(fit or (n for n in names if n not in lora.targets))}"
        )
    # Only PEFT decides which layers a listed name meets.
    if isinstance(read_out(module).head, _tuner_layer()):
        raise ConfigError(
            "model.lora.targets: the language-model head can have no adapter, because log-probs are computed from its"
            f" weight. Name other layers: {', '.join(names)}"
        )
    # In 16 bits most small updates would be rounded away: adapters train in float32, as with PEFT's get_peft_model.
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()


def _config(lora: Lora, module: PreTrainedModel) -> Any:
    """PEFT's settings of these adapters."""
    from peft import LoraConfig

    # A parameter of 3 dimensions holds the experts of a mixture. By its word for all linear layers PEFT would put
    # adapters on experts and routers too, so the linear layers are listed, by full names.
    mixture = any(p.ndim == 3 for p in module.parameters())
    all_layers: str | list[str] = _linear(module) if mixture else ALL_LINEAR
    targets = all_layers if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT computes alpha / r with any number
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        # Sampler and learner must be the same function, so no adapter is random.
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def linear_names(module: PreTrainedModel) -> list[str]:
    """Last words of the names of the decoder's linear layers, each once."""
    return list(dict.fromkeys(n.rpartition(".")[2] for n in _linear(module)))


def _linear(module: PreTrainedModel) -> list[str]:
    """Full names of the decoder's linear layers but the head: parts of experts may have the same last words."""
    head = read_out(module).head
    return [n for n, m in module.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]


def _tuner_layer() -> type[BaseTunerLayer]:
    """PEFT's base class of layers with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return BaseTunerLayer


def layers(module: nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers with an adapter, by name. Empty for a module without adapters."""
    if not is_adapted(module):
        return {}
    kind = _tuner_layer()
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def is_adapted(module: nn.Module) -> bool:
    """Returns whether the module has adapters. Needs no PEFT where it has none."""
    # By two attributes, because the class can be had only by importing PEFT.
    return any(hasattr(part, "base_layer") and hasattr(part, "adapter_layer_names") for part in module.modules())


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The adapters' own parameters, under their state-dict names."""
    parts = ((name, attribute) for name, layer in layers(module).items() for attribute in layer.adapter_layer_names)
    inside = tuple(f"{name}.{attribute}." for name, attribute in parts)
    return {n: t for n, t in module.state_dict(keep_vars=True).items() if n.startswith(inside)} if inside else {}


def base_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors beneath the adapters, under the names that they have without adapters. Tied ones come once."""
    of_adapter, seen_ids, out = adapter_tensors(module), set[int](), dict[str, Tensor]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        # keep_vars=True gives the parameters themselves: a tied one is known by its identity.
        if name not in of_adapter and id(tensor) not in seen_ids:
            seen_ids.add(id(tensor))
            out[name.replace(".base_layer.", ".")] = tensor
    return out


def target_names(module: nn.Module) -> list[str]:
    """The names by which PEFT finds the adapted layers: last words where these name no other layer, else full names."""
    adapted = layers(module)
    last_words = sorted({name.rpartition(".")[2] for name in adapted})
    # PEFT takes every layer whose name ends in a listed word: a reader would attach adapters that were never trained.
    named = [n for n, part in module.named_modules() if n.rpartition(".")[2] in last_words]
    return last_words if len(named) == len(adapted) else sorted(adapted)


def words(module: nn.Module, lora: Lora) -> str:
    """The adapter of a module, as a line for people."""
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    small, large = saved_bytes(module, next(p.dtype for p in module.parameters() if p.dtype.is_floating_point))
    beneath = f", over linear layers in few bits ({small:,} bytes instead of {large:,})" if small else ""
    return f"adapter: {lora.words()}: {len(layers(module))} layers, {count:,} parameters train{beneath}"


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes without its adapters."""
    parts = layers(module).values()
    for part in parts:
        part.enable_adapters(False)
    try:
        yield
    finally:
        for part in parts:
            part.enable_adapters(True)


@contextmanager
def loud(module: nn.Module) -> Iterator[None]:
    """Inside, every adapter adds random numbers half as large as its layer's own output, so that log-probs show whether
    a sampler computes with it (`AdapterTrial`). Afterwards all hold their own numbers again, bit for bit."""
    # Copies, and no arithmetic that is undone afterwards: rounding would leave other numbers than before.
    before = {n: t.detach().clone() for n, t in adapter_tensors(module).items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for part in layers(module).values():
                for _, b, numbers in loud_numbers(part, generator):
                    b.weight.copy_(numbers)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in adapter_tensors(module).items():
                tensor.copy_(before[name])


def loud_numbers(
    layer: Any, generator: torch.Generator, whole: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Any, Tensor]]:
    """(name, layer B, numbers that make it `loud`) of each adapter of a layer: with them |scale B A x| is about
    |W x| / 2. `whole`: the whole of a weight, of which each rank may hold a part."""

    def norm(weight: Tensor) -> float:
        return float(whole(weight).double().norm())

    # For inputs x with independent entries of size 1, |A x| is about the Frobenius norm of A, and |B y| about size *
    # sqrt(out) * |y| where B [out, r] has entries of that size. |W x| is about the norm of W.
    base = norm(float_layer(layer.get_base_layer(), torch.float32).weight)
    for name, b in layer.lora_B.items():
        added = layer.scaling[name] * norm(layer.lora_A[name].weight) * math.sqrt(b.weight.shape[0])
        yield name, b, torch.randn(b.weight.shape, generator=generator) * (base / (2 * max(added, 1e-30)))


def effective(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of the plain layer that computes what this one does with its adapter. The layer's own weights are
    left as they are. For a layer without an adapter these are its own."""
    plain: Any = _merged_layer(layer, torch.float32) if is_adapted(layer) else layer
    return plain.weight.detach(), None if plain.bias is None else plain.bias.detach()


def _merged_layer(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a PEFT layer's base layer, with the adapter merged into the copy, of `dtype` if it was in 8 bits."""
    # The weight becomes float before the merge: codes of few bits could not hold the sum.
    alone: Any = copy.deepcopy(layer)
    make_float(alone, dtype)
    try:
        # With safe_merge PEFT raises ValueError where the merged weight is not finite.
        alone.merge(safe_merge=True)
    except ValueError as error:
        raise EngineError(f"the adapter cannot be merged: {error}. Go on from an earlier checkpoint") from error
    return alone.get_base_layer()


def merge_error(layer: nn.Module, plain: nn.Module) -> float:
    """Returns the distance between a plain layer and a layer with an adapter, in units of what rounding allows
    (`MERGE_BOUND`): at most 1 where the adapter was merged once into the weights beneath it."""
    # In float64 the comparison itself rounds nothing that counts.
    adapted: Any = copy.deepcopy(layer).double()
    merged_layer: Any = copy.deepcopy(plain).double()
    stored: Any = getattr(plain, "weight")  # noqa: B009 (typed as any module)
    generator = torch.Generator().manual_seed(0)
    # GPT-2's Conv1D holds its weight as [in, out], nn.Linear as [out, in].
    axis = 0 if isinstance(plain, Conv1D) else 1
    x = torch.randn(8, stored.shape[axis], generator=generator, dtype=torch.float64).to(stored.device)
    with torch.no_grad():
        apart = (adapted(x) - merged_layer(x)).abs()
        # An adapter may cancel most of a weight. The sum is then small, and its rounding as large as the weight's: the
        # bound has the sizes of both.
        squares = merged_layer.weight**2 + adapted.get_base_layer().weight ** 2
        size = (x**2 @ (squares if axis == 0 else squares.T)).sqrt()
        allowed = MERGE_BOUND * torch.finfo(stored.dtype).eps * size
        # An output that is no number must not pass, and every comparison with NaN would be false.
        ratio = torch.where(apart.isfinite(), apart / allowed.clamp_min(1e-300), torch.inf)
    return float(ratio.max())


def without_adapters(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module as it was before its adapters. The weights are shared."""
    # The memo tells deepcopy that the parameters are copied already, as themselves.
    bare = copy.deepcopy(module, {id(t): t for t in module.parameters()})
    for name in layers(bare):
        put(bare, name, getattr(bare.get_submodule(name), "get_base_layer")())  # noqa: B009
    return _without_peft_record(bare)


def beside(module: PreTrainedModel, lora: Lora, seed: int) -> PreTrainedModel:
    """A copy of the module with a new adapter in the place of its own. The weights beneath are shared. ConfigError
    where it has no adapter, so all its weights train and none can be shared."""
    if not is_adapted(module):
        raise ConfigError(
            "all weights of this policy train, so no other policy can share them: give it an adapter"
            " (model.lora.rank=16), or take Policy.clone()"
        )
    bare = without_adapters(module)
    attach(bare, lora, seed)
    return bare


def merged(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module with its adapters merged into the weights, and 8-bit layers as float ones of its dtype."""
    copied = copy.deepcopy(module)
    for name in layers(copied):
        put(copied, name, _merged_layer(copied.get_submodule(name), module.dtype))
    make_float(copied, module.dtype)  # quantised layers that had no adapter
    return _without_peft_record(copied).requires_grad_(True)


def _without_peft_record(module: PreTrainedModel) -> PreTrainedModel:
    """The module without PEFT's note of what was attached to it."""
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        module.__dict__.pop(attribute, None)
    return module
