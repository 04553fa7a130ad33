"""Estimators of KL(pi || reference) per token, and where each is applied. `ladder.pieces.pull.KL` has the legal pairs.

In the reward, an estimate is a number that credit spreads over the tokens that led to it (its gradient is a score
function). In the loss, it is differentiated through log pi at the token itself, for the states that were visited.
`both` does both. Measured gradients of every pair: A34 and `tests/laws/test_kl.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithm.loss.push_factor import LOG_RATIO_LIMIT, bounded_exp
from posttrain.ladder.pieces.pull import KL, Estimator
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
            near = gap.clamp(min=-LOG_RATIO_LIMIT)
            return torch.expm1(-near) + near
        case "rk3":
            if log_ratio is None:
                raise InvariantError("rk3 weights k3 by a ratio, and none was given")
            return bounded_exp(log_ratio) * estimate("k3", gap)


def in_loss(pull: object) -> bool:
    """Returns whether this pull is a KL in the loss."""
    return isinstance(pull, KL) and pull.placement in ("loss", "both")
