"""Trust regions: the factor of each token's policy gradient. Each is a type in `ladder.pieces.trust_region` and a
function here, registered for that type.

Everything here is detached. A push multiplies the score-function gradient A * grad log pi and is never differentiated.
Law 1 tests that this equals the gradient of each published objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from posttrain.algorithm.loss.distribution_distance import distance
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.algorithm.register import missing
from posttrain.ladder.algorithm import Ratio
from posttrain.ladder.pieces.trust_region import (
    Cap,
    Clip,
    Divergence,
    FutureKL,
    Geometric,
    Hump,
    Soft,
    Taper,
    TrustRegion,
)

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is bounded to this before exp, so that the ratio of a very improbable token is finite (e^20 = 4.9e8)."""


@dataclass(frozen=True, eq=False)
class Push:
    """The factor of each token's policy gradient. low_M and high_M (bool) show at which bound it was masked."""

    push_M: Tensor
    low_M: Tensor
    high_M: Tensor


@dataclass(frozen=True, eq=False)
class TrustInputs:
    """The input of a trust region, detached: the ratio that it bounds, and what the ratio was computed from.

    candidates_MK: log pi of the batch's `TOP_IDS`, where the trust region reads them.
    """

    ratio_M: Tensor
    log_ratio_M: Tensor
    advantage_M: Tensor
    logp_M: Tensor
    batch: Streams
    candidates_MK: Tensor | None = None

    @property
    def up_M(self) -> Tensor:
        """bool [M]: tokens that credit makes more likely."""
        return self.advantage_M > 0

    @property
    def down_M(self) -> Tensor:
        """bool [M]: tokens that credit makes less likely."""
        return self.advantage_M < 0


def importance(ratio: Ratio, log_ratio_M: Tensor, batch: Streams) -> Tensor:
    """pi/anchor per token [M], detached, exactly 1 where log_ratio is 0. In sequence forms all tokens of an episode
    have one ratio.

    `sequence_mean` is GSPO's s = exp(mean of the log-ratios) (A13). `sequence_product` is the likelihood ratio of the
    answer. `sequence_token` is s too: pi_t / sg[pi_t] has value 1, so GSPO-token's gradient differs only where credit
    varies.
    """
    # Sums of logs and one exp: a product of a thousand ratios would
    # overflow on the way. Every form is exp(0) = 1 on policy.
    x_M = log_ratio_M.detach()
    match ratio:
        case "one":
            return torch.ones_like(x_M)
        case "token":
            log_M = x_M
        case "sequence_mean" | "sequence_token":
            log_M = batch.episode_sum(x_M) / batch.episode_length()
        case "sequence_product":
            log_M = batch.episode_sum(x_M)
    return bounded_exp(log_M)


def push(region: TrustRegion | None, inputs: TrustInputs) -> Push:
    """The factor of each token's policy gradient; without a trust region it is the ratio."""
    return _unmasked(inputs.ratio_M) if region is None else pushed(region, inputs)


@singledispatch
def pushed(region: TrustRegion, inputs: TrustInputs) -> Push:
    """`push` of one trust region."""
    raise missing(region, pushed)


@pushed.register
def _(region: Clip, inputs: TrustInputs) -> Push:
    """A05, Eq. 7 of 1707.06347: the gradient of -min(r A, clip(r, 1-low, 1+high) A) is -r A grad log pi, or 0 where the
    clipped branch is the smaller: r > 1+high with A > 0, r < 1-low with A < 0."""
    r_M, up_M, down_M = inputs.ratio_M, inputs.up_M, inputs.down_M
    # `high_M` counts both bounds above 1: the clip for A > 0, and the dual
    # clip for A < 0. Without the dual clip r A has no lower bound as r grows.
    loud_M = (up_M & (r_M > 1 + region.high)) | (down_M & (r_M > (region.cap or torch.inf)))
    return _clipped(r_M, down_M & (r_M < 1 - region.low), loud_M)


@pushed.register
def _(region: Cap, inputs: TrustInputs) -> Push:
    return _unmasked(inputs.ratio_M.clamp(region.low, region.high))


@pushed.register
def _(region: Taper, inputs: TrustInputs) -> Push:
    # Successes have the plain likelihood's gradient, however unlikely
    # they became; failures are let go as they become unlikely.
    return _unmasked(torch.where(inputs.down_M, inputs.ratio_M.clamp(max=region.cap), 1.0))


@pushed.register
def _(region: Soft, inputs: TrustInputs) -> Push:
    r_M = inputs.ratio_M
    # f(r) = 4 / tau * sigmoid(tau (r - 1)) has f'(r) = 4 s (1 - s),
    # and dr / d log pi = r: the push is r f'(r), and 1 at r = 1.
    gate_M = torch.sigmoid(_either(inputs.up_M, region.tau, region.tau_negative, r_M) * (r_M - 1))
    return _unmasked(4 * r_M * gate_M * (1 - gate_M))


@pushed.register
def _(region: Geometric, inputs: TrustInputs) -> Push:
    """GMPO: with w = exp(mean of clipped log-ratios), d/dlogp_t of w * A is w * A / |y|, and 0 where the token is
    clipped. The 1 / |y| is not here: `aggregate="sequence_mean"` brings it."""
    low, high = region.low, region.high
    high_M = inputs.up_M & (inputs.log_ratio_M > high)
    low_M = inputs.down_M & (inputs.log_ratio_M < -low)
    # A masked token gives no gradient, but its bounded log-ratio stays in the mean of its episode.
    bounded_M = torch.where(high_M, high, torch.where(low_M, -low, inputs.log_ratio_M))
    weight_M = bounded_exp(inputs.batch.episode_sum(bounded_M) / inputs.batch.episode_length())
    return _clipped(weight_M, low_M, high_M)


@pushed.register
def _(region: Divergence, inputs: TrustInputs) -> Push:
    r_M = inputs.ratio_M
    anchor_M = inputs.logp_M - inputs.log_ratio_M
    # Masked only where it is far and its push leads further: a token that comes back towards the anchor always learns.
    far_M = distance(region, inputs.logp_M, anchor_M, inputs.batch, inputs.candidates_MK) > region.delta
    return _clipped(r_M.clamp(max=region.cap), inputs.down_M & (r_M < 1) & far_M, inputs.up_M & (r_M > 1) & far_M)


@pushed.register
def _(region: FutureKL, inputs: TrustInputs) -> Push:
    # PPO's clip decides which tokens are masked. FIPO's factor only scales the push of the others.
    clipped = pushed(Clip(low=region.low, high=region.high), inputs)
    return Push(clipped.push_M * future(region, inputs), clipped.low_M, clipped.high_M)


@pushed.register
def _(region: Hump, inputs: TrustInputs) -> Push:
    r_M = inputs.ratio_M
    k_M = _either(inputs.up_M, region.k, region.k_negative, r_M)
    fade_M = _either(inputs.up_M, region.fade, region.fade_negative, r_M)
    # r^k e^{fade (1 - r)}: it rises from 0, is 1 on policy, and fades for large r, with no edge where a gradient ends
    # suddenly. A power beyond the dtype is its largest number: infinity times a factor that has faded to 0 would be
    # NaN.
    return _unmasked(r_M.pow(k_M).clamp(max=torch.finfo(r_M.dtype).max) * torch.exp(fade_M * (1 - r_M)))


def _either(which_M: Tensor, yes: float, no: float, like_M: Tensor) -> Tensor:
    """[M]: one of two numbers, in the dtype of `like_M` (torch.where of two numbers is always float32)."""
    return torch.where(which_M, torch.full_like(like_M, yes), no)


def _unmasked(push_M: Tensor) -> Push:
    """A push that masks no token."""
    nothing_M = torch.zeros_like(push_M, dtype=torch.bool)
    return Push(push_M, nothing_M, nothing_M)


def _clipped(ratio_M: Tensor, low_M: Tensor, high_M: Tensor) -> Push:
    """The ratio as push, and 0 where one of the two masks is True."""
    return Push(ratio_M.masked_fill(low_M | high_M, 0.0), low_M, high_M)


def future(region: FutureKL, inputs: TrustInputs) -> Tensor:
    """FIPO's factor [M]: > 1 where this token and those after it became more likely since the anchor, < 1 where less.

    Log-ratios [.1, .2, -.1], half-life 32: sums [.199954, .102143, -.1], factors [1.2, 1.107542, .904837] (A29).
    """
    # `ignore`: else one token with a huge ratio would decide the factor of all tokens before it.
    counted_M = inputs.log_ratio_M.masked_fill(inputs.ratio_M > region.ignore, 0.0)
    factor_M = bounded_exp(inputs.batch.to_go(counted_M, 2 ** (-1 / region.half_life)))
    # A token that is punished and has become much more likely is not pushed harder than its ratio says.
    top_M = _either((inputs.advantage_M < 0) & (inputs.ratio_M > region.loud), 1.0, 1 + region.band_high, factor_M)
    return torch.minimum(factor_M.clamp(min=1 - region.band_low), top_M)


def bounded_exp(x: Tensor) -> Tensor:
    """exp of a log-ratio within +-LOG_RATIO_LIMIT."""
    # In terms that are differentiated, clamp has gradient 0 beyond the limit: such a token has no part in them.
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
