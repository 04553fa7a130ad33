"""A tiny config of every causal LM family of transformers that is tested: which run, and which are refused with which
sentence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, CONTEXT = 48, 64
SMALL: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim"), 32)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2)
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    )
    | dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_hidden_size"), 48
    )
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), CONTEXT)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_head_dim"),
        16,
    )
    | dict.fromkeys(
        ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8
    )
    | {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
    }
    | {
        "sliding_window": 8,
        "rotary_dim": 4,
        "is_decoder": True,
        "index_n_heads": 2,
        "index_topk": 8,
        "layer_types": None,
    }
    | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
)
"""Sizes by the names that configs have for them; a family takes those it knows."""
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "resid_pdrop": 0.0,
    },
    "dots1": {"n_shared_experts": 1},
    "falcon": {"alibi": False, "num_kv_heads": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_key_value_heads": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": LINEAR | {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "use_long_context": False,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "minimax_m3_vl_text": {"index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 2},
    "modernbert-decoder": {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "sep_token_id": 1,
        "local_attention": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
} | {
    name: {"num_key_value_heads": 4}
    for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CORE = _names(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text gpt2 mixtral phi3 phimoe dbrx opt biogpt stablelm"
    " nemotron deepseek_v3 qwen3_moe cohere olmo2 "
)
"""The families that are tested every time."""
RUNS = _names(
    "afmoe apertus arcee aria_text axk1 beam bert-generation biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm"
    " dbrx deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2"
    " gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode"
    " gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense"
    " hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum"
    " minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3"
    " olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm"
    " starcoder2 vaultgemma youtu "
)
"""Sampler and learner agree on a random model of each."""
KEEP_STATE = _names(
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h"
    " olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba2 "
)
"""The same of models with a recurrent state, whose sequences each get a row of their own."""
REFUSED: dict[str, tuple[str, str]] = {
    "do not attend once through transformers' attention interface": (
        (
            "Some layer adds biases to its scores (ALiBi), or computes attention in code of its own that cannot be led"
            " through ours."
        ),
        ("big_bird bloom codegen cpmant gpt_neox_japanese megatron-bert openai-gpt rembert roformer trocr xglm xlnet "),
    ),
    "keeps a recurrent state": (
        "It was not shown that a sequence in a batch is what it is alone.",
        "bailing_hybrid inkling2_text inkling_text lfm3 qwen4_exp_text recurrent_gemma rwkv xlstm zaya ",
    ),
    "changes its attention scores by": (
        "Attention has sinks, position biases or other terms beside query times key.",
        "deepseek_v4 flint gpt_oss granite_swa granitemoe_swa mimo_v2_flash ",
    ),
    "its logits differ from head": (
        "There are layers between the last hidden state and the head (masked language models used as decoders).",
        "bert camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl ",
    ),
    "cannot run with packed segments": (
        (
            "The model builds masks or biases that packed segments do not have: sparse attention by an indexer, ALiBi,"
            " languages."
        ),
        "axk2 deepseek_v32 glm_moe_dsa hy_v4 mpt xlm xmod ",
    ),
    "missing or used twice": (
        "A layer attends more than once a pass.",
        "diffllama hrm_text ",
    ),
    "makes a mask of its own": (
        "The attention makes its own mask from what it reads.",
        "doge ",
    ),
    "computes attention in code of its own and takes no other": (
        "Transformers has no place to put another attention in.",
        "falcon git gpt_neo gptj ",
    ),
    "no separate decoder and language-model head": (
        "Hidden states and head cannot be taken apart.",
        "llama4_text modernbert-decoder ",
    ),
    "by its attention mask alone": (
        "The window stands in transformers' mask alone.",
        "moshi ",
    ),
}
"""What the refusal says -> what it means, and the families it is said of."""
UNTRIED = _names(
    "bart bigbird_pegasus blenderbot blenderbot-small blt cohere_compass_text dots3_note dots3_note_text emu3 fuyu"
    " gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2 llama4 marian mbart"
    " mllama moss_transcribe_diarize musicgen musicgen_melody mvp pegasus phi4_multimodal plbart prophetnet qwen3_5"
    " qwen3_5_moe qwen4_exp reformer whisper zamba "
)
"""Encoder-decoders (refused when their config is read), models with images or sound, and configs that cannot be made
tiny."""


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """Two layers of width 32."""
    made = CONFIG_MAPPING[family]
    default = made()
    fields = default.to_dict()
    names = set(fields) | set(default.attribute_map)
    sizes = {n: v for n, v in SMALL.items() if n in names and default.attribute_map.get(n) not in SMALL}
    for name in ("sliding_window", "layer_types"):
        if fields.get(name) is None:
            sizes.pop(name, None)
    return made(**(sizes | SIZES.get(family, {}) | changes))


def build(made: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model as transformers builds it, whose distributions are far from uniform."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return module


def table() -> str:
    """The table of `docs/reference/models.md`."""
    lines = ["| | families of transformers |", "|---|---|", f"| **run** | {', '.join(RUNS)} |"]
    lines += [f"| **run**, each sequence in a row of its own: a recurrent state | {', '.join(KEEP_STATE)} |"]
    lines += [
        f'| refused: "{says}". {means} | {", ".join(_names(names))} |' for says, (means, names) in REFUSED.items()
    ]
    return "\n".join(
        [*lines, f"| not tried: encoder-decoders (refused), models with images or sound | {', '.join(UNTRIED)} |"]
    )
