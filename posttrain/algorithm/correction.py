"""Train/inference mismatch: c = start/mu, detached, multiplies the push (A25). One type, one `case`.

The sampler drew from mu, the learner computes gradients as if from its own policy at the start of the step. The raw
ratio is what an unbiased estimate needs; what is used bounds its variance. Both are returned, because their distance is
the bias that was bought.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithm.streams import Streams
from posttrain.algorithm.trust import bounded_exp
from posttrain.core.algorithm import Correction, Mask, Truncate
from posttrain.core.types import Gauge


@dataclass(frozen=True, eq=False)
class Corrected:
    """raw_M = start/mu and used_M = what multiplies the push, both [M] (one number per episode at sequence level)."""

    raw_M: Tensor
    used_M: Tensor


def correct(correction: Correction, start_M: Tensor, batch: Streams) -> Corrected:
    """The correction of each token; tokens it masks stay in the denominator of the aggregation.

    start/mu = [.3, .9, 1.5, 4, .1]: Truncate(cap=2) -> [.3, .9, 1.5, 2, .1], Mask(low=.5, high=5) -> [0, .9, 1.5, 4, 0].
    """
    log_M = start_M.detach() - batch.logp_mu_M
    if correction.level == "sequence":
        log_M = batch.episode_sum(log_M)
    raw_M = bounded_exp(log_M)
    match correction:
        case Truncate(cap=cap):
            return Corrected(raw_M, raw_M.clamp(max=cap))
        case Mask(low=low, high=high):
            return Corrected(raw_M, torch.where((raw_M >= low) & (raw_M <= high), raw_M, 0.0))


def effective_share(used: Gauge, used_square: Gauge) -> float:
    """Effective sample size over sample size: (sum c)^2 / (n * sum c^2), in (0, 1]; 1 when all weights agree.

    Takes the gauges `correction/used` and `correction/used_square`, which merge by adding. NaN where nothing is used.
    """
    return used.mean**2 / used_square.mean if used_square.sum > 0 else float("nan")
