"""Train/inference mismatch: c = start/mu, detached, multiplies the push (A25). Each correction is a type in
`ladder.pieces.correction` and a function here, registered for that type.

The sampler drew from mu, but the learner computes gradients as if the tokens came from its own policy at the start of
the step. An unbiased estimate needs the raw ratio; the ratio that is used is bounded to limit the variance. Both are
returned, because their difference is the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from posttrain.algorithm.loss.distribution_distance import binary_kl
from posttrain.algorithm.loss.push_factor import bounded_exp
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.algorithm.register import missing
from posttrain.core.gauge import Gauge
from posttrain.core.streams import ADVANTAGE, MU
from posttrain.ladder.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto


@dataclass(frozen=True, eq=False)
class CorrectionFactor:
    """raw_M = start/mu, and used_M, the factor of the push. Both [M]. At sequence level all tokens of an
    episode have the same number."""

    raw_M: Tensor
    used_M: Tensor


@dataclass(frozen=True, eq=False)
class Mismatch:
    """The input of a correction, detached."""

    raw_M: Tensor
    """start/mu [M]; the product over the episode where the piece reads that."""
    log_M: Tensor
    """log start/mu of each token [M]."""
    now_M: Tensor
    """log-probs of the current policy [M]."""
    batch: Streams


def correct(pieces: Sequence[Correction], start_M: Tensor, now_M: Tensor, batch: Streams) -> CorrectionFactor:
    """The correction of each token: the product over `pieces`. Tokens it masks stay in the denominator of the
    aggregation.

    start/mu = [.3, .9, 1.5, 4, .1]: Truncate(cap=2) -> [.3, .9, 1.5, 2, .1], Mask(low=.5, high=5) -> [0, .9, 1.5, 4,
    0].

    Args:
        start_M: log-probs of the learner at the start of the step.
        now_M: log-probs of the current policy.
    """
    # start may be the current policy, which has a gradient; a correction is a constant factor.
    log_M = start_M.detach() - batch[MU]
    raw_M, used_M = bounded_exp(log_M), torch.ones_like(log_M)
    for piece in pieces:
        if piece.of_episodes():
            # At most one piece multiplies by start/mu, so this ratio
            # serves it alone. The others read `log_M` of the tokens.
            raw_M = bounded_exp(batch.episode_sum(log_M))
        used_M = used_M * factor(piece, Mismatch(raw_M, log_M, now_M.detach(), batch))
    return CorrectionFactor(raw_M, used_M)


@singledispatch
def factor(piece: Correction, mismatch: Mismatch) -> Tensor:
    """The factor by which one piece multiplies the push [M]."""
    raise missing(piece, factor)


@factor.register
def _(piece: Truncate, mismatch: Mismatch) -> Tensor:
    return mismatch.raw_M if piece.cap is None else mismatch.raw_M.clamp(max=piece.cap)


@factor.register
def _(piece: Mask, mismatch: Mismatch) -> Tensor:
    # Masked, not clamped: a token that sampler and learner see so differently is taken for noise, not for a rare event.
    return torch.where((mismatch.raw_M >= piece.low) & (mismatch.raw_M <= piece.high), mismatch.raw_M, 0.0)


@factor.register
def _(piece: BinaryKL, mismatch: Mismatch) -> Tensor:
    mu_M = mismatch.batch[MU]
    start_M = mismatch.log_M + mu_M
    # KL is not symmetric. One direction alone would let tokens pass that one of the two policies thinks impossible.
    near_M = (binary_kl(start_M, mu_M) <= piece.phi) & (binary_kl(mu_M, start_M) <= piece.phi)
    return torch.where(near_M, mismatch.raw_M, 0.0)


@factor.register
def _(piece: Reject, mismatch: Mismatch) -> Tensor:
    # (start(y) / mu(y))^(1/|y|): the product over a long answer leaves
    # any fixed bounds by rounding alone, its geometric mean does not.
    mean_M = bounded_exp(mismatch.batch.episode_sum(mismatch.log_M) / mismatch.batch.episode_length())
    return ((mean_M >= piece.low) & (mean_M <= piece.high)).to(mismatch.raw_M.dtype)


@factor.register
def _(piece: Veto, mismatch: Mismatch) -> Tensor:
    return (~mismatch.batch.episode_any(bounded_exp(mismatch.log_M) < piece.below)).to(mismatch.raw_M.dtype)


@factor.register
def _(piece: NegativeMask, mismatch: Mismatch) -> Tensor:
    # Compared with the present policy, not with the one at the start of the step. So an answer from which earlier
    # updates of this batch have moved away is left out too.
    gap_M = mismatch.batch.episode_sum(mismatch.batch[MU] - mismatch.now_M) / mismatch.batch.episode_length()
    return (~((mismatch.batch[ADVANTAGE] < 0) & (gap_M > piece.delta))).to(mismatch.raw_M.dtype)


def effective_share(used: Gauge, used_square: Gauge) -> float:
    """Effective sample size over sample size: (sum c)^2 / (n * sum c^2), in (0, 1]; 1 when all weights are equal.

    Its arguments are the gauges `correction/used` and `correction/used_square`, which merge by adding. NaN where no
    token has a weight.
    """
    # Both gauges count the same items, so n cancels: (sum c / n)^2 / (sum c^2 / n).
    return used.mean**2 / used_square.mean if used_square.sum > 0 else float("nan")
