"""The factor of each token's policy gradient in every trust region and correction, as the papers define it.

A second form of `algorithm.loss.push_factor` and `mismatch_correction`, in float64, which shares no code with them.
Each form returns the factor [M], and how far each token is from a bound at which it jumps (inf: none): nearer than
rounding, the two forms may decide differently.

Letters: r ratio, x its logarithm, A credit, p = exp(logp) the policy now; all [M].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LIMIT = 20.0
"""Log-ratios are clamped to this before exp, as in the definition of the ratio."""
LEAST = 1e-12
"""Least probability of all other tokens together, as in the definition of the distance."""


@dataclass(frozen=True, eq=False)
class PushInputs:
    """What a form reads of a minibatch."""

    r: np.ndarray
    x: np.ndarray
    credit: np.ndarray
    logp: np.ndarray
    sequence: np.ndarray
    """The episode of each token."""

    @property
    def up(self) -> np.ndarray:
        return self.credit > 0

    @property
    def down(self) -> np.ndarray:
        return self.credit < 0


Factor = tuple[np.ndarray, np.ndarray]


def sums(x: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """The sum over each token's episode."""
    return np.bincount(sequence, weights=x)[sequence]


def means(x: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    return sums(x, sequence) / sums(np.ones(len(x)), sequence)


def exp(x: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(x, -LIMIT, LIMIT))


def _smooth(push: np.ndarray) -> Factor:
    return push, np.full(len(push), np.inf)


def _clip(c: Any, t: PushInputs, cap: float | None) -> Factor:
    """Eq. 7 of 1707.06347: min(r A, clip(r) A) has the gradient r A, or none where the clipped branch is smaller."""
    top = math.inf if cap is None else cap
    kept = np.where(t.up, t.r <= 1 + c.high, np.where(t.down, (t.r >= 1 - c.low) & (t.r <= top), True))
    return t.r * kept, np.min([np.abs(t.r - bound) for bound in (1 + c.high, 1 - c.low, top)], axis=0)


def _soft(c: Any, t: PushInputs) -> Factor:
    """d/dlogp of 4 / tau sigmoid(tau (r - 1)), where s (1 - s) = 1 / (2 cosh(z / 2))^2. Far out 1 - s is rounding."""
    z = np.where(t.up, c.tau, c.tau_negative) * (t.r - 1)
    with np.errstate(over="ignore"):
        return t.r / np.cosh(z / 2) ** 2, np.where(z > 3, 0.0, np.inf)


def _geometric(c: Any, t: PushInputs) -> Factor:
    bounded = np.where(t.up, np.minimum(t.x, c.high), np.where(t.down, np.maximum(t.x, -c.low), t.x))
    return exp(means(bounded, t.sequence)) * (bounded == t.x), np.minimum(np.abs(t.x - c.high), np.abs(t.x + c.low))


def _divergence(c: Any, t: PushInputs) -> Factor:
    """Between the said token and all others, before and now."""
    before, now = t.logp - t.x, t.logp
    far = np.abs(np.exp(before) - np.exp(now)) if c.measure == "tv" else _binary_kl(before, now)
    leaves = (far > c.delta) & np.where(t.up, t.r > 1, t.down & (t.r < 1))
    return np.minimum(t.r, c.cap) * ~leaves, np.abs(far - c.delta)


def _binary_kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    p, q = np.exp(log_p), np.exp(log_q)
    others_p, others_q = np.maximum(1 - p, LEAST), np.maximum(1 - q, LEAST)
    others = np.where(others_p > LEAST, others_p * np.log(others_p / others_q), 0.0)
    return np.where(p > 0, p * (log_p - log_q), 0.0) + others


def _future_kl(c: Any, t: PushInputs) -> Factor:
    counted, ahead = np.where(t.r > c.ignore, 0.0, t.x), np.zeros(len(t.x))
    for episode in np.unique(t.sequence):
        total = 0.0
        for m in np.flatnonzero(t.sequence == episode)[::-1]:
            ahead[m] = total = counted[m] + 0.5 ** (1 / c.half_life) * total
    most = np.where(t.down & (t.r > c.loud), 1.0, 1 + c.band_high)
    push, near = _clip(c, t, None)
    ignored = sums((np.abs(t.r - c.ignore) < 1e-4).astype(float), t.sequence) > 0
    near = np.where(ignored, 0.0, np.minimum(near, np.abs(t.r - c.loud)))
    return push * np.minimum(np.maximum(exp(ahead), 1 - c.band_low), most), near


def _hump(c: Any, t: PushInputs) -> Factor:
    k, fade = np.where(t.up, c.k, c.k_negative), np.where(t.up, c.fade, c.fade_negative)
    far = np.abs(np.log(t.r)) + fade * np.abs(t.r - 1) > 10  # where rounding of the exponent shows
    return np.exp(k * np.log(t.r) + fade * (1 - t.r)), np.where(far, 0.0, np.inf)


REGIONS: Mapping[str, Callable[[Any, PushInputs], Factor]] = {
    "Clip": lambda c, t: _clip(c, t, c.cap),
    "Cap": lambda c, t: _smooth(np.clip(t.r, c.low, c.high)),
    "Taper": lambda c, t: _smooth(np.where(t.down, np.minimum(t.r, c.cap), 1.0)),
    "Soft": _soft,
    "Geometric": _geometric,
    "Divergence": _divergence,
    "FutureKL": _future_kl,
    "Hump": _hump,
}
"""The push, by the kind of the trust region."""


@dataclass(frozen=True, eq=False)
class MismatchInputs:
    """What a correction reads: log-probs of the sampler, of the learner at the start of the step, and now."""

    mu: np.ndarray
    start: np.ndarray
    tokens: PushInputs

    def ratio(self, level: str) -> np.ndarray:
        gap = self.start - self.mu
        return exp(gap if level == "token" else sums(gap, self.tokens.sequence))


def _mask(c: Any, m: MismatchInputs) -> Factor:
    raw = m.ratio(c.level)
    return raw * ((raw >= c.low) & (raw <= c.high)), np.minimum(np.abs(raw - c.low), np.abs(raw - c.high))


def _near_both_ways(c: Any, m: MismatchInputs) -> Factor:
    far = np.maximum(_binary_kl(m.start, m.mu), _binary_kl(m.mu, m.start))
    return m.ratio("token") * (far <= c.phi), np.abs(far - c.phi)


def _reject(c: Any, m: MismatchInputs) -> Factor:
    mean = exp(means(m.start - m.mu, m.tokens.sequence))
    return 1.0 * ((mean >= c.low) & (mean <= c.high)), np.minimum(np.abs(mean - c.low), np.abs(mean - c.high))


def _veto(c: Any, m: MismatchInputs) -> Factor:
    low = np.full(m.tokens.sequence.max(initial=0) + 1, np.inf)
    np.minimum.at(low, m.tokens.sequence, m.ratio("token"))
    least = low[m.tokens.sequence]
    return 1.0 * (least >= c.below), np.abs(least / c.below - 1)


def _negative_mask(c: Any, m: MismatchInputs) -> Factor:
    far = means(m.mu - m.tokens.logp, m.tokens.sequence)
    return 1.0 * ~(m.tokens.down & (far > c.delta)), np.abs(far - c.delta)


CORRECTIONS: Mapping[str, Callable[[Any, MismatchInputs], Factor]] = {
    "Truncate": lambda c, m: _smooth(np.minimum(m.ratio(c.level), math.inf if c.cap is None else c.cap)),
    "Mask": _mask,
    "BinaryKL": _near_both_ways,
    "Reject": _reject,
    "Veto": _veto,
    "NegativeMask": _negative_mask,
}
"""The factor c of A25, by the kind of the correction."""
