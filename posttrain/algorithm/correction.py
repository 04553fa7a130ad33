"""Train/inference mismatch: c = start/mu, detached, multiplies the push (A25). One type, one `case`.

The sampler drew from mu, the learner computes gradients as if from its own policy at the start of the step. The raw
ratio is what an unbiased estimate needs; what is used bounds its variance. Both are returned, because their distance is
the bias that was bought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithm.distance import binary_kl
from posttrain.algorithm.streams import Streams
from posttrain.algorithm.trust import bounded_exp
from posttrain.core.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.core.streams import ADVANTAGE, MU
from posttrain.core.types import Gauge


@dataclass(frozen=True, eq=False)
class Corrected:
    """raw_M = start/mu and used_M = what multiplies the push, both [M] (one number per episode at sequence level)."""

    raw_M: Tensor
    used_M: Tensor


def correct(pieces: Sequence[Correction], start_M: Tensor, now_M: Tensor, batch: Streams) -> Corrected:
    """The correction of each token: the product over `pieces`. Tokens it masks stay in the denominator of the aggregation.

    start/mu = [.3, .9, 1.5, 4, .1]: Truncate(cap=2) -> [.3, .9, 1.5, 2, .1], Mask(low=.5, high=5) -> [0, .9, 1.5, 4, 0].

    Args:
        start_M: log-probs of the learner at the start of the step. now_M: those of the policy as it is.
    """
    log_M = start_M.detach() - batch[MU]
    raw_M, used_M = bounded_exp(log_M), torch.ones_like(log_M)
    for piece in pieces:
        if isinstance(piece, Truncate | Mask) and piece.level == "sequence":
            raw_M = bounded_exp(batch.episode_sum(log_M))
        used_M = used_M * _factor(piece, raw_M, log_M, now_M.detach(), batch)
    return Corrected(raw_M, used_M)


def _factor(piece: Correction, raw_M: Tensor, log_M: Tensor, now_M: Tensor, batch: Streams) -> Tensor:
    """What one piece multiplies the push with [M]."""
    match piece:
        case Truncate(cap=cap):
            return raw_M if cap is None else raw_M.clamp(max=cap)
        case Mask(low=low, high=high):
            return torch.where((raw_M >= low) & (raw_M <= high), raw_M, 0.0)
        case BinaryKL(phi=phi):
            mu_M = batch[MU]
            near_M = (binary_kl(log_M + mu_M, mu_M) <= phi) & (binary_kl(mu_M, log_M + mu_M) <= phi)
            return torch.where(near_M, raw_M, 0.0)
        case Reject(low=low, high=high):
            mean_M = bounded_exp(batch.episode_sum(log_M) / batch.episode_length())
            return ((mean_M >= low) & (mean_M <= high)).to(raw_M.dtype)
        case Veto(below=below):
            return (~batch.episode_any(bounded_exp(log_M) < below)).to(raw_M.dtype)
        case NegativeMask(delta=delta):
            left_M = batch.episode_sum(batch[MU] - now_M) / batch.episode_length() > delta
            return (~((batch[ADVANTAGE] < 0) & left_M)).to(raw_M.dtype)


def effective_share(used: Gauge, used_square: Gauge) -> float:
    """Effective sample size over sample size: (sum c)^2 / (n * sum c^2), in (0, 1]; 1 when all weights agree.

    Takes the gauges `correction/used` and `correction/used_square`, which merge by adding. NaN where nothing is used.
    """
    return used.mean**2 / used_square.mean if used_square.sum > 0 else float("nan")
