"""The shape of a decoder from its `config.json`: how many parameters its parts have, and what a token's cache takes.

No weights are loaded. A row of `FAMILIES` has what a family of models adds to the common form: biases, norms of queries
and keys, and so on. The counts equal those of transformers' own classes (tests/plan/test_plan_shapes.py).

Letters: h hidden width, q and kv the widths of all query heads and of all key heads, f width of the feed-forward part,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from posttrain.system.errors import ConfigError, nearest
from posttrain.system.files import read_json


@dataclass(frozen=True)
class Family:
    """How a family differs from the common form: two norms a layer, a gated feed-forward part, and no biases."""

    qkv_bias: bool = False
    out_bias: bool = False
    norm_bias: bool = False
    feed_bias: bool = False
    gated: bool = True
    norms: int = 2
    """Norms of a layer, without those of queries and keys."""
    query_norms: str = ""
    """Norms of queries and keys: '' none, 'head' one of a head's width, 'all' one of all heads' width."""
    head_dim: int = 0
    """Width of a head where the config does not say it; 0: hidden / heads."""
    tied: bool = False
    """Whether the head shares the embedding, where the config does not say."""
    positions: bool = False
    """Whether positions have an embedding."""
    dense_at_first: int = 0
    """Layers without experts at the beginning, where the config does not say."""
    linear: tuple[tuple[str, str], ...] = ()
    """Its linear layers where they have other names than Llama's, and those of Llama's that each holds."""


QKV = "q_proj k_proj v_proj"
PHI3 = (("qkv_proj", QKV), ("o_proj", "o_proj"), ("gate_up_proj", "gate_proj up_proj"), ("down_proj", "down_proj"))
GPT2 = (("attn.c_attn", QKV), ("attn.c_proj", "o_proj"), ("mlp.c_fc", "up_proj"), ("mlp.c_proj", "down_proj"))
NEOX = (("query_key_value", QKV), ("dense", "o_proj"), ("dense_h_to_4h", "up_proj"), ("dense_4h_to_h", "down_proj"))
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(query_norms="head", head_dim=128),
    "gemma2": Family(norms=4, head_dim=256, tied=True),
    "gemma3_text": Family(norms=4, query_norms="head", head_dim=256, tied=True),
    "phi3": Family(linear=PHI3),
    "olmo2": Family(query_norms="all"),
    "olmo3": Family(query_norms="all"),
    "smollm3": Family(tied=True),
    "gpt2": Family(True, True, True, True, gated=False, tied=True, positions=True, linear=GPT2),
    "gpt_neox": Family(True, True, True, True, gated=False, linear=NEOX),
    "mixtral": Family(),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3_moe": Family(query_norms="head"),
    "glm4_moe": Family(dense_at_first=1),
    "deepseek_v3": Family(dense_at_first=3),
    "gpt_oss": Family(True, True, head_dim=64),
}
"""By `model_type` of the config."""


@dataclass(frozen=True)
class Experts:
    """The feed-forward parts of a mixture: each token goes through a few of them."""

    count: int
    """Experts of a layer."""
    active: int
    """Experts that a token goes through."""
    width: int
    """Width of one expert."""
    shared: int
    """Width of the part that every token also goes through; 0: there is none."""
    shared_gate: bool
    """Whether the shared part has a gate of its own."""
    biased: bool
    """Whether experts and router have biases."""
    dense: int
    """Layers at the beginning that have one plain feed-forward part instead."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values come from one short vector a token."""

    query_rank: int
    """Width of the short vector that queries are made from; 0: they are made in one step."""
    rank: int
    """Width of the short vector that keys and values are made from."""
    rope: int
    """Width of the part of a key that carries the position, one for all heads."""
    plain: int
    """Width of the other part of a head's key."""
    value: int
    """Width of a head's value."""


LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""Where a config has the sizes of latent attention, the first left out, which it may lack."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder.

    >>> tiny = shape_of({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...                  "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100})
    >>> tiny.parameters, tiny.cache_bytes(2)
    (74560, 256)
    """

    family: str
    form: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed: int
    vocabulary: int
    tied: bool
    positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one layer's attention."""
        h, n = self.hidden, self.heads
        if (x := self.latent) is None:
            q, kv = n * self.head_dim, self.kv_heads * self.head_dim
            return {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        # DeepSeek-V2: queries, and keys with values, come from one short vector each.
        keys, short = n * (x.plain + x.rope), x.query_rank
        queries = {"q_a_proj": (h, short), "q_b_proj": (short, keys)} if short else {"q_proj": (h, keys)}
        keys_values = {"kv_a_proj_with_mqa": (h, x.rank + x.rope), "kv_b_proj": (x.rank, n * (x.plain + x.value))}
        return queries | keys_values | {"o_proj": (n * x.value, h)}

    @property
    def attention(self) -> int:
        """Parameters of the attention of one layer."""
        matrices = sum(i * o for i, o in self.projections.values())
        if self.latent is not None:
            return matrices + self.latent.query_rank + self.latent.rank  # a norm over each short vector
        form, q, kv = self.form, self.heads * self.head_dim, self.kv_heads * self.head_dim
        # One norm for queries and one for keys. A norm of a head's width is shared by all heads.
        norms = {"": 0, "head": 2 * self.head_dim, "all": q + kv}[form.query_norms]
        biases = (q + 2 * kv) * form.qkv_bias + self.hidden * form.out_bias
        sinks = self.heads * (self.family == "gpt_oss")  # a logit a head that takes attention away from all tokens
        return matrices + norms + biases + sinks

    def feed_forward(self, width: int) -> int:
        """Parameters of one feed-forward part of this width."""
        # With a gate two matrices lead into the part, and one leads out.
        into = 2 * width if self.form.gated else width
        return self.hidden * into + width * self.hidden + (into + self.hidden) * self.form.feed_bias

    def mixture(self, x: Experts, experts: int) -> int:
        """Parameters of `experts` experts of one layer and its router."""
        # The router has a row for each expert, and where experts are biased also a bias.
        one = self.feed_forward(x.width) + (2 * x.width + self.hidden) * x.biased
        return experts * one + x.count * (self.hidden + x.biased)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters by part, in all layers together."""
        x, h = self.experts, self.hidden
        dense = self.layers if x is None else min(x.dense, self.layers)
        # The shared part of a mixture: every token goes through it.
        shared = self.feed_forward(x.shared) + h * x.shared_gate if x is not None and x.shared else 0
        counts = {
            "embedding": self.vocabulary * h + self.positions * h,
            "attention": self.layers * self.attention,
            "feed-forward": dense * self.feed_forward(self.feed) + (self.layers - dense) * shared,
            "experts": (self.layers - dense) * self.mixture(x, x.count) if x is not None else 0,
            # The norms of all layers, and the last norm before the head.
            "norms": (self.layers * self.form.norms + 1) * h * (1 + self.form.norm_bias),
            "head": 0 if self.tied else self.vocabulary * h,
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def parameters(self) -> int:
        """All parameters; a head that shares the embedding counts once."""
        return sum(self.parts.values())

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with. The embedding's table is looked up and not multiplied; where
        the head shares it, it counts once, as the head."""
        unused, x = 0, self.experts
        if x is not None:
            unused = (self.layers - min(x.dense, self.layers)) * (self.mixture(x, x.count) - self.mixture(x, x.active))
        return self.parameters - unused - self.parts["embedding"] + self.vocabulary * self.hidden * self.tied

    def cache_bytes(self, bytes_each: float = 2, *, shared: bool = True) -> int:
        """Bytes that one token's keys and values take in all layers. A latent cache keeps the short vector and the part
        with the position. Without `shared`: as if each query head had keys and values of its own (MHA)."""
        x, heads = self.latent, self.kv_heads if shared else self.heads
        if x is None:
            return round(2 * self.layers * heads * self.head_dim * bytes_each)
        return round(self.layers * bytes_each * (x.rank + x.rope if shared else heads * (x.plain + x.rope + x.value)))

    def attending(self, length: int) -> int:
        """Operations of attention for one token that reads `length` cached ones, in all layers."""
        x = self.latent
        # A head reads a token twice: its key for the score and its value for the sum. A latent one is not unfolded: its
        # short vector is read both times, and the part with the position once.
        width = 2 * self.head_dim if x is None else 2 * x.rank + x.rope
        # A multiplication and an addition each.
        return 2 * self.layers * self.heads * width * length


def shape_of(config: Mapping[str, Any], name: str = "the config") -> ModelShape:
    """The shape that a `config.json` describes. For a model with an image part it is the shape of its language model.

    Raises:
        ConfigError: it is no decoder of a known family, or a size is missing or not a whole number above 0.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        known = nearest(family, FAMILIES)
        raise ConfigError(f"{name}: model_type={family!r} is no decoder whose shape is known; {known}")
    form = FAMILIES[family]
    biased = bool(config.get("attention_bias", form.qkv_bias))
    form = replace(
        form,
        qkv_bias=biased,
        # In the other families `attention_bias` gives no bias to the output projection.
        out_bias=form.out_bias or (biased and family in ("llama", "qwen3", "qwen3_moe")),
        feed_bias=bool(config.get("mlp_bias", form.feed_bias)),
        query_norms="head" if config.get("use_qk_norm") else form.query_norms,
    )
    size = partial(_size, config, name)
    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads, vocabulary = size("num_attention_heads", "n_head"), size("vocab_size")
    return ModelShape(
        family=family,
        form=form,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if family in ("gpt2", "gpt_neox") else size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=form.head_dim or hidden // heads),
        feed=size("n_inner", default=4 * hidden) if family == "gpt2" else size("intermediate_size"),
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", form.tied)),
        positions=size("n_positions", default=1024) if form.positions else 0,
        experts=_experts(config, name, form),
        latent=Latent(size("q_lora_rank", default=0, least=0), *map(size, LATENT)) if family == "deepseek_v3" else None,
    )


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model that lies in a folder; ConfigError where that has no `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json, so it is no model's folder")
    return shape_of(read_json(path), str(path))


def _size(config: Mapping[str, Any], name: str, *keys: str, default: int | None = None, least: int = 1) -> int:
    """The first of these settings that the config has, checked to be a whole number of at least `least`."""
    value = next((config[k] for k in keys if config.get(k) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**9:
        raise ConfigError(f"{name}: {keys[0]}={value!r} must be a whole number of at least {least}")
    return value


def _experts(config: Mapping[str, Any], name: str, form: Family) -> Experts | None:
    """The experts of a mixture; None for a dense model."""
    if config["model_type"] not in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"):
        return None
    width = _size(config, name, "moe_intermediate_size", "intermediate_size")
    count = _size(config, name, "num_local_experts", "num_experts", "n_routed_experts")
    # A shared part is given as a number of experts (DeepSeek, GLM) or as a width (Qwen2-MoE).
    shared = _size(config, name, "n_shared_experts", default=0, least=0) * width
    return Experts(
        count=count,
        active=min(count, _size(config, name, "num_experts_per_tok", "experts_per_token")),
        width=width,
        shared=_size(config, name, "shared_expert_intermediate_size", default=shared, least=0),
        shared_gate="shared_expert_intermediate_size" in config,
        biased=config["model_type"] == "gpt_oss",
        dense=_size(config, name, "first_k_dense_replace", default=form.dense_at_first, least=0),
    )
