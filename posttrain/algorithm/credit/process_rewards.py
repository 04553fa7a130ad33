"""Implicit process rewards (PRIME, 2502.01456): beta * (log phi - log ref) of each token, compared with the siblings'.
The model phi learns outcomes alone: sigmoid(sum_t beta * log phi/ref) is the chance that an answer is right. So each
token's term is what it adds to the log-odds of success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithm.credit.judged_sample import Sample, joined
from posttrain.algorithm.credit.reward_spread import Array
from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.streams import IMPLICIT, OUTCOME, REFERENCE, WEIGHT


def process_rewards(beta: float, samples: Sequence[Sample]) -> list[Array]:
    """[T] of each of at least two siblings: the process reward of each token, minus the average over the other siblings
    of their mean process reward (leave one out)."""
    rewards = [beta * (joined(s.scored[IMPLICIT]) - joined(s.scored[REFERENCE])) for s in samples]
    # A mean of means: every answer counts once among the others, however long it is.
    means = [math.fsum(r_T) / len(r_T) if len(r_T) else 0.0 for r_T in rewards]
    total = math.fsum(means)
    return [r_T - (total - own_mean) / (len(samples) - 1) for r_T, own_mean in zip(rewards, means, strict=True)]


def to_go(x_T: Array) -> Array:
    """[T]: the sum from each token to the last."""
    return np.cumsum(x_T[::-1])[::-1]


@dataclass(frozen=True)
class OutcomeLoss:
    """Cross entropy of sigmoid(beta * sum_t log phi/ref) and the outcome of each answer, a sum with weights.

    It reads REFERENCE, OUTCOME and WEIGHT; the last two are equal on all tokens of an answer.
    """

    beta: float

    def reads(self, micro: Batch) -> Reads:
        return Reads()

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        logp_M: Tensor = scores.logp
        batch_streams = streams(micro, logp_M.device, logp_M.dtype)
        # Log-odds z of each answer [E]: its tokens' terms added up, over all of its segments. Only phi has a gradient.
        log_odds_E = self.beta * logp_M.new_zeros(batch_streams.episodes).index_add(
            0, batch_streams.sequence_M, logp_M - batch_streams[REFERENCE]
        )
        # Both are the same on all tokens of an answer, so its first token is read. `sequence_M` ascends.
        first_E = torch.as_tensor(np.searchsorted(micro.sequence_M, np.arange(micro.episodes)), device=logp_M.device)
        outcome_E, weight_E = batch_streams[OUTCOME][first_E], batch_streams[WEIGHT][first_E]
        # -y log sigmoid(z) - (1 - y) log(1 - sigmoid(z)) = log(1 + e^z) - y z:
        # finite for every z, and right for an outcome between 0 and 1 too.
        # -log sigmoid(-x), not softplus, which torch makes linear above 20: a sure answer would lose its slope.
        each_E = -logsigmoid(-log_odds_E) - outcome_E * log_odds_E
        agrees = ((log_odds_E > 0) == (outcome_E > 0.5)).sum()
        return Terms((weight_E * each_E).sum(), {"implicit/agrees": Gauge(float(agrees), batch_streams.episodes)})

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        total = math.fsum(float(p.loss.detach()) for p in parts)
        return merge(*(p.gauges for p in parts)) | {"implicit/loss": Gauge(total, 1)}
