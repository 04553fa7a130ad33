"""The load-balance loss of a mixture of experts: experts * sum_i f_i P_i (GShard 2006.16668, Switch 2101.03961).

f_i is how often expert i was chosen for a token, P_i its mean probability, both over tokens and layers, as transformers
has it. The loss is least where every expert has the same share. There it equals K, the number of experts chosen for a
token.

f is counted from the choices that the batch holds, over the whole minibatch. It is a number without a gradient. So the
loss is a sum over tokens, linear in the routers' probabilities, and a split of the batch changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.algorithm.loss.losses import Loss
from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.core.batch import Batch
from posttrain.core.exchange.expert_choices import known_rows
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.gauge import Gauge, Gauges
from posttrain.system.errors import InvariantError

GAUGE = "experts/balance_loss"
"""Name of the gauge that holds the load-balance loss of the whole minibatch, without `coef`."""


def balance_weights(routed_N: np.ndarray, experts: int) -> np.ndarray:
    """float64 [E]: what one probability of each expert adds to the loss, at a token and layer: E f_i / (tokens layers).

    >>> balance_weights(np.array([[[0, 1]], [[0, 2]]], np.int16), 4).tolist()
    [2.0, 1.0, 1.0, 0.0]
    """
    # known is [tokens, layers, K]. Tokens whose choices are unknown count neither in f nor in what it is divided by.
    known = routed_N[known_rows(routed_N)]
    rows = known.shape[0] * known.shape[1]
    count = np.bincount(known.ravel().astype(np.int64), minlength=experts).astype(np.float64)
    # Divided twice by rows = tokens * layers: once makes f_i of the
    # count, once makes the mean P_i of the sum that each pass forms.
    return experts * count / max(rows, 1) / max(rows, 1)


def to_balance(batch: Batch, experts: int) -> Batch:
    """The minibatch with the weight of each expert in its load-balance loss (`Batch.balance_E`); InvariantError where
    no choice of a router is known."""
    if batch.routed_N is None or not known_rows(batch.routed_N).any():
        raise InvariantError(
            "a load-balance loss reads which experts were chosen for the tokens of the minibatch, and none is known:"
            " the engine records none, or they were lost on the way"
        )
    return replace(batch, balance_E=balance_weights(batch.routed_N, experts))


@dataclass(frozen=True)
class BalancedLoss:
    """A loss with `coef` times the load-balance loss. The batch must be one of `to_balance`."""

    loss: Loss
    coef: float

    def reads(self, micro: Batch) -> Reads:
        return self.loss.reads(micro)

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        plain = self.loss.terms(micro, scores)
        if scores.balance is None:
            raise InvariantError("a load-balance loss was asked for, and the learner's pass has none")
        # Count 0: the loss of the minibatch is a sum over micro-batches and no mean. `gauges` sets the 1.
        balance_gauge = Gauge(float(scores.balance.detach()), 0)
        return Terms(
            plain.loss + self.coef * scores.balance.to(plain.loss.dtype), {**plain.gauges, GAUGE: balance_gauge}
        )

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        return {**self.loss.gauges(batch, parts), GAUGE: Gauge(sum(p.gauges[GAUGE].sum for p in parts), 1)}
