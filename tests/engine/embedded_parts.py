"""Tiny engines and workloads for the tests of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.embedded import EmbeddedEngine

V = 40
SIZES = {"vocab_size": V, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPE = SIZES | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, Any] = {
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**ROPE)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**{k: v for k, v in ROPE.items() if k != "head_dim"})),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**ROPE, original_max_position_embeddings=256)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**ROPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**ROPE, num_local_experts=4, num_experts_per_tok=2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**ROPE)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**ROPE, sliding_window=9)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**ROPE)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**ROPE, sliding_window=9)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**ROPE, sliding_window=9)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small run faster on one thread, above all where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def module(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose distributions are far from uniform; the same for the same seed."""
    torch.manual_seed(seed)
    built = FAMILIES[family]().eval()
    with torch.no_grad():
        for p in built.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return built.to(dtype)


def engine(family: str = "qwen3", slots: int = 4, context: int = 96, seed: int = 0, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(module(family, seed), slots=slots, context=context, **options)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, rng.integers(1, longest)).astype(np.int32) for _ in range(count)]


def sampling(**changes: Any) -> Sampling:
    return Sampling(**({"max_tokens": 20, "stop_ids": ()} | changes))


async def ask(
    e: EmbeddedEngine,
    asked: Sequence[np.ndarray],
    contract: Sampling | Sequence[Sampling],
    places: Sequence[int] | None = None,
) -> list[SampledTurn]:
    """All at once; request i has place i unless told."""
    contracts = [contract] * len(asked) if isinstance(contract, Sampling) else contract
    at = range(len(asked)) if places is None else places
    return await asyncio.gather(*[e.generate(x, s, p) for x, s, p in zip(asked, contracts, at, strict=True)])


def reference_logp(model: PreTrainedModel, prompt: np.ndarray, said: SampledTurn, contract: Sampling) -> np.ndarray:
    """float32 [n]: log-prob of what was said, from one full forward of the plain model and the kept sets."""
    whole = torch.from_numpy(np.concatenate([prompt, said.ids])).long()
    with torch.no_grad():
        z = model(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / contract.temperature
    if said.kept is not None:
        outside = torch.ones_like(z, dtype=torch.bool)
        for row, ids in zip(outside, said.kept.sets(), strict=True):
            row[ids.astype(np.int64)] = False
        z = z.masked_fill(outside, float("-inf"))
    return z.log_softmax(-1).numpy()[np.arange(len(said.ids)), said.ids]
