"""Estimators of KL(pi || reference) per token, and where each is applied. `ladder.pieces.pull.KL` has the legal pairs.

In the reward, an estimate is a number that credit spreads over the tokens that led to it (its gradient is a score
function). In the loss, it is differentiated through log pi at the token itself, for the states that were visited.
`both` does both. Measured gradients of every pair: A34 and `tests/laws/test_kl.py`.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from posttrain.algorithm.loss.push_factor import LOG_RATIO_LIMIT, bounded_exp
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.algorithm.register import missing
from posttrain.core.streams import REFERENCE
from posttrain.ladder.pieces.pull import KL, Estimator, Pull, SequenceL2, TokenL2
from posttrain.system.errors import InvariantError


def estimate(estimator: Estimator, gap: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """One estimate per token from gap = log pi - log reference, in the shape of `gap`.

    k1 = gap, k2 = gap^2 / 2, k3 = exp(-gap) - 1 + gap (Schulman 2020), rk3 = pi/anchor * k3 (DeepSeek-V3.2, A08) with
    `log_ratio` = log pi - log anchor, through which the gradient flows too. Where the policy gives a token almost no
    probability (gap < -LOG_RATIO_LIMIT), k3 is bounded near e^20 and has no gradient. Without the bound it would
    overflow, or be far larger than all other terms.

    >>> estimate("k3", torch.tensor([0.1, -0.1]))
    tensor([0.0048, 0.0052])
    """
    match estimator:
        case "k1":
            return gap
        case "k2":
            return gap.square() / 2
        case "k3":
            # For a small gap the result is about gap^2 / 2. exp(-gap) - 1 would lose most digits there, expm1 keeps
            # them. Only a lower bound is needed, because exp(-gap) is small for large gaps.
            near = gap.clamp(min=-LOG_RATIO_LIMIT)
            return torch.expm1(-near) + near
        case "rk3":
            if log_ratio is None:
                raise InvariantError("rk3 weights k3 by a ratio, and none was given")
            # The ratio is not detached. The gradient of rho k3 has the path
            # term k3 * grad rho, which makes it exact also off policy.
            return bounded_exp(log_ratio) * estimate("k3", gap)


def in_loss(pull: object) -> bool:
    """Returns whether this pull is a KL in the loss."""
    return isinstance(pull, KL) and pull.placement in ("loss", "both")


@singledispatch
def pull_term(pull: Pull, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    """The regulariser per token [M]; None where it is only in the credit.

    Args:
        log_ratio_M: log pi - log anchor, differentiable.
        logp_M: log pi, differentiable.
    """
    raise missing(pull, pull_term)


@pull_term.register
def _(pull: KL, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    if not in_loss(pull):
        return None
    return pull.coef * estimate(pull.estimator, logp_M - batch[REFERENCE], log_ratio_M)


@pull_term.register
def _(pull: SequenceL2, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    """coef/2 * (sum of the episode's log-ratios)^2, once per episode (A20, Eq. 3). Its value is divided over the
    episode's tokens. A token's whole gradient is then weight * (A - coef * log-ratio sum) * grad log pi."""
    # All tokens of an episode have the same weight under every
    # aggregate, so |y| equal shares add up to one square an episode.
    return pull.coef / 2 * batch.episode_sum(log_ratio_M).square() / batch.episode_length()


@pull_term.register
def _(pull: TokenL2, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams) -> Tensor | None:
    return pull.coef * log_ratio_M.square()
