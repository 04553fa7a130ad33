"""The shapes of models that people post-train, by name: the settings of their published `config.json`.

Each row holds what decides the shape and nothing else. The names are those of the Hugging Face hub without the owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.plan.shapes import ModelShape, shape_of
from posttrain.system.errors import ConfigError, nearest


def _config(family: str, hidden: int, layers: int, heads: int, kv: int, feed: int, words: int, **more: Any) -> Any:
    """A `config.json`: `kv` key heads, `feed` the width of the feed-forward part, `words` of the vocabulary."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": feed,
        "vocab_size": words,
        **more,
    }


TIED = {"tie_word_embeddings": True}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _config("gpt2", 768, 12, 12, 12, 3072, 50257, n_positions=1024),
    "pythia-1.4b": _config("gpt_neox", 2048, 24, 16, 16, 8192, 50304),
    "SmolLM2-135M": _config("llama", 576, 30, 9, 3, 1536, 49152, **TIED),
    "SmolLM2-360M": _config("llama", 960, 32, 15, 5, 2560, 49152, **TIED),
    "SmolLM2-1.7B": _config("llama", 2048, 24, 32, 32, 8192, 49152, **TIED),
    "SmolLM3-3B": _config("smollm3", 2048, 36, 16, 4, 11008, 128256),
    "Llama-3.2-1B": _config("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED),
    "Llama-3.2-3B": _config("llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED),
    "Llama-3.1-8B": _config("llama", 4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _config("llama", 8192, 80, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _config("llama", 16384, 126, 128, 8, 53248, 128256),
    "Qwen2.5-0.5B": _config("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED),
    "Qwen2.5-1.5B": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, **TIED),
    "Qwen2.5-3B": _config("qwen2", 2048, 36, 16, 2, 11008, 151936, **TIED),
    "Qwen2.5-7B": _config("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _config("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _config("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _config("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "Qwen3-0.6B": _config("qwen3", 1024, 28, 16, 8, 3072, 151936, **TIED),
    "Qwen3-1.7B": _config("qwen3", 2048, 28, 16, 8, 6144, 151936, **TIED),
    "Qwen3-4B": _config("qwen3", 2560, 36, 32, 8, 9728, 151936, **TIED),
    "Qwen3-8B": _config("qwen3", 4096, 36, 32, 8, 12288, 151936),
    "Qwen3-14B": _config("qwen3", 5120, 40, 40, 8, 17408, 151936),
    "Qwen3-32B": _config("qwen3", 5120, 64, 64, 8, 25600, 151936),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-235B-A22B": _config(
        "qwen3_moe", 4096, 94, 64, 4, 12288, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "Mistral-7B-v0.3": _config("mistral", 4096, 32, 32, 8, 14336, 32768),
    "Mixtral-8x7B": _config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "gemma-2-2b": _config("gemma2", 2304, 26, 8, 4, 9216, 256000),
    "gemma-2-9b": _config("gemma2", 3584, 42, 16, 8, 14336, 256000),
    "Phi-3-mini": _config("phi3", 3072, 32, 32, 32, 8192, 32064),
    "OLMo-2-7B": _config("olmo2", 4096, 32, 32, 32, 11008, 100352),
    "OLMo-2-32B": _config("olmo2", 5120, 64, 40, 8, 27648, 100352),
    "gpt-oss-20b": _config("gpt_oss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, num_experts_per_tok=4),
    "DeepSeek-V3": _config(
        "deepseek_v3", 7168, 61, 128, 128, 18432, 129280,
        q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
}  # fmt: skip


def shape_by_name(name: str) -> ModelShape:
    """The shape of a model of the table, whatever its capital letters; ConfigError suggests the nearest name.

    >>> shape_by_name("qwen2.5-0.5b").parameters
    494032768
    """
    by_lower = {n.lower(): n for n in MODELS}
    # `Qwen/Qwen3-8B` of the hub is `Qwen3-8B` here.
    listed = by_lower.get(name.rpartition("/")[2].lower())
    if listed is None:
        raise ConfigError(f"no shape of a model {name!r} is known here; {nearest(name, MODELS)}; or give its folder")
    return shape_of(MODELS[listed], listed)
