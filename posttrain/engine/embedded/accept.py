"""Which models the engine serves: decoder-only, every layer's past in the keys and values of one causal attention.

Whatever else a model remembers (recurrent state, a rope that depends on the longest neighbour, experts with a batch
shape of their own under `deterministic`) would make a token depend on its neighbours in silence, so it is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.core.errors import EngineError
from posttrain.engine import attention
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.cache import LayerShape
from posttrain.engine.models import check_read_out, read_out
from posttrain.engine.readout import ReadOut, positions

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WANTED = "Use a decoder-only causal LM with full or sliding-window attention in every layer (Llama, Qwen3, Mistral, Gemma, GPT-2, ...)"


class _Probe(PackedLayout):
    """A packed layout that writes down which layers attend, and what they would cache."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.seen: dict[int, LayerShape] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.seen:
            raise EngineError(
                f"{type(module).__name__} has layer index {layer!r}, missing or used twice, so its cache has no place. {WANTED}"
            )
        self.seen[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        return super().attend(module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)


def accept(module: PreTrainedModel, context: int, deterministic: bool) -> tuple[ReadOut, list[LayerShape]]:
    """The read-out of a model this engine can serve, and what each layer caches; EngineError says why not.

    The model's attention is set to `attention.NAME`.
    """
    name, config = type(module).__name__, module.config.get_text_config(decoder=True)
    if module.config.is_encoder_decoder:
        raise EngineError(f"{name} is an encoder-decoder. {WANTED}")
    bound = positions(module)
    if bound is not None and context > bound:
        raise EngineError(f"context={context} exceeds the {bound} positions of {name}. Set context to at most {bound}")
    _check_rope(config, name, context)
    if deterministic and any((getattr(config, field, None) or 0) > 1 for field in EXPERTS):
        raise EngineError(f"{name} routes tokens to experts in batches of any shape: bits depend on neighbours. Set deterministic=false")
    attention.register()
    if config._attn_implementation != attention.NAME:
        module.set_attn_implementation(attention.NAME)
    out = read_out(module)
    device = out.weight.device
    at = torch.arange(min(4, context), device=device)
    probe = _Probe(len(at))
    with torch.no_grad():
        try:
            out.hidden(at % out.weight.shape[0], at, probe)
        except (TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise EngineError(f"{name} cannot run on a paged cache ({type(error).__name__}: {error}). {WANTED}") from error
    layers = int(config.num_hidden_layers)
    if sorted(probe.seen) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(probe.seen))
        raise EngineError(f"layers {missing} of {name} do not attend through the attention interface (recurrent?). {WANTED}")
    check_read_out(module, out, context)
    return out, [probe.seen[i] for i in range(layers)]


def _check_rope(config: object, name: str, context: int) -> None:
    """Refuse a rope whose frequencies depend on the longest sequence of the batch, where `context` lets it."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            original = original or getattr(config, "max_position_embeddings")  # noqa: B009
            if context > original:
                raise EngineError(
                    f"{name} has {kind['rope_type']} rope: its frequencies change for all once one sequence passes {original} tokens. "
                    f"Set context to at most {original}"
                )
