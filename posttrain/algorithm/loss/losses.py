"""Losses as the trainer uses them: what each needs from a forward pass, and how it computes its terms from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from posttrain.algorithm.loss.policy_loss import Terms, objective, supervised
from posttrain.algorithm.loss.step_scale import step_share
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.streams import TOP_IDS, WEIGHT
from posttrain.ladder.algorithm import Algorithm

STEP_SHARE = "optim/share"
"""The gauge by which a loss sets the share of the learning rate of its optimizer step."""


class Loss(Protocol):
    """A loss that is a sum over the spoken tokens of a minibatch, so that its micro-batches add up."""

    def reads(self, micro: Batch) -> Reads:
        """Which scores the forward pass of this micro-batch must give."""
        ...

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        """Loss and gauges of one micro-batch of whole units."""
        ...

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        """Gauges of the whole minibatch, from its micro-batches in order. With `STEP_SHARE` among them, the optimizer
        step uses that share of the learning rate."""
        ...


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of an algorithm (`objective`). With `warming` only the value head is trained."""

    algorithm: Algorithm
    warming: bool = False

    def reads(self, micro: Batch) -> Reads:
        a = self.algorithm
        entropy, heard = a.entropy is not None, a.hears
        # `head_only`, the fourth: during the warm-up of values their gradient stops at the head:
        # else it would change the layers below, and so the policy.
        return Reads(entropy, a.learns_values is not None, micro.find(TOP_IDS), self.warming, heard=heard)

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        return objective(self.algorithm, streams(micro, scores.logp.device), scores)

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        # The share is computed from all micro-batches together: after the last forward pass, before the optimizer step.
        whole, scale = merge(*(p.gauges for p in parts)), self.algorithm.step_scale
        return whole if scale is None else {**whole, STEP_SHARE: Gauge(step_share(scale, whole), 1)}


@dataclass(frozen=True)
class Likelihood:
    """Maximum likelihood of demonstrations, each token with its weight."""

    def reads(self, micro: Batch) -> Reads:
        return Reads()

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        logp: Any = scores.logp
        return Terms(supervised(torch.as_tensor(micro[WEIGHT], dtype=logp.dtype, device=logp.device), logp), {})

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        return {"sft/loss": Gauge(sum(float(p.loss.detach()) for p in parts), 1), "sft/tokens": Gauge(batch.spoken, 1)}
