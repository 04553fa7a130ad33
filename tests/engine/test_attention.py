"""Packed attention equals separate forwards, forward and backward, on every architecture family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.engine.layers import attention
from posttrain.engine.layers.attention import PackedLayout, buckets
from posttrain.system.errors import EngineError

SIZES = {"vocab_size": 40, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPE = SIZES | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
}
LENGTHS = (5, 17, 1, 30, 16, 15, 31, 2)
FAMILIES: list[tuple[type[PreTrainedModel], PreTrainedConfig]] = [
    (tf.Qwen3ForCausalLM, tf.Qwen3Config(**ROPE)),
    (tf.LlamaForCausalLM, tf.LlamaConfig(**ROPE)),
    (tf.GemmaForCausalLM, tf.GemmaConfig(**ROPE)),
    (tf.Gemma2ForCausalLM, tf.Gemma2Config(**ROPE, sliding_window=7)),
    (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**ROPE, sliding_window=7)),
    (tf.MistralForCausalLM, tf.MistralConfig(**ROPE, sliding_window=7)),
    (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    ),
]


def models(family: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same weights under our attention and under transformers' eager one."""
    attention.register()
    torch.manual_seed(0)
    ours = family._from_config(config, attn_implementation=attention.NAME).eval()
    theirs = family._from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=[f.__name__ for f, _ in FAMILIES])
def test_packed_equals_separate(family: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    ours, theirs = models(family, config)
    ids = torch.randint(0, 40, (sum(LENGTHS),))
    at = torch.cat([torch.arange(n) for n in LENGTHS])
    with attention.using(PackedLayout(LENGTHS)):
        packed = ours(input_ids=ids[None], position_ids=at[None], use_cache=False).logits[0]
    separate = torch.cat([theirs(input_ids=i[None], use_cache=False).logits[0] for i in ids.split(LENGTHS)])
    assert (packed - separate).abs().max() < 2e-6
    weight = torch.randn_like(packed)
    (packed * weight).sum().backward()
    (separate * weight).sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            assert (a.grad - b.grad).abs().max() <= 1e-5 * (1 + b.grad.abs().max()), name


def test_buckets_waste_little() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int64) + 1
    groups = buckets(lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(300))
    computed = sum(count * longest for count, longest in PackedLayout(lengths).shapes)
    assert lengths.sum() <= computed <= lengths.sum() / 0.88
    assert len(groups) < 40
    assert sum(count * longest for count, longest in PackedLayout(lengths, waste=0).shapes) == lengths.sum()


def test_what_a_layout_would_ignore_is_refused() -> None:
    module, x = torch.nn.Identity(), torch.zeros(1, 2, 3, 4)
    layout = PackedLayout([3])
    with pytest.raises(EngineError, match="needs a layout"):
        attention.attend(module, x, x, x, None)
    with attention.using(layout):
        with pytest.raises(EngineError, match="attention_mask"):
            attention.attend(module, x, x, x, torch.zeros(1))
        with pytest.raises(EngineError, match="dropout"):
            attention.attend(module, x, x, x, None, dropout=0.1)
        with pytest.raises(EngineError, match="s_aux"):
            attention.attend(module, x, x, x, None, s_aux=x)
        with pytest.raises(EngineError, match="not causal"):
            attention.attend(module, x, x, x, None, is_causal=False)
    with pytest.raises(EngineError, match="packed positions"):
        PackedLayout([2]).attend(attention.AttentionCall(module, x, x, x, 1.0))
    with pytest.raises(EngineError, match="positive lengths"):
        PackedLayout([2, 0])
