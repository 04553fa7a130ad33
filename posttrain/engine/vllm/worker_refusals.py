"""Raises ConfigError where `engine.workers` does not fit a model or a machine. No module of vLLM is imported here."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.config.engines import VLLM
from posttrain.config.placement import Local, Placement
from posttrain.system.errors import ConfigError
from posttrain.system.machine import cores


def refuse_split(workers: int, config: Any) -> None:
    """ConfigError where the layers of a model with this configuration cannot be cut among so many workers."""
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
    if kv_heads % workers and workers % kv_heads:
        raise ConfigError(
            f"engine.workers={workers} cannot share the model's {kv_heads} key-value heads: take a number that divides"
            f" {kv_heads}, or a multiple of it"
        )


def refuse_few(how: VLLM, placement: Placement) -> None:
    """ConfigError where the machine lacks what each worker needs: a device, or on CPU a core."""
    if how.workers == 1 or how.url is not None:
        return
    if torch.cuda.is_available():
        if (have := torch.cuda.device_count()) < how.workers:
            raise ConfigError(f"engine.workers={how.workers} need a GPU each, and this process sees {have}: lower it")
        return
    own = 0 if isinstance(placement, Local) else placement.cores
    if (have := own or cores()) < how.workers:
        where = f"placement.cores={own} gives an engine" if own else "this process may use"
        raise ConfigError(
            f"engine.workers={how.workers} need a core each, because they spin while they wait for each other, and"
            f" {where} {have}: lower engine.workers{', or raise placement.cores' if own else ''}"
        )
