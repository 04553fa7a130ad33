"""The policy's files in a run folder beside the weights: configuration, generation config and tokenizer. No code of
the model's own is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from posttrain.core.errors import DataError
from posttrain.core.run import Model
from posttrain.engine import attention
from posttrain.engine.adopt import implementation
from posttrain.engine.checkpoint import read_tokenizer
from posttrain.engine.models import Policy, named_tensors, prepared, resolve_stops
from posttrain.engine.vocabulary import quiet

GENERATION = "generation_config.json"


def write_config(policy: Policy, folder: Path) -> None:
    """Write configuration and generation config."""
    policy.module.config.save_pretrained(folder)
    if policy.module.generation_config is not None:
        policy.module.generation_config.to_json_file(folder / GENERATION)


def kept(
    model: Model, config: Path, tokenizer: Path, stop_ids: Sequence[int] | None, most: int | None = None
) -> Policy:
    """The policy of a run folder. Its parameters are not loaded yet. No code of the model's own is run,
    whatever its files contain.

    Args:
        stop_ids: the ids that the run recorded; None: they are resolved again.
        most: see `load_policy`.

    Raises:
        DataError: the files are missing or damaged, or the architecture needs its own code, or it has buffers, which no
            checkpoint of a run holds.
    """
    words, _ = read_tokenizer(str(tokenizer))
    attention.register()
    try:
        with quiet():
            found = AutoConfig.from_pretrained(config, trust_remote_code=False)
            if getattr(found, "quantization_config", None) is not None:
                raise ValueError("it is quantized, and what a run learned never is")
            built: Any = AutoModelForCausalLM.from_config(
                found,
                attn_implementation=implementation(found),
                dtype=getattr(torch, model.dtype),
                trust_remote_code=False,
            )
            if (config / GENERATION).exists():
                built.generation_config = GenerationConfig.from_pretrained(config)
    except Exception as error:  # broken files raise any error of their parser
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise DataError(
            f"{config}: no model can be made of its config.json alone ({type(error).__name__}: {first})"
        ) from error
    module: PreTrainedModel = built
    if buffers := [n for n, t in named_tensors(module) if not isinstance(t, nn.Parameter)]:
        raise DataError(
            f"{config}: checkpoints of a run hold no buffers, and this model keeps some: {', '.join(buffers[:3])}"
        )
    stops = tuple(stop_ids) if stop_ids else resolve_stops(words, module.generation_config)
    return prepared(model, module, words, stops, f"kept in {config.parent}", [], most)
