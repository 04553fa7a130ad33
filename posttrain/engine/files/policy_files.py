"""Writes the policy's configuration and frozen weights into a run folder, and makes the policy again from there.

The trained weights are in checkpoints: whoever calls `kept` loads them. No code of the model's own is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from posttrain.config.run import Model
from posttrain.engine.adapters.adapter_modules import base_tensors
from posttrain.engine.adapters.quantise import quantise
from posttrain.engine.files.pretrained_files import read_tokenizer
from posttrain.engine.files.safetensors_rows import load_tensors
from posttrain.engine.layers import attention
from posttrain.engine.model.policy_model import Policy, named_tensors, prepared, with_adapter
from posttrain.engine.model.stop_tokens import resolve_stops
from posttrain.engine.model.tiny_models import quiet
from posttrain.system.errors import DataError, first_line

GENERATION = "generation_config.json"
BASE = "base.safetensors"
"""The frozen weights beneath an adapter, where nothing outside the folder holds them."""


def write_config(policy: Policy, folder: Path, base: bool = False) -> None:
    """Write configuration and generation config, and with `base` the frozen weights beneath the adapter."""
    policy.module.config.save_pretrained(folder)
    if policy.module.generation_config is not None:
        policy.module.generation_config.to_json_file(folder / GENERATION)
    if base:
        # Names as they are without adapters: the base is loaded into a module that has none yet (`kept`).
        base_weights = base_tensors(policy.module)
        save_file({n: t.detach().contiguous() for n, t in base_weights.items()}, folder / BASE)


def _load_base(module: PreTrainedModel, path: Path) -> None:
    """Copy the kept base into the module. DataError where it is missing, damaged, or another model's."""
    loaded = load_tensors(path)
    module_tensors = dict(named_tensors(module))
    # Types are compared as well: copy_ would convert them silently, and the frozen weights would be other ones.
    if set(loaded) != set(module_tensors) or any(
        loaded[n].shape != module_tensors[n].shape or loaded[n].dtype != module_tensors[n].dtype for n in module_tensors
    ):
        raise DataError(f"{path} holds the weights of another model. Copy the whole folder again")
    with torch.no_grad():
        for name, tensor in module_tensors.items():
            tensor.copy_(loaded[name])


def kept(
    model: Model, config: Path, tokenizer: Path, stop_ids: Sequence[int] | None, most: int | None = None
) -> Policy:
    """The policy of a run folder. The parameters that train are not loaded yet. No code of the model's own is run,
    whatever its files contain. DataError where they are missing or damaged, or the architecture needs its own code, or
    has buffers, which no checkpoint of a run holds.

    Args:
        model: with `model.lora`, the kept base is loaded and a new adapter is attached.
        stop_ids: the ids that the run recorded; None or empty: they are resolved again.
        most: see `load_policy`.
    """
    loaded_tokenizer, _ = read_tokenizer(str(tokenizer))
    attention.register()
    try:
        with quiet():
            # A run folder may be a stranger's, so code of the model's own is off whatever the run's settings say.
            model_config = AutoConfig.from_pretrained(config, trust_remote_code=False)
            # Such a config would make transformers load a library of quantisation for what is built next.
            if getattr(model_config, "quantization_config", None) is not None:
                raise ValueError("it is quantized, and what a run learned never is")
            built: Any = AutoModelForCausalLM.from_config(
                model_config,
                attn_implementation=attention.NAME,
                dtype=getattr(torch, model.dtype),
                trust_remote_code=False,
            )
            if (config / GENERATION).exists():
                built.generation_config = GenerationConfig.from_pretrained(config)
    except Exception as error:  # broken files raise any error of their parser
        raise DataError(
            f"{config}: no model can be made of its config.json alone ({type(error).__name__}: {first_line(error)})"
        ) from error
    module: PreTrainedModel = built
    # Parameters come from the checkpoint. A persistent buffer would keep the value of a new model and change what is
    # computed, without any error.
    if buffers := [n for n, t in named_tensors(module) if not isinstance(t, nn.Parameter)]:
        raise DataError(
            f"{config}: checkpoints of a run hold no buffers, and this model keeps some: {', '.join(buffers[:3])}"
        )
    stops = tuple(stop_ids) if stop_ids else resolve_stops(loaded_tokenizer, module.generation_config)
    if model.lora is not None:
        # In this order: the kept base holds the codes and scales, so the layers must have that form before it is
        # loaded, and must be plain layers of the module, without adapters, to have its names.
        if model.quantize is not None:
            quantise(module, model.quantize)
        _load_base(module, config / BASE)
    policy = prepared(model, module, loaded_tokenizer, stops, f"kept in {config.parent}", [], most)
    # Any seed will do: the numbers of the adapter are loaded from the checkpoint afterwards.
    return with_adapter(policy, model, 0)
