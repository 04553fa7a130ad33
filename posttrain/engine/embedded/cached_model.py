"""A model over a pool of keys and values: what one forward pass of it needs, wherever the plan came from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.engines import KernelChoice
from posttrain.core.errors import EngineError
from posttrain.core.gauge import Gauge
from posttrain.engine.accept import accept
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.cache import CachedLayout, CachePool, ragged_arange
from posttrain.engine.embedded.fused import FusedDecoder, fusable
from posttrain.engine.embedded.plan import Plan
from posttrain.engine.embedded.slots import Slots
from posttrain.engine.kernels import kernel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config fields in which architectures keep how many experts a layer routes between."""
PREFILL_WASTE = 0.01
"""Most padding of dense prefill."""


class CachedModel:
    """`module` with its cache.

    Args:
        rows: read logits out on so many rows whatever the work, for bits that depend on nothing else; None: as many as
            there are.
        kernels: by which code it computes (`Model.kernels`).
    """

    def __init__(
        self,
        module: PreTrainedModel,
        context: int,
        *,
        device: str,
        rows: int | None = None,
        kernels: KernelChoice = "auto",
    ) -> None:
        self.module = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.read_out, shapes = accept(module, context)
        if rows is not None:
            _check_deterministic(module)
        where = self.read_out.weight.device
        self.kernels: KernelChoice = kernels
        self.pool = CachePool(shapes, module.dtype, where, kernels)
        form = kernel("decoder", where, module.dtype, kernels if fusable(module) else "reference")
        decoder = form.function(module, self.read_out, context)
        self.hidden = decoder.hidden
        self.fused = isinstance(decoder, FusedDecoder)
        """Whether the decoder runs in fewer calls."""
        self.lanes = decoder.lanes if isinstance(decoder, FusedDecoder) else 1
        self._rows = rows

    @property
    def vocabulary(self) -> int:
        return self.read_out.weight.shape[0]

    def run(self, plan: Plan) -> tuple[Tensor, PackedLayout | None]:
        """(hidden states [N, H] of a plan's positions, whose keys and values are cached on the way; layout of its dense
        pieces)."""
        dense = PackedLayout(plan.dense, waste=PREFILL_WASTE, kernels=self.kernels) if plan.dense else None
        layout = CachedLayout(self.pool, plan.rows, plan.visible, plan.lengths, dense, plan.chunks)
        return self.hidden(self._to(plan.ids), self._to(plan.positions), layout), dense

    def ahead(self, slots: Slots, at: np.ndarray, ids: np.ndarray, position: np.ndarray) -> Tensor:
        """[n, H]: hidden states of one token for each slot of `at`, cached at `position` in its table."""
        rows = np.repeat(at * slots.table.shape[1], position + 1) + ragged_arange(position + 1)
        layout = CachedLayout(self.pool, slots.table[at, position], slots.table.ravel()[rows], position + 1, None)
        return self.hidden(self._to(ids), self._to(position), layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V]"""
        if self._rows is None:
            return self.read_out.logits(hidden)
        padded = hidden.new_zeros((self._rows, hidden.shape[1]))
        padded[: len(hidden)] = hidden
        return self.read_out.logits(padded)[: len(hidden)]

    @torch.inference_mode()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probs of ids[1:], each given all before it."""
        whole = self._to(np.asarray(ids, np.int64))
        hidden = self.hidden(
            whole, torch.arange(len(whole), device=whole.device), PackedLayout([len(whole)], kernels=self.kernels)
        )
        logp = self.read_out.logits(hidden[:-1]).log_softmax(-1)
        return logp.gather(1, whole[1:, None])[:, 0].float().cpu().numpy()

    @torch.inference_mode()
    def stale_gap(self, slots: Slots, at: np.ndarray) -> Gauge:
        """Expected |log-prob| difference of the next token over what is cached and over fresh keys and values, all
        slots of `at`."""
        if not len(at):
            return Gauge(0, 0)
        stale = self.read_out.logits(self.ahead(slots, at, slots.pending[at], slots.cached[at])).log_softmax(-1)
        whole = [np.append(slots.sequence(i), slots.pending[i]).astype(np.int64) for i in at.tolist()]
        lengths = np.array([len(w) for w in whole])
        hidden = self.hidden(
            self._to(np.concatenate(whole)),
            self._to(ragged_arange(lengths)),
            PackedLayout(lengths, kernels=self.kernels),
        )
        fresh = self.read_out.logits(hidden[self._to(np.cumsum(lengths) - 1)]).log_softmax(-1)
        return Gauge(float((fresh.exp() * (fresh - stale).abs()).sum()), len(at))

    def _to(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.pool.device)


def _check_deterministic(module: PreTrainedModel) -> None:
    config = module.config.get_text_config(decoder=True)
    if any((getattr(config, field, None) or 0) > 1 for field in EXPERTS):
        raise EngineError(
            f"{type(module).__name__} routes tokens to experts in batches of any shape: bits depend on neighbours. Set"
            " deterministic=false"
        )
