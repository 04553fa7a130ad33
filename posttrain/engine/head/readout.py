"""Hidden states and logits of any Hugging Face causal LM. All other modules read them here.

Axis letters: N packed positions, M of them read out, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.engine.head.logit_transform import logits as head_logits
from posttrain.engine.layers.attention import AttentionCall, Layout, PackedLayout, using
from posttrain.engine.layers.embedding_gradient import LookUp, rows_at
from posttrain.engine.model.architecture_kinds import WANTED
from posttrain.system.errors import EngineError

SCALES = {"logit_scale": False, "logits_scaling": True, "lm_head_multiplier": False}
"""Config fields by which architectures scale their logits (Cohere, Granite, Falcon-H1), and whether it divides."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Config fields by which architectures cap their logits (Gemma 2, RecurrentGemma)."""
CANARY = 24
"""Tokens of the sequence on which two computations of a model are compared; fewer in a shorter context."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Config fields in which architectures store their number of positions."""


@dataclass(frozen=True, eq=False)
class ReadOut:
    """Decoder and head of a Hugging Face causal LM, separated: hidden states first, logits only where needed.

    logits = cap(scale * (hidden @ weight.T + bias)), cap(x) = softcap * tanh(x / softcap) where there is a softcap.
    """

    decoder: nn.Module
    head: nn.Module
    scale: float
    softcap: float | None
    look_up: LookUp | None = None
    """The look-up of the embedding; None where the embedding is not a plain one."""

    @property
    def weight(self) -> Tensor:
        """[V, hidden]"""
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V]"""
        return getattr(self.head, "bias", None)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [N, hidden] of packed `input_ids` ([N] or [1, N]), without cache, mask and logits."""
        return self._run(input_ids.view(1, -1), position_ids.view(1, -1), layout)[0]

    def hidden_at(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, at_M: np.ndarray) -> Tensor:
        """[M, hidden]: the hidden states at the packed positions `at_M`, in which a position may stand twice."""
        return rows_at(self.hidden(input_ids, position_ids, layout), at_M)

    def rows(self, ids_BL: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [B, L, hidden] of a batch of sequences, one in each row."""
        at = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(len(ids_BL), -1)
        return self._run(ids_BL, at, layout)

    def _run(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        with using(layout), nullcontext() if self.look_up is None else self.look_up.looked_up():
            out = self.decoder(input_ids=ids, use_cache=False, **takes_positions(self.decoder, positions))
        return out.last_hidden_state

    def headless(self) -> AbstractContextManager[None]:
        """Inside, no head reads the hidden states that are computed; see `LookUp.headless`."""
        return nullcontext() if self.look_up is None else self.look_up.headless()

    def weight_to_read(self) -> Tensor:
        """`weight` for the head that reads the hidden states of the last pass. Where the embedding shares it, it is the
        node of the pass's look-up: the gradients of both uses then arrive there (`embedding_gradient`)."""
        node = None if self.look_up is None else self.look_up.take()
        return self.weight if node is None else node

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] in float32 (float64 for a float64 model), by the same function as the learner's head."""
        return head_logits(hidden, self.weight, self.bias, self.scale, self.softcap)


def canary(weight: Tensor, length: int = CANARY) -> tuple[Tensor, Tensor]:
    """(ids, positions) of a sequence for this head: multiples of a prime, so tokens from all over the vocabulary."""
    at = torch.arange(length, device=weight.device)
    return at * 7919 % weight.shape[0], at


def takes_positions(module: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """`position_ids` as an argument, for a model that has positions. Mamba has none."""
    return {"position_ids": positions} if "position_ids" in inspect.signature(module.forward).parameters else {}


def positions(module: PreTrainedModel) -> int | None:
    """The number of positions in the config; None where it has no bound."""
    config = module.config.get_text_config(decoder=True)
    return next((int(v) for v in (getattr(config, name, None) for name in POSITIONS) if v and int(v) > 0), None)


def read_out(module: PreTrainedModel) -> ReadOut:
    """The read-out of `module`, not checked: `check_read_out` compares it with the module's own logits."""
    head = module.get_output_embeddings()
    decoder = module.get_decoder()
    if head is None or not hasattr(head, "weight") or decoder is module or decoder is head:
        raise EngineError(
            f"{type(module).__name__} has no separate decoder and language-model head, so its log-probs cannot be read"
            " out. Use a decoder-only causal LM with an lm_head (the *ForCausalLM architectures)"
        )
    config = module.config.get_text_config(decoder=True)
    scale = 1.0
    for name, divides in SCALES.items():
        value = getattr(config, name, None)
        if value is not None:
            # To divide by 0 would raise here. With nan the comparison of `check_read_out` refuses the model.
            scale = scale / (float(value) or math.nan) if divides else scale * float(value)
    softcap = next((c for c in (getattr(config, name, None) for name in CAPS) if c is not None), None)
    return ReadOut(decoder, head, scale, None if softcap is None else float(softcap), LookUp.of(decoder, head))


class _WindowProbe(PackedLayout):
    """A packed layout that records whether any layer asked for a sliding window."""

    seen = False

    def attend(self, call: AttentionCall) -> Tensor:
        self.seen |= call.window is not None
        return super().attend(call)


def _check_windows(module: PreTrainedModel, context: int | None, seen: bool) -> None:
    """EngineError where the config limits what a position sees but no layer passes that limit to our attention: some
    architectures (Phi-3.5-MoE) apply their window only in transformers' mask, and all apply chunked attention there."""
    config = module.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    for field, kind in (("sliding_window", "sliding"), ("attention_chunk_size", "chunked")):
        size = getattr(config, field, None)
        # A limit matters if it is on, a layer type uses it, no layer told it, and a sequence can be longer than it.
        used = getattr(config, f"use_{field}", None) is not False and (not kinds or any(kind in k for k in kinds))
        layer_told = seen and kind == "sliding"
        if isinstance(size, int) and size > 0 and used and not layer_told and (context is None or size < context):
            raise EngineError(
                f"{type(module).__name__} has {field}={size} and keeps it by its attention mask alone, which is not"
                f" used here: sequences beyond {size} tokens would be computed with full attention. Use an architecture"
                " whose layers are given their window (Mistral, Qwen, Gemma, ...); or, if no sequence is longer, set"
                f" max_position_embeddings={size} in its config.json"
            )


@torch.no_grad()
def check_read_out(module: PreTrainedModel, out: ReadOut, context: int | None = None) -> float:
    """Largest difference between our logits and the module's own on a canary. EngineError where it is too large, or
    where positions would see more than the config allows.

    Args:
        context: most tokens of a sequence; None: as many as the config has positions.

    The bound is relative to the largest logit: 1e-4 in float32, 0.05 in bfloat16 (whose own head rounds its logits).
    """
    ids, at = canary(out.weight, min(CANARY, positions(module) or CANARY))
    layout = _WindowProbe([len(at)])
    try:
        # Both sides run the same decoder with the same attention: only what comes after it may differ.
        ours = out.logits(out.hidden(ids, at, layout))
        with using(layout):
            position_argument = takes_positions(out.decoder, at[None])
            theirs = module(input_ids=ids[None], use_cache=False, **position_argument).logits[0].to(ours.dtype)
    # Code of an unknown architecture runs here. Where it is not made for packed segments, it may raise any of these.
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"{type(module).__name__} cannot run with packed segments ({type(error).__name__}: {error}). Use a"
            " decoder-only causal LM whose attention goes through transformers' attention interface (Llama, Qwen,"
            " Gemma, GPT-2, ...)"
        ) from error
    # After the forward pass, in which the layers say whether they have a window.
    _check_windows(module, context or positions(module), layout.seen)
    gap = float((ours - theirs).abs().max())
    bound = (1e-4 if out.weight.dtype in (torch.float32, torch.float64) else 0.05) * max(1.0, float(theirs.abs().max()))
    # Written as `not <=`, so that NaN is refused as well.
    if not gap <= bound:
        raise EngineError(
            f"{type(module).__name__}: its logits differ from head(decoder(ids)) by {gap:.3g} (bound {bound:.3g}), so"
            f" it does something between decoder and logits that posttrain does not know. {WANTED}, or"
            f" add its scale or cap to `SCALES` in {__name__}"
        )
    return gap
