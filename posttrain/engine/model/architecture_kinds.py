"""Reads from config.json which architectures keep a recurrent state or have experts, and refuses what is not served:
those that cannot be trained here, whose weights cannot be checked in vLLM, or without equal bits in every batch.

This needs no torch, and no weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.system.errors import ConfigError, EngineError

WANTED = (
    "Use a decoder-only causal LM with full or sliding-window attention in every layer: Llama, Qwen3, Mistral, Gemma,"
    " GPT-2, ..., and of mixtures of experts Qwen3-MoE, Mixtral, DeepSeek-V3, ... (docs/reference/models.md)"
)
ALWAYS = ("falcon_h1", "falcon_mamba", "kimi_linear", "mamba", "mamba2", "zamba2")
"""Model types whose models all keep a recurrent state. They are computed sequence by sequence."""
BY_LAYERS = (
    "bamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Model types whose layers may keep a state; `LISTS` say which do. They are computed sequence by sequence too."""
NOT_SHOWN = ("bailing_hybrid", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba")
"""Model types that keep a state and are refused: nobody has shown that a sequence has the same hidden states in a batch
as alone. RecurrentGemma keeps its last sequence's state on the module, and RWKV rescales its weights between modes."""
A_LOG = "holds -exp(A_log) in place of A_log"  # how fast the state of a Mamba layer fades
IN_VLLM: Mapping[str, str] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), "holds the convolutions under other names (short_conv)"),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "bamba", "falcon_h1"), A_LOG),
    **dict.fromkeys(("granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), A_LOG),
}
"""Model types with a state -> why the weights that vLLM computes with cannot be read back as they were sent, by its
model files of 2026 (vllm/model_executor/models). A push to it would stop the run at the first step."""
LISTS = ("layer_types", "layers_block_type", "block_types")
"""Config fields that name the kind of each layer."""
STATES = ("linear", "mamba", "conv", "recurrent", "hybrid", "lstm", "ssm", "rwkv", "delta")
"""Parts of the names of kinds of layers that keep a state: "linear" is in `linear_attention`."""


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Returns whether a model of this config.json keeps a state that must not pass from one sequence to the next.
    EngineError, which names the architecture, where such a model cannot be trained here."""
    model_type = str(config.get("model_type", ""))
    # Models with several parts list the kinds of layers in the config of their text model.
    inner = config.get("text_config")
    listed = [_kinds(part) for part in (config, inner) if isinstance(part, Mapping)]
    states = sorted({k for kinds in listed for k in kinds if any(word in k for word in STATES)})
    if model_type in ALWAYS:
        return True
    if model_type in BY_LAYERS:
        # Without a list any layer may keep a state, and computing it sequence by sequence is right in any case.
        return bool(states) or not any(listed)
    # A type that is not known here is judged by the names of its layers, so that new architectures are refused, and not
    # computed with a state that runs from one sequence into the next.
    if model_type in NOT_SHOWN or states:
        layers = f" (layers of kind {', '.join(states)})" if states else ""
        raise EngineError(
            f"{model_type} keeps a recurrent state{layers}, and it was not shown that a batch of its sequences equals"
            f" each of them alone: gradients could be those of other sequences. {WANTED}, or one of"
            f" {', '.join(KNOWN)}"
        )
    return False


def refuse_vllm(config: Mapping[str, Any]) -> None:
    """ConfigError where vLLM is to serve a model of this config.json, and its served weights could not be checked."""
    model_type = str(config.get("model_type", ""))
    if keeps_state(config) and (why := IN_VLLM.get(model_type)):
        raise ConfigError(
            f"engine=vllm with {model_type}: the model keeps a recurrent state, and vLLM {why}, so the weights that it"
            " computes with could not be compared with those that are sent. Set engine=embedded, or take a model whose"
            " layers all attend"
        )


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config fields that say how many experts a layer has. Each architecture uses one of them."""


def refuse_same_bits(config: Mapping[str, Any]) -> None:
    """ConfigError where the embedded engine cannot give a model of this config.json equal bits in every batch, as
    `deterministic` or `exact` ask, because it computes it in batches of any shape."""
    parts = [p for p in (config, config.get("text_config")) if isinstance(p, Mapping)]
    counts = [p.get(field) for p in parts for field in EXPERTS]
    routes = any(isinstance(n, int) and n > 1 for n in counts)
    if routes or keeps_state(config):
        reason = "routes tokens to experts" if routes else "keeps a recurrent state, and is computed"
        raise ConfigError(
            f"deterministic=true and exact=true: {config.get('model_type')} {reason} in batches of any shape, so that"
            " bits depend on neighbours. Set deterministic=false exact=false"
        )


KNOWN = tuple(sorted({*ALWAYS, *BY_LAYERS}))
"""Model types with a state that can be trained."""


def _kinds(config: Mapping[Any, Any]) -> list[str]:
    lists = (config.get(name) for name in LISTS)
    return [
        str(kind) for kinds in lists if isinstance(kinds, Sequence) and not isinstance(kinds, str) for kind in kinds
    ]
