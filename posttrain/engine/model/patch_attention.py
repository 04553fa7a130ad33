"""Architectures whose attention is code of their own. It is replaced by ours (`attention.attend`).

Most architectures of transformers look up their attention function by name. These compute it in place, from the same
queries, keys and values. So one method of each attention module is replaced, on the module itself. Its class, its
weights and what is saved do not change. Attention that needs more than keys and values (ALiBi's biases, recurrent
state) cannot be replaced so and is refused.

Shapes: N packed positions, H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.engine.layers import attention
from posttrain.engine.model.architecture_kinds import WANTED
from posttrain.system.errors import EngineError

REROUTED = ("gptj", "codegen", "gpt_neo", "gpt_neox_japanese", "falcon", "xglm")
"""Model types whose attention is replaced: transformers builds them with its plain attention (`implementation`), and
`route_attention` puts ours in its place."""


def implementation(config: PreTrainedConfig) -> str:
    """The attention implementation that transformers must build this model with."""
    return "eager" if config.model_type in REROUTED else attention.NAME


def route_attention(module: PreTrainedModel) -> None:
    """Route every attention of `module` through `attention.attend` from now on.

    Raises:
        EngineError: transformers offers no way to replace the attention of this architecture.
    """
    attention.register()
    led = [part for part in module.modules() if type(part).__name__ in _REROUTE]
    for part in led:
        name, method = _REROUTE[type(part).__name__]
        setattr(part, name, partial(method, part))  # a bound method is pickled as the name of the class's own
    config = module.config.get_text_config(decoder=True)
    if led:
        config._attn_implementation = attention.NAME
    elif config._attn_implementation != attention.NAME:
        try:
            module.set_attn_implementation(attention.NAME)
        except (ValueError, KeyError, ImportError, AttributeError) as error:
            raise EngineError(
                f"{type(module).__name__} computes attention in code of its own and takes no other"
                f" ({type(error).__name__}: {error}). {WANTED}"
            ) from error


@contextmanager
def as_built(module: PreTrainedModel) -> Iterator[None]:
    """Inside, `module` attends with transformers' own plain code, and the layout has no effect."""
    led = [(p, _REROUTE[type(p).__name__][0]) for p in module.modules() if type(p).__name__ in _REROUTE]
    replaced = [(p, name, p.__dict__.pop(name)) for p, name in led if name in p.__dict__]
    configs = {id(c): c for p in module.modules() if (c := getattr(p, "config", None)) is not None}
    ours = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == attention.NAME]
    for config in ours:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config in ours:
            config._attn_implementation_internal = attention.NAME
        for part, name, method in replaced:
            part.__dict__[name] = method


def _attended(
    part: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, H, N, D], computed as wide as the widest of them."""
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    out, _ = attention.attend(part, query.to(wide), key.to(wide), value.to(wide), None, scaling, sliding_window=window)
    return out.transpose(1, 2).to(value.dtype)


def _gptj(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """GPT-J and CodeGen: scores are divided by the root of the head width."""
    return _attended(self, query, key, value, 1 / float(self.scale_attn)), None


def _gpt_neo(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """GPT-Neo: scores are not scaled, and every other layer sees a window."""
    self.layer_idx = self.layer_id
    window = self.config.window_size if self.attention_type == "local" else None
    return _attended(self, query, key, value, 1.0, window), None


def _gpt_neox_japanese(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    return _attended(self, query, key, value, 1 / float(self.norm_factor)), None


def _falcon(self: Any, hidden_states: Tensor, alibi: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Falcon with rotary positions. ALiBi's biases are refused."""
    if alibi is not None:
        raise EngineError(
            f"{type(self).__name__} adds ALiBi's position biases to its attention scores, which are not applied here."
            f" {WANTED}"
        )
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    rotate: Callable[..., tuple[Tensor, Tensor]] = importlib.import_module(type(self).__module__).apply_rotary_pos_emb
    query, key = rotate(query, key, *kwargs["position_embeddings"])
    return self.dense(_attended(self, query, key, value, self.inv_norm_factor).transpose(1, 2).flatten(2)), None


def _xglm(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    split = hidden_states.shape[-1] // self.head_dim, self.head_dim
    query, key, value = (
        p(hidden_states).unflatten(-1, split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(_attended(self, query, key, value, self.scaling).transpose(1, 2).flatten(2)), None


_REROUTE: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "GPTJAttention": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "FalconAttention": ("forward", _falcon),
    "XGLMAttention": ("forward", _xglm),
}
"""The method that `route_attention` replaces on each module of this class, and by what."""
