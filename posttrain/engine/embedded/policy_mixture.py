"""Two models that are sampled as one: from the geometric mixture of their next-token distributions.

    p(token) ~ pi(token)^(1 - share) * other(token)^share

Its logits are (1 - share) of the first model's logits plus share of the other's: numbers that are equal for all tokens
drop out of a softmax. So penalties, bans, temperature and truncation act on the mixed logits. (Nash-MD's opponent,
arXiv 2312.00886, section 7; here the distribution of each token is mixed.)

Axis letters: N positions of a pass, B rows of a draw, H hidden sizes of the two models together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.core.gauge import Gauge
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.forward_plan import Plan
from posttrain.engine.embedded.cache.recurrent_recompute import RecomputedModel
from posttrain.engine.embedded.schedule.slots import Slots
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.system.errors import EngineError


@dataclass(frozen=True, eq=False)
class Mixture:
    """The other model that an engine mixes with its own, and the share of that model."""

    module: PreTrainedModel
    """It never changes. It has the vocabulary of the engine's own."""
    share: float
    """Its exponent, in [0, 1]. 0: the engine's own model alone; 1: the other one alone."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise EngineError(f"a mixture with share={self.share}: it is an exponent from 0 to 1")


def served_model(
    module: PreTrainedModel,
    context: int,
    mixture: Mixture | None = None,
    *,
    device: str,
    rows: int | None,
    kernels: KernelChoice,
) -> CachedModel:
    """The form in which an engine serves a model, mixed with another one if there is one."""
    if mixture is not None:
        return MixedModel(module, mixture, context, device=device, rows=rows, kernels=kernels)
    form = RecomputedModel if is_stateful(module) else CachedModel
    return form(module, context, device=device, rows=rows, kernels=kernels)


class MixedModel(CachedModel):
    """`CachedModel` of a model and a second one that it is mixed with. Both compute every position, and a hidden state
    is the states of both side by side. New weights, scores and fingerprints are those of the first model alone."""

    def __init__(
        self,
        module: PreTrainedModel,
        mixture: Mixture,
        context: int,
        *,
        device: str,
        rows: int | None = None,
        kernels: KernelChoice = "auto",
    ) -> None:
        # `CachedModel.__init__` is not called: this model has two of them, and no cache of its own.
        self._own, self._other = (
            served_model(m, context, device=device, rows=rows, kernels=kernels) for m in (module, mixture.module)
        )
        weight, other_weight = self._own.read_out.weight, self._other.read_out.weight
        if weight.shape[0] != other_weight.shape[0]:
            raise EngineError(
                f"the model has {weight.shape[0]} embedding rows, and the one it is mixed with"
                f" {other_weight.shape[0]}: they mix token by token, so both need the same tokenizer and the same"
                " number of rows"
            )
        if weight.dtype != other_weight.dtype:
            raise EngineError(
                f"a model in {weight.dtype} cannot be mixed with one in {other_weight.dtype}: load both in one dtype"
            )
        self.module, self.read_out = self._own.module, self._own.read_out
        self.kernels, self.fused, self.lanes = kernels, self._own.fused, self._own.lanes
        self.pool, self.others = self._own.pool, (self._other.pool,)
        self._share, self._width = mixture.share, weight.shape[1]

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._own.load(tensors)

    def run(self, plan: Plan) -> tuple[Tensor, PackedLayout | None]:
        """(hidden states [N, H] of a plan's positions; layout of the first model's dense pieces)."""
        hidden, dense = self._own.run(plan)
        return torch.cat([hidden, self._other.run(plan)[0]], 1), dense

    def routed(self, rows: np.ndarray) -> None:
        """None: the tokens are drawn from both models."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V]: (1 - share) of the first model's and share of the other's."""
        # `mul_` may write over logits that were made for this call.
        mixed = self._own.logits(hidden[:, : self._width].contiguous())
        other_logits = self._other.logits(hidden[:, self._width :].contiguous())
        return mixed.mul_(1 - self._share).add_(other_logits, alpha=self._share)

    def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1] of the first model alone, by which a push of weights is checked."""
        return self._own.score(ids)

    def ahead(self, slots: Slots, at: np.ndarray, ids: np.ndarray, position: np.ndarray) -> Tensor:
        return torch.cat([m.ahead(slots, at, ids, position) for m in (self._own, self._other)], 1)

    def stale_gap(self, slots: Slots, at: np.ndarray) -> Gauge:
        return self._own.stale_gap(slots, at)  # the other model never gets new weights
