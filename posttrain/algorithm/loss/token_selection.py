"""Chooses the tokens of a minibatch that have a policy gradient. They are chosen over the whole minibatch before it is
split, so that a split changes nothing.

Each choice is a type in `ladder.pieces.token_choice` and functions here, registered for that type. Tokens are chosen by
log-probs before the optimizer step: those of now where the choice reads them, else those at the start of the batch,
else the sampler's. Published code chooses inside each micro-batch, so that its result depends on memory settings.
"""

from __future__ import annotations

from functools import singledispatch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from posttrain.algorithm.register import missing
from posttrain.core.batch import Batch
from posttrain.core.streams import ADVANTAGE, MU, NOW, START
from posttrain.ladder.pieces.token_choice import ClipCov, KlCov, SecondMoment, Tokens, TopEntropy
from posttrain.system.errors import InvariantError

Array = NDArray[np.float64]


@singledispatch
def choose(tokens: Tokens, batch: Batch, entropy_M: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    """bool [M]: the tokens that keep their policy gradient. Where the piece masks none, the tokens with a `paid` term.

    Raises:
        InvariantError: a stream that the choice reads was not scored.
    """
    raise missing(tokens, choose)


@singledispatch
def paid(tokens: Tokens, chosen_M: Tensor, log_ratio_M: Tensor) -> Tensor | None:
    """A further loss term [M] of the chosen tokens, differentiable; None for choices that only mask."""
    return None


@choose.register
def _(tokens: ClipCov, batch: Batch, entropy_M: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    if rng is None:
        raise InvariantError("clip-cov draws tokens at random, and no generator was given")
    # Tokens with a large covariance are those whose update lowers the entropy most: likely ones
    # that are rewarded, unlikely ones that are punished. A few of them, by chance, are left out.
    cov_M = covariance(batch[ADVANTAGE], _before(batch))
    within = np.flatnonzero((cov_M > tokens.low) & (cov_M < tokens.high))
    # `share` counts all tokens of the minibatch, not only those within the bounds.
    count = min(len(within), int(tokens.share * len(cov_M)))
    silent = rng.choice(within, count, replace=False) if count else within[:0]
    return ~np.isin(np.arange(len(cov_M)), silent)


@choose.register
def _(tokens: KlCov, batch: Batch, entropy_M: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    return largest(covariance(batch[ADVANTAGE], _before(batch)), tokens.share)


@paid.register
def _(tokens: KlCov, chosen_M: Tensor, log_ratio_M: Tensor) -> Tensor | None:
    # The chosen tokens keep their policy gradient. This term also pulls them towards
    # the anchor. Where the ratio is exactly 1, the gradient of |x| is 0 in torch.
    return tokens.coef * chosen_M * log_ratio_M.abs()


@choose.register
def _(tokens: TopEntropy, batch: Batch, entropy_M: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    if entropy_M is None:
        raise InvariantError("tokens=topentropy reads the entropy at the start of the step, which was not scored")
    return largest(np.asarray(entropy_M, np.float64), tokens.share)


@choose.register
def _(tokens: SecondMoment, batch: Batch, entropy_M: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    gap_M = _before(batch) - batch[MU]
    # sign(A) * log(pi/mu) > 0: the token has moved the way that
    # its credit pushes it, so the push leads further from mu.
    counts_M = np.sign(batch[ADVANTAGE]) * gap_M > 0 if tokens.of == "outward" else np.ones(len(gap_M), bool)
    out = np.ones(len(gap_M), bool)
    out[counts_M] = within_moment(gap_M[counts_M], tokens.limit)
    return out


def _before(batch: Batch) -> Array:
    """Log-probs before the optimizer step [M]: of now, else at the start of the batch, else the sampler's."""
    return np.asarray(next(batch[s] for s in (NOW, START, MU) if s in batch), np.float64)


def covariance(advantage_M: Array, logp_M: Array) -> Array:
    """(A_t - mean A) * (logp_t - mean logp) (A33).

    p [.9, .1, .5, .3], A [1, 1, -1, -1] -> [.9709, -1.2263, -.3831, .1277].
    """
    return (advantage_M - advantage_M.mean()) * (logp_M - logp_M.mean())


def largest(x_M: Array, share: float) -> NDArray[np.bool_]:
    """The ceil(share * M) largest entries; ties go to the earlier token."""
    count = int(np.ceil(share * len(x_M)))
    out = np.zeros(len(x_M), bool)
    out[np.argsort(-x_M, kind="stable")[:count]] = True
    return out


def within_moment(log_ratio_M: Array, limit: float) -> NDArray[np.bool_]:
    """M2PO: which tokens are kept when the largest |log-ratio| are masked until the mean square of the rest is at most
    `limit` (A26).

    [.1, -.2, .5] has mean square .1; at limit .04 the token with .5 is masked.
    """
    # Sorted by size, the running mean of squares never falls. So the longest allowed prefix is
    # found by bisection, and masking the largest ones first is the same as keeping the smallest.
    order = np.argsort(np.abs(log_ratio_M), kind="stable")
    means = np.cumsum(log_ratio_M[order] ** 2) / np.arange(1, len(order) + 1)
    out = np.zeros(len(order), bool)
    out[order[: int(np.searchsorted(means, limit, side="right"))]] = True
    return out


def mixing(version_M: np.ndarray, start: int, making: int) -> Array:
    """A-3PO's alpha per token: (start - version) / (making - version), so 0 for a token of the current weights (A26).

    Sampled by version 3, step started at 6, making 7: .75.
    """
    # A turn of newer weights counts as sampled at the start. making > start, so nothing is divided by 0.
    said_M = np.minimum(version_M, start)
    return (start - said_M) / (making - said_M)
