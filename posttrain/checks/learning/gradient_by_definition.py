"""The factor of each token's policy gradient in every trust region and correction, as the papers define it.

A second form of `algorithm.loss.push_factor` and `mismatch_correction`, in float64, which shares no code with them.
`demand` puts the factors together into the expected gradient of the loss by each log-prob.

Each form of a trust region or a correction returns two arrays [M]: the factor, and each token's distance from the
nearest bound at which the factor jumps (inf: there is none). Where the distance is within rounding, the two forms may
decide differently, so such tokens are not compared.

Letters: r ratio, x its logarithm, A credit, p = exp(logp) the present policy; all [M]. In the code `c` is the piece
with its settings, and `t` or `m` is what the form reads of the minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from posttrain.algorithm.loss.minibatch_streams import CHOSEN, IMITATE, MIX, WAS_SHOWN
from posttrain.checks.learning.credit_by_definition import kind, pieces, uncovered_credit
from posttrain.core.batch import Batch
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.token_choice import KlCov

LIMIT = 20.0
"""Log-ratios are clamped to this before exp, as in the definition of the ratio."""
NEUTRAL_IN_LOSS = {
    "name",
    "paper",
    "note",
    "parent",
    "baseline",
    "scale",
    "whiten",
    "aggregate",
    "filter",
    "shape",
    "entropy",
    "curriculum",
    "rewards",
    "hint",
    "step_scale",
}
"""Choices of an algorithm that do not affect the gradient of its loss by a log-prob, once credit and weights are
known."""
LEAST = 1e-12
"""Least probability of all other tokens together, as in the definition of the distance."""


@dataclass(frozen=True, eq=False)
class PushInputs:
    """What the form of a trust region reads of a minibatch, all [M]."""

    r: np.ndarray
    """Ratios."""
    x: np.ndarray
    """Their logarithms, token by token."""
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
"""(factor, distance from the nearest bound), both [M]."""


def sums(x: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """For each token the sum of `x` over its episode."""
    return np.bincount(sequence, weights=x)[sequence]


def means(x: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """For each token the mean of `x` over its episode."""
    return sums(x, sequence) / sums(np.ones(len(x)), sequence)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x, with x clamped to +-LIMIT."""
    return np.exp(np.clip(x, -LIMIT, LIMIT))


def _smooth(push: np.ndarray) -> Factor:
    """A factor without a bound at which it jumps."""
    return push, np.full(len(push), np.inf)


def _clip(c: Any, t: PushInputs, cap: float | None) -> Factor:
    """Eq. 7 of 1707.06347: min(r A, clip(r) A) has the gradient r A, or none where the clipped branch is smaller."""
    top = math.inf if cap is None else cap
    # The gradient is r wherever the clipped branch is not the smaller one. Without credit nothing is clipped.
    kept = np.where(t.up, t.r <= 1 + c.high, np.where(t.down, (t.r >= 1 - c.low) & (t.r <= top), True))
    # The nearest of all bounds, whatever the sign: to leave one more token out does no harm.
    return t.r * kept, np.min([np.abs(t.r - bound) for bound in (1 + c.high, 1 - c.low, top)], axis=0)


def _soft(c: Any, t: PushInputs) -> Factor:
    """d/dlogp of 4 / tau s, where s = sigmoid(z) and z = tau (r - 1).

    It is 4 r s (1 - s) = r / cosh(z / 2)^2, since s (1 - s) = 1 / (2 cosh(z / 2))^2.
    """
    # tau is the steepness for positive credit, tau_negative that for the rest.
    z = np.where(t.up, c.tau, c.tau_negative) * (t.r - 1)
    with np.errstate(over="ignore"):
        # Far out the first form, with 1 - s, has few digits left, so those tokens are not compared.
        return t.r / np.cosh(z / 2) ** 2, np.where(z > 3, 0.0, np.inf)


def _geometric(c: Any, t: PushInputs) -> Factor:
    """The geometric mean of an episode's ratios, each bounded by the sign of its credit; 0 for a token beyond."""
    # Beyond the bound of its sign a log-ratio counts as the bound in the mean, and gets no gradient of its own.
    bounded = np.where(t.up, np.minimum(t.x, c.high), np.where(t.down, np.maximum(t.x, -c.low), t.x))
    return exp(means(bounded, t.sequence)) * (bounded == t.x), np.minimum(np.abs(t.x - c.high), np.abs(t.x + c.low))


def _divergence(c: Any, t: PushInputs) -> Factor:
    """min(r, cap), but 0 where the policy has moved too far and the step would lead further away.

    The distance is between the policies at the anchor and at present, as distributions over two outcomes: the said
    token, and all others.
    """
    # The log-prob at the anchor, from the log-ratio.
    before, now = t.logp - t.x, t.logp
    far = np.abs(np.exp(before) - np.exp(now)) if c.measure == "tv" else _binary_kl(before, now)
    # Outside the region only a step that leads further away is silenced; a step back keeps its gradient.
    leaves = (far > c.delta) & np.where(t.up, t.r > 1, t.down & (t.r < 1))
    return np.minimum(t.r, c.cap) * ~leaves, np.abs(far - c.delta)


def _binary_kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p || q) of two outcomes: the said token with probability p or q, and all others."""
    p, q = np.exp(log_p), np.exp(log_q)
    # For a certain token 1 - p is 0, so it has a least value.
    others_p, others_q = np.maximum(1 - p, LEAST), np.maximum(1 - q, LEAST)
    others = np.where(others_p > LEAST, others_p * np.log(others_p / others_q), 0.0)
    return np.where(p > 0, p * (log_p - log_q), 0.0) + others


def _future_kl(c: Any, t: PushInputs) -> Factor:
    """The clipped factor times e^F, where F is the discounted sum of log-ratios from the token on, within a band."""
    # Tokens with a ratio above `ignore` add nothing to the sum of what is to come.
    counted, ahead = np.where(t.r > c.ignore, 0.0, t.x), np.zeros(len(t.x))
    for episode in np.unique(t.sequence):
        # From the end: F_m = x_m + 2^(-1 / half-life) F_{m+1}.
        total = 0.0
        for m in np.flatnonzero(t.sequence == episode)[::-1]:
            ahead[m] = total = counted[m] + 0.5 ** (1 / c.half_life) * total
    # A loud token that credit makes less likely is never amplified.
    most = np.where(t.down & (t.r > c.loud), 1.0, 1 + c.band_high)
    push, near = _clip(c, t, None)
    # One token next to the bound changes the sums of all tokens before it, so the whole episode is unsure.
    ignored = sums((np.abs(t.r - c.ignore) < 1e-4).astype(float), t.sequence) > 0
    near = np.where(ignored, 0.0, np.minimum(near, np.abs(t.r - c.loud)))
    return push * np.minimum(np.maximum(exp(ahead), 1 - c.band_low), most), near


def _hump(c: Any, t: PushInputs) -> Factor:
    """r^k e^(fade (1 - r)), with other settings for credit that is not positive."""
    k, fade = np.where(t.up, c.k, c.k_negative), np.where(t.up, c.fade, c.fade_negative)
    # Where the exponent is large its rounding shows, so these tokens are not compared.
    far = np.abs(np.log(t.r)) + fade * np.abs(t.r - 1) > 10
    # Computed with one exponential.
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
    """What a correction reads."""

    mu: np.ndarray
    """Log-probs of the sampler."""
    start: np.ndarray
    """Log-probs of the learner at the start of the step."""
    tokens: PushInputs
    """It has the log-probs of the present policy."""

    def ratio(self, level: str) -> np.ndarray:
        """The ratio of start to sampler, of each token or ("sequence") of its episode."""
        gap = self.start - self.mu
        return exp(gap if level == "token" else sums(gap, self.tokens.sequence))


def _mask(c: Any, m: MismatchInputs) -> Factor:
    """The ratio, but 0 outside of the bounds."""
    raw = m.ratio(c.level)
    return raw * ((raw >= c.low) & (raw <= c.high)), np.minimum(np.abs(raw - c.low), np.abs(raw - c.high))


def _near_both_ways(c: Any, m: MismatchInputs) -> Factor:
    """The ratio, but 0 where start and sampler are too far apart by the KL of two outcomes."""
    # In both directions: either side may be the one that finds the token improbable.
    far = np.maximum(_binary_kl(m.start, m.mu), _binary_kl(m.mu, m.start))
    return m.ratio("token") * (far <= c.phi), np.abs(far - c.phi)


def _reject(c: Any, m: MismatchInputs) -> Factor:
    """1, but 0 for a whole answer whose mean ratio is outside of the bounds."""
    # The geometric mean of an answer's ratios decides for the whole answer; it is no factor itself.
    mean = exp(means(m.start - m.mu, m.tokens.sequence))
    return 1.0 * ((mean >= c.low) & (mean <= c.high)), np.minimum(np.abs(mean - c.low), np.abs(mean - c.high))


def _veto(c: Any, m: MismatchInputs) -> Factor:
    """1, but 0 for a whole answer one of whose ratios is below a bound."""
    # One improbable token silences its whole answer.
    low = np.full(m.tokens.sequence.max(initial=0) + 1, np.inf)
    np.minimum.at(low, m.tokens.sequence, m.ratio("token"))
    least = low[m.tokens.sequence]
    # As a share of the bound, which may be tiny.
    return 1.0 * (least >= c.below), np.abs(least / c.below - 1)


def _negative_mask(c: Any, m: MismatchInputs) -> Factor:
    """1, but 0 for tokens with negative credit in an answer that the policy has moved too far away from."""
    # Here the sampler is compared with the present policy, not with that of the start.
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


NEAR = 1e-5
"""A token nearer than this to a bound may be decided otherwise by rounding."""
BESIDE = {"distill", "imitate"}
"""Choices without a form whose gradient does not go through the log-probs of the said tokens."""


@dataclass(frozen=True, eq=False)
class Demand:
    """The expected gradient of the loss by each log-prob [M]."""

    want_M: np.ndarray
    size_M: np.ndarray
    """Size of its terms: rounding is relative to it."""
    sure_M: np.ndarray
    """False for a token so near a bound that rounding decides on which side it is."""


def uncovered(a: Algorithm) -> list[str]:
    """Names of the choices of an algorithm whose part of the loss has no second form here."""
    known = {"ratio", "anchor", "clip", "pull", "correction", "tokens", "imitate", "shown"}
    out = [f.name for f in fields(a) if f.name not in known | NEUTRAL_IN_LOSS and getattr(a, f.name) != f.default]
    # With `top` the divergence reads candidates, and the form here knows the said token alone.
    if a.clip is not None and (kind(a.clip) not in REGIONS or getattr(a.clip, "top", 0)):
        out.append("clip")
    if any(kind(piece) not in CORRECTIONS for piece in pieces(a.correction)):
        out.append("correction")
    if a.pull is not None and not _in_credit(a.pull) and kind(a.pull) not in ("KL", "SequenceL2", "TokenL2"):
        out.append("pull")
    if a.imitate is not None and a.imitate.of == "heard":
        out.append("imitate")
    return out


def computed_once(a: Algorithm) -> str:
    """A line that names what a run of this algorithm does not compute a second time; '' where it is nothing."""
    parts = {"loss": uncovered(a), "credit": uncovered_credit(a)}
    named = [f"{part} ({', '.join(choices)})" for part, choices in parts.items() if choices]
    return f"no second computation checks {' or '.join(named)}" if named else ""


def demand(a: Algorithm, batch: Batch, logp_M: np.ndarray) -> Demand | None:
    """d loss / d logp by definition: -weight * c * push * A + weight * d pull / d logp - coef * imitated, where c is
    the product of the corrections. None if a choice is not covered, or a stream that it reads is not in the batch."""
    # None: the choice is not made, so its stream is not needed.
    needed = {CHOSEN: a.tokens, MIX: a.anchor == "proximal" or None, WAS_SHOWN: a.shown}
    needed[IMITATE] = a.imitate if a.imitate is not None and a.imitate.of != "heard" else None
    lacks = any(choice is not None and stream not in batch for stream, choice in needed.items())
    if set(uncovered(a)) - BESIDE or lacks:
        return None
    mu = batch[MU].astype(np.float64)
    # Where the start of the step was not scored, the learner's present log-probs stand for it.
    start = batch[START].astype(np.float64) if START in batch else logp_M
    if a.anchor == "proximal":
        # The proximal anchor lies between sampler and learner, log-prob by log-prob.
        start = mu + batch[MIX] * (logp_M - mu)
    gap, credit, weight = logp_M - (mu if a.anchor == "behaviour" else start), batch[ADVANTAGE], batch[WEIGHT]
    inputs = PushInputs(_RATIOS[a.ratio](gap, batch.sequence_M), gap, credit, logp_M, batch.sequence_M)
    # Without a trust region the push is the ratio, and no bound is near.
    push, near = (inputs.r, np.full(len(gap), np.inf)) if a.clip is None else REGIONS[kind(a.clip)](a.clip, inputs)
    for piece in pieces(a.correction):
        factor, bound = CORRECTIONS[kind(piece)](piece, MismatchInputs(mu, start, inputs))
        # Factors multiply, and a token that is near a bound of any of them is unsure.
        push, near = push * factor, np.minimum(near, bound)
    if (pull_and_size := _pull(a.pull, batch, logp_M, gap)) is None:
        return None
    pull, size = pull_and_size
    if a.tokens is not None and a.tokens.silences:
        # A silenced token has no policy gradient; the pull reads it all the same.
        push = push * batch[CHOSEN]
    elif isinstance(a.tokens, KlCov):
        penalty = a.tokens.coef * batch[CHOSEN]
        # coef |log-ratio| at the chosen tokens: its slope jumps at 0. Adding 1 elsewhere keeps those tokens sure.
        pull, size, near = pull + penalty * np.sign(gap), size + penalty, np.minimum(near, np.abs(gap) + (penalty == 0))
    if a.shown is not None:
        p, gamma = np.exp(logp_M), a.shown.gamma
        # For shown tokens p / (p + gamma) replaces the ratio. Its slope by logp is gamma p / (p + gamma)^2.
        push = np.where(batch[WAS_SHOWN], 0.0 if gamma is None else gamma * p / (p + gamma) ** 2, push)
    want, size = weight * (pull - push * credit), weight * (np.abs(push * credit) + size)
    if a.imitate is not None and a.imitate.of != "heard":
        p = np.exp(logp_M)
        # Imitation has weights of its own, so it is added after the weighted sum.
        imitated = a.imitate.coef * batch[IMITATE] * (p * (1 - p) if a.imitate.unsure else 1.0)
        want, size = want - imitated, size + imitated
    return Demand(want, size, near > NEAR)


def value_demand(value: Any, batch: Batch, value_M: np.ndarray) -> np.ndarray | None:
    """d loss / d value of one minibatch: weight * coef * the derivative of half the larger square, plain or clipped."""
    if RETURN not in batch or (value.clip is not None and VALUE not in batch):
        return None
    unclipped = value_M - batch[RETURN]
    slope = unclipped
    if value.clip is not None and VALUE in batch:
        step = value_M - batch[VALUE]
        clipped = batch[VALUE] + np.clip(step, -value.clip, value.clip) - batch[RETURN]
        # The larger square counts. Where that is the clipped one, beyond the clip nothing moves the value.
        slope = np.where(unclipped**2 >= clipped**2, unclipped, np.where(np.abs(step) <= value.clip, clipped, 0.0))
    return batch[WEIGHT] * value.coef * slope


def _pull(pull: Any, batch: Batch, logp_M: np.ndarray, gap_M: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(d pull / d logp, size of its terms) of each token, without its weight; None if it is not covered.

    Args:
        gap_M: the log-ratio to the anchor.
    """
    nothing = np.zeros(len(logp_M))
    if pull is None or _in_credit(pull):
        return nothing, nothing
    if kind(pull) == "TokenL2":
        # coef gap^2. The rounding is that of the two log-probs, however small their difference.
        return 2 * pull.coef * gap_M, 2 * pull.coef * (np.abs(logp_M) + np.abs(logp_M - gap_M))
    if kind(pull) == "SequenceL2":
        # coef / 2 (sum of gaps)^2, once an episode: the same slope at each of its tokens.
        total = sums(gap_M, batch.sequence_M)
        return pull.coef * total, pull.coef * sums(np.abs(logp_M) + np.abs(logp_M - gap_M), batch.sequence_M)
    if REFERENCE not in batch or pull.placement not in ("loss", "both"):
        return None
    d = logp_M - batch[REFERENCE]
    # Beyond the limit the estimator is clamped, so it has no slope.
    clamped = np.maximum(d, -LIMIT)
    k3, k3_slope = np.exp(-clamped) - 1 + clamped, np.where(d < -LIMIT, 0.0, 1 - np.exp(-clamped))
    # rk3 is r k3 with r differentiated too: r k3 + r k3'. A clamped r has no slope.
    rk3_slope = exp(gap_M) * (k3 * (np.abs(gap_M) <= LIMIT) + k3_slope)
    slope = {"k2": d, "k3": k3_slope, "rk3": rk3_slope}.get(pull.estimator)
    # e^-d may be large, and rounding with it.
    size = pull.coef * (1 + np.abs(logp_M)) * np.maximum(1, np.exp(-clamped))
    if pull.estimator == "rk3":
        size = size * np.maximum(1, exp(gap_M))
    return None if slope is None else (pull.coef * slope, size)


def _in_credit(pull: Any) -> bool:
    """Returns whether the loss has no term of this pull."""
    return getattr(pull, "placement", "loss") in ("reward", "token")


_RATIOS = {
    "one": lambda gap, sequence: np.ones(len(gap)),
    "token": lambda gap, sequence: exp(gap),
    "sequence_mean": lambda gap, sequence: exp(means(gap, sequence)),
    # pi / sg[pi] has the value 1, so the ratio of GSPO-token is that of GSPO.
    "sequence_token": lambda gap, sequence: exp(means(gap, sequence)),
    "sequence_product": lambda gap, sequence: exp(sums(gap, sequence)),
}
