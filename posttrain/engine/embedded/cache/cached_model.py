"""A model with a pool of cached keys and values: its forward passes and its read-out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.core.gauge import Gauge
from posttrain.engine.embedded.cache.forward_plan import Plan
from posttrain.engine.embedded.cache.fused_decoder import FusedDecoder, fusable
from posttrain.engine.embedded.cache.key_value_cache import CachedLayout, CachePool, RoutedPool, ragged_arange
from posttrain.engine.embedded.load_weights import replace_weights
from posttrain.engine.embedded.schedule.slots import Slots
from posttrain.engine.head.float32_head import prove_logits
from posttrain.engine.head.kernel_table import kernel
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.layers.expert_routing import Routing, routers_of
from posttrain.engine.model.architecture_kinds import refuse_same_bits
from posttrain.engine.model.supported_models import LayerShape, accept
from posttrain.system.errors import EngineError

PREFILL_WASTE = 0.01
"""Most padding of dense prefill, as a share of the positions it computes."""


class CachedModel:
    """`module` with its key-value cache.

    Args:
        rows: compute logits on this many rows in every pass, so that their bits do not depend on other requests;
            None: on as many as needed.
        kernels: the choice of kernels (`Model.kernels`).
    """

    others: tuple[CachePool, ...] = ()
    """Pools of other models, which cache each token in the same row as `pool`."""

    def __init__(
        self,
        module: PreTrainedModel,
        context: int,
        *,
        device: str,
        rows: int | None = None,
        kernels: KernelChoice = "auto",
    ) -> None:
        if rows is not None:
            refuse_same_bits(module.config.to_dict())
        self.module = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.read_out, shapes = accept(module, context)
        prove_logits(self.read_out)
        self.kernels: KernelChoice = kernels
        self._logit_rows = rows
        self._make_cache(shapes, context)

    def _make_cache(self, shapes: list[LayerShape], context: int) -> None:
        """Make the pool, for layers of these shapes, and the decoder that reads it. `RecomputedModel` overrides it."""
        module, device = self.module, self.read_out.weight.device
        # A recurrent state. Only a draft model has one here: for an engine `served_model` makes a `RecomputedModel`.
        if not shapes:
            raise EngineError(
                f"{type(module).__name__} keeps a recurrent state, so it cannot draft. Leave engine.draft out"
            )
        has_experts = routers_of(module) is not None
        self.pool = (RoutedPool if has_experts else CachePool)(shapes, module.dtype, device, self.kernels)
        # A model of another family runs its own decoder, which is the reference form here.
        form = kernel("decoder", device, module.dtype, self.kernels if fusable(module) else "reference")
        self._decoder = decoder = form.function(module, self.read_out, context)
        self.hidden = decoder.hidden
        self.fused = isinstance(decoder, FusedDecoder)
        """Whether the decoder is the fused one (`fused_decoder.FusedDecoder`)."""
        self.lanes = decoder.lanes if isinstance(decoder, FusedDecoder) else 1
        """The decoder computes positions in groups of this size (`forward_plan.room_in_lanes`)."""

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy new weights into the module, all of them or none."""
        replace_weights(self.module, tensors)
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.refresh()

    @property
    def vocabulary(self) -> int:
        """Rows of the head: the ids that have a logit."""
        return self.read_out.weight.shape[0]

    def run(self, plan: Plan) -> tuple[Tensor, PackedLayout | None]:
        """(hidden states [N, H] of a plan's positions, which are cached; layout of its dense pieces)."""
        dense = PackedLayout(plan.dense, waste=PREFILL_WASTE, kernels=self.kernels) if plan.dense else None
        layout = CachedLayout(self.pool, plan.rows, plan.visible, plan.lengths, dense, plan.chunks, plan.starts)
        layout.routing = routing = Routing() if isinstance(self.pool, RoutedPool) else None
        hidden = self.hidden(self._to(plan.ids), self._to(plan.positions), layout)
        if isinstance(self.pool, RoutedPool) and routing is not None:
            self.pool.keep(plan.rows, routing)
        return hidden, dense

    def routed(self, rows: np.ndarray) -> np.ndarray | None:
        """int16 [T, R, K]: the experts that computed the tokens in these pool rows; None where there are none."""
        return self.pool.routed(rows) if isinstance(self.pool, RoutedPool) else None

    def ahead(self, slots: Slots, at: np.ndarray, ids: np.ndarray, position: np.ndarray) -> Tensor:
        """[n, H]: hidden states of one token for each slot of `at`, which is cached at `position` of its table."""
        rows, starts = slots.table[at, position], at * slots.table.shape[1]
        layout = CachedLayout(self.pool, rows, slots.table.ravel(), position + 1, None, (), starts)
        return self.hidden(self._to(ids), self._to(position), layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V]"""
        if self._logit_rows is None:
            return self.read_out.logits(hidden)
        # The bits of a product may depend on its number of rows, so that number is the same in every call.
        padded = hidden.new_zeros((self._logit_rows, hidden.shape[1]))
        padded[: len(hidden)] = hidden
        return self.read_out.logits(padded)[: len(hidden)]

    @torch.inference_mode()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probs of ids[1:], each given all tokens before it."""
        # By a packed layout and not by the cache, so the turns that are being said are left alone.
        tokens = self._to(np.asarray(ids, np.int64))
        at = torch.arange(len(tokens), device=tokens.device)
        hidden = self.hidden(tokens, at, PackedLayout([len(tokens)], kernels=self.kernels))
        logp = self.read_out.logits(hidden[:-1]).log_softmax(-1)
        return logp.gather(1, tokens[1:, None])[:, 0].float().cpu().numpy()

    @torch.inference_mode()
    def stale_gap(self, slots: Slots, at: np.ndarray) -> Gauge:
        """Expected |difference| of the next token's log-prob between cached and fresh keys and values, per slot. It is
        measured after a load with update="stale"."""
        if not len(at):
            return Gauge(0, 0)
        # The new weights compute the pending token over the old keys and values, and with all tokens computed anew.
        stale = self.read_out.logits(self.ahead(slots, at, slots.pending[at], slots.cached[at])).log_softmax(-1)
        sequences = [np.append(slots.sequence(i), slots.pending[i]).astype(np.int64) for i in at.tolist()]
        lengths = np.array([len(w) for w in sequences])
        layout = PackedLayout(lengths, kernels=self.kernels)
        hidden = self.hidden(self._to(np.concatenate(sequences)), self._to(ragged_arange(lengths)), layout)
        fresh = self.read_out.logits(hidden[self._to(np.cumsum(lengths) - 1)]).log_softmax(-1)
        return Gauge(float((fresh.exp() * (fresh - stale).abs()).sum()), len(at))

    def _to(self, x: np.ndarray) -> Tensor:
        """The array on the device of the pool."""
        return torch.from_numpy(x).to(self.pool.device)
