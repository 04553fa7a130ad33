"""Pulls: the differentiable regularisers beside the policy term. Each is a type in `ladder.pieces.pull` and a function
here, registered for that type."""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor

from posttrain.algorithm.loss import kl
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.algorithm.register import missing
from posttrain.core.streams import REFERENCE
from posttrain.ladder.pieces.pull import KL, Pull, SequenceL2, TokenL2


@singledispatch
def pull_term(pull: Pull, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    """The regulariser per token [M]; None where it is only in the credit.

    Args:
        log_ratio_M: log pi - log anchor, differentiable.
        logp_M: log pi, differentiable.
    """
    raise missing(pull, "pull.pull_term")


@pull_term.register
def _(pull: KL, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    if not kl.in_loss(pull):
        return None
    return pull.coef * kl.estimate(pull.estimator, logp_M - batch[REFERENCE], log_ratio_M)


@pull_term.register
def _(pull: SequenceL2, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    """coef/2 * (sum of the episode's log-ratios)^2, once per episode (A20, Eq. 3). Its value is divided over the
    episode's tokens. A token's whole gradient is then weight * (A - coef * log-ratio sum) * grad log pi."""
    return pull.coef / 2 * batch.episode_sum(log_ratio_M).square() / batch.episode_length()


@pull_term.register
def _(pull: TokenL2, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    return pull.coef * log_ratio_M.square()
