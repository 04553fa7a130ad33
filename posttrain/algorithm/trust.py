"""Trust regions: how loudly a token may speak. A trust region is one type in `core.algorithm` and one `case` in `push`.

Everything here is detached: a push multiplies the score-function gradient A * grad log pi and is never differentiated.
That this equals the gradient of each published objective is law 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithm.streams import Streams
from posttrain.core.algorithm import Clip, Ratio, TrustRegion

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is bounded here before exp, so that a ratio of a lost token stays finite (e^20 = 4.9e8)."""


@dataclass(frozen=True, eq=False)
class Push:
    """push_M multiplies the token's policy gradient; low_M, high_M (bool) say which bound silenced it."""

    push_M: Tensor
    low_M: Tensor
    high_M: Tensor


def importance(ratio: Ratio, log_ratio_M: Tensor, batch: Streams) -> Tensor:
    """pi/anchor per token [M], detached, exactly 1 where log_ratio is 0. Sequence forms give all tokens of an episode one ratio.

    `sequence_mean` is GSPO's s = exp(mean of the log-ratios) (A13), `sequence_product` the likelihood ratio of the answer.
    """
    x_M = log_ratio_M.detach()
    match ratio:
        case "one":
            return torch.ones_like(x_M)
        case "token":
            log_M = x_M
        case "sequence_mean":
            log_M = batch.episode_sum(x_M) / batch.episode_length()
        case "sequence_product":
            log_M = batch.episode_sum(x_M)
    return bounded_exp(log_M)


def push(region: TrustRegion | None, ratio_M: Tensor, advantage_M: Tensor) -> Push:
    """What each token's policy gradient is multiplied with.

    `Clip` (A05, Eq. 7 of 1707.06347): the gradient of -min(r A, clip(r, 1-low, 1+high) A) is -r A grad log pi, or 0 where
    the clipped branch is the smaller: r > 1+high with A > 0, r < 1-low with A < 0.
    """
    match region:
        case None:
            nothing_M = torch.zeros_like(ratio_M, dtype=torch.bool)
            return Push(ratio_M, nothing_M, nothing_M)
        case Clip(low=low, high=high):
            low_M = (advantage_M < 0) & (ratio_M < 1 - low)
            high_M = (advantage_M > 0) & (ratio_M > 1 + high)
            return Push(ratio_M.masked_fill(low_M | high_M, 0.0), low_M, high_M)


def bounded_exp(x: Tensor) -> Tensor:
    """exp of a log-ratio within +-LOG_RATIO_LIMIT."""
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
