"""The gradient of a preference loss by each log-prob, from the definition, in numpy and float64.

It shares no code with the loss, and does not read the streams that are made for the loss over a whole minibatch. Pieces
are known by the name of their class. For an algorithm with any other piece there is no second computation.

    l    log-ratio of a token: log pi - log ref, or log pi alone (`against`)
    s    sum over a completion's tokens of (factor of the token) * l
    h    the completion's score, a function of s (`statistic`, `divergence`)
    u    its reward: beta * h - shift
    x    what a link of differences reads of a pair: u_chosen - u_rejected - margin
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from posttrain.checks.learning.credit_by_definition import kind, pieces
from posttrain.checks.learning.gradient_by_definition import Demand
from posttrain.core.batch import Batch
from posttrain.core.streams import COLLISION, OPPONENT, REFERENCE, START
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm

KNOWN: dict[str, tuple[str, ...]] = {
    "Total": (),
    "Average": (),
    "Desensitized": ("alpha",),
    "LogOdds": (),
    "ReverseKL": (),
    "ForwardKL": (),
    "JensenShannon": (),
    "AlphaDivergence": ("alpha",),
    "LogSigmoid": (),
    "Hinge": ("delta",),
    "Square": (),
    "Exact": ("rate",),
    "Discovered": ("tau",),
    "NoiseContrast": (),
    "Binary": (),
    "SelfPlay": (),
    "AnchoredZero": (),
    "Prospect": (),
    "AnchoredDown": (),
    "Nash": (),
    "Conservative": ("rate",),
    "Robust": ("rate",),
    "FixedMargin": ("gamma",),
    "RatioMargin": ("ratio",),
    "DataMargin": ("coef",),
    "ChosenNLL": ("coef", "over"),
    "GoldNLL": ("coef",),
    "Optimism": ("coef",),
}
"""The pieces that the definition covers, each with the settings that it reads. Other settings must have their
defaults."""
READ = ("statistic", "divergence", "link", "noise", "margin", "add")
"""The choices of an algorithm whose pieces are part of the loss. `draw` only says where pairs come from."""
NUDGE = 1e-6
"""By how much sums are moved to see how their rounding changes the slope, relative to the sum of their absolute
terms."""
FLAT = ("AnchoredZero", "AnchoredDown", "Prospect")
"""Links whose loss is a sigmoid. Where it is flat, its slope is the small difference of two larger numbers, so rounding
errors are large there."""
SAME = 1e-9
"""Two numbers that differ by less than this, relative to 1 + their size, may be sorted in either order."""


def unknown(a: PreferenceAlgorithm) -> tuple[str, ...]:
    """The names of the algorithm's pieces that the definition here does not cover; () where it covers all."""
    pieces_of_loss = [p for choice in READ for p in pieces(getattr(a, choice))]
    return tuple(type(p).__name__ for p in pieces_of_loss if not _known(p))


def _known(piece: Any) -> bool:
    """Whether the definition here covers a piece with these settings."""
    read = KNOWN.get(kind(piece))
    return (
        read is not None
        and not piece.absent
        # A setting that the definition does not read must have its default. Else the piece means something else than
        # it does here.
        and all(f.name in read or f.default is MISSING or getattr(piece, f.name) == f.default for f in fields(piece))
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedRows:
    """The judgements of the completions of a minibatch, as their judge gave them."""

    side_E: np.ndarray
    """1 chosen or good, 0 rejected or bad; in a ranking the number of completions it was preferred to."""
    unit_E: np.ndarray
    """The judgement of each completion, counted from 0."""
    weight_U: np.ndarray
    """How much each judgement counts, not normalised."""
    margin_U: np.ndarray | None = None

    @property
    def weight_E(self) -> np.ndarray:
        """The share of each completion's judgement in the minibatch."""
        return (self.weight_U / self.weight_U.sum())[self.unit_E]

    def at(self, side: int) -> np.ndarray:
        """The completions of one side, in order."""
        return np.flatnonzero(self.side_E == side)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The completions of a minibatch, token by token."""

    sequence_M: np.ndarray
    unit_E: np.ndarray

    @property
    def length_E(self) -> np.ndarray:
        return np.bincount(self.sequence_M, minlength=len(self.unit_E))

    def sum(self, x_M: np.ndarray) -> np.ndarray:
        """[E]: the sum over the tokens of each completion."""
        return np.bincount(self.sequence_M, x_M, len(self.unit_E))

    def share(self, statistic: Any) -> np.ndarray:
        """[M]: the factor of each token in the sum s of its completion."""
        n_E = self.length_E
        if kind(statistic) in ("Average", "LogOdds"):
            return (1 / n_E)[self.sequence_M]
        if kind(statistic) != "Desensitized":
            return np.ones(len(self.sequence_M))
        # LD-DPO (2409.06411): tokens beyond the length of the unit's shortest completion have the factor alpha.
        shortest_E = np.array([n_E[self.unit_E == u].min() for u in self.unit_E])
        # The place of each token in its completion, whose tokens lie side by side in [M].
        nth_M = np.concatenate([np.zeros(0, np.int64), *(np.arange(n) for n in n_E)])
        return np.where(nth_M < shortest_E[self.sequence_M], 1.0, statistic.alpha)

    def scores(self, a: PreferenceAlgorithm, l_M: np.ndarray) -> np.ndarray:
        """[E]: the score h of each completion."""
        return _score(a, self.sum(self.share(a.statistic) * l_M))[0]


def _score(a: PreferenceAlgorithm, s_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(score h of each completion, its derivative dh/ds), from the sums s."""
    if kind(a.statistic) == "LogOdds":
        # s is the mean log-prob, p = exp(s). h = log(p / (1 - p)) = s - log(1 - p), and dh/ds = 1 / (1 - p). At p = 1
        # the odds are infinite, so s stays below 0. This is 1 - p:
        one_minus_p = -np.expm1(np.minimum(s_E, -1e-30))
        return s_E - np.log(one_minus_p), 1 / one_minus_p
    # h = f'(t) with t = exp(s), and dh/ds, of each divergence (2309.16240).
    match kind(a.divergence):
        case "ForwardKL":
            return -np.expm1(-s_E), np.exp(-s_E)
        case "JensenShannon":
            return np.log(2) - np.logaddexp(0, -s_E), _sigmoid(-s_E)
        case "AlphaDivergence":
            power = a.divergence.alpha - 1  # type: ignore[attr-defined]
            return np.expm1(power * s_E) / power, np.exp(power * s_E)
        case _:
            return s_E, np.ones(len(s_E))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _bump(x: np.ndarray) -> np.ndarray:
    """The derivative of the sigmoid."""
    return _sigmoid(x) * _sigmoid(-x)


def _of_difference(link: Any, x: np.ndarray, beta: float) -> np.ndarray:
    """The derivative by x of a link of differences, a loss f(x)."""
    match kind(link):
        case "LogSigmoid":
            return -_sigmoid(-x)
        case "Hinge":
            return np.where(x < link.delta, -1.0, 0.0)
        case "Square":
            # d/dx (x / beta - 1 / (2 beta))^2
            return 2 * (x / beta - 1 / (2 * beta)) / beta
        case "Exact":
            # With q = sigmoid(x), d KL / dq = log(q / (1 - q)) - log((1 - rate) / rate), whose first term is x.
            return _bump(x) * (x - np.log((1 - link.rate) / link.rate))
        case _:  # Discovered
            # f(x) = m exp(-x) + (1 - m) log(1 + exp(-x)) with m = sigmoid(x / tau), by the product rule. `far` and
            # `near` are the two losses that m mixes.
            m = _sigmoid(x / link.tau)
            far, near = np.exp(-x), np.logaddexp(0, -x)
            return m * (1 - m) / link.tau * (far - near) - (1 - m) * _sigmoid(-x) - m * far


def _noisy(a: PreferenceAlgorithm, x: np.ndarray) -> np.ndarray:
    """The derivative by x of the pair's loss, with the label noise of the algorithm (`noise`), if any."""
    up, noise = _of_difference(a.link, x, a.beta), a.noise
    if noise is None:
        return up
    # Conservative: (1 - rate) f(x) + rate f(-x). Robust: ((1 - rate) f(x) - rate f(-x)) / (1 - 2 rate). The derivative
    # of f(-x) is -f'(-x), so the signs before `down` are turned.
    rate, down = noise.rate, _of_difference(a.link, -x, a.beta)  # type: ignore[attr-defined]
    return (
        (1 - rate) * up - rate * down
        if kind(noise) == "Conservative"
        else ((1 - rate) * up + rate * down) / (1 - 2 * rate)
    )


def _of_side(link: Any, u: np.ndarray, good: np.ndarray, beta: float) -> np.ndarray:
    """The derivative by the reward u of a link of sides, whose loss of a completion depends on u and its side alone."""
    match kind(link):
        case "NoiseContrast":
            # Both sides have -log sigmoid(-u) / 2, the chosen one -log sigmoid(u) besides.
            return 0.5 * _sigmoid(u) - np.where(good, _sigmoid(-u), 0.0)
        case "Binary":
            return np.where(good, -_sigmoid(-u), _sigmoid(u))
        case "SelfPlay":
            return 2 * (u - np.where(good, 0.5, -0.5)) / beta**2
        case _:  # AnchoredZero, Prospect
            # 1 - sigmoid(u) of a good completion, sigmoid(u) of a bad one.
            return np.where(good, -_bump(u), _bump(u))


@dataclass(frozen=True, eq=False)
class _Constants:
    """Numbers of a minibatch that are constants for the gradient."""

    shift: float
    match_E: np.ndarray
    """The number with which a completion's score (match=rewards), or its pair's margin (match=margins), is compared."""
    margin_U: np.ndarray
    """The margin of each pair, in units of x."""
    sure_E: np.ndarray
    """False where rounding decides the rank of a completion (`match`), so that its gradient cannot be compared."""


def preference_demand(
    a: PreferenceAlgorithm, batch: Batch, logp_M: np.ndarray, rows: JudgedRows, shift: float = 0.0
) -> Demand | None:
    """The gradient d loss / d logp of a whole minibatch, token by token; None if a piece is not covered.

    Args:
        batch: its tokens, with `REFERENCE`, `START`, `COLLISION` and `OPPONENT` where the algorithm reads them.
        logp_M: the policy's log-probs.
        rows: how its completions were judged.
        shift: the number that is subtracted from each reward (`shift=...`).
    """
    if unknown(a):
        return None
    tokens = _Tokens(batch.sequence_M, rows.unit_E)
    weight_M = rows.weight_E[batch.sequence_M]
    # The gradient by a token's log-prob is a product, plus the added terms:
    # coef * (share of its judgement) * (factor of the token in s) * (slope of the judgement's loss by s).
    # Sums s and slopes are of whole completions, [E]. `size_M` is the size of a gradient's terms, to which its rounding
    # error is proportional.
    l_M = logp_M - batch[REFERENCE] if a.against == "reference" else logp_M
    want_M, size_M = _added(a, batch, rows, tokens)
    if kind(a.link) == "Nash":
        chosen = (rows.side_E == 1)[batch.sequence_M]
        assert rows.margin_U is not None
        p_M = rows.margin_U[rows.unit_E][batch.sequence_M]
        # Only the policy's own tokens have a gradient: beta * log-ratio - (preference of the completion - 1/2). It is
        # the gradient of the game against the opponent (2312.00886).
        own_M = a.coef * weight_M * ~batch[OPPONENT]
        preference_M = np.where(chosen, p_M, 1 - p_M) - 0.5
        want_M = want_M + own_M * (a.beta * (logp_M - batch[REFERENCE]) - preference_M)
        size_M = size_M + own_M * (a.beta * np.abs(l_M) + 0.5)
        return Demand(want_M, size_M, np.ones(batch.spoken, bool))
    fixed, share_M = _constants(a, batch, rows, tokens, shift), tokens.share(a.statistic)
    # With match=margins the sums are of log pi alone: the margins of the reference are the constants `match_E`.
    summed_M = logp_M if a.match == "margins" else l_M
    # The sum s of each completion, and the sum of its absolute terms, to which the rounding error of s is proportional.
    sums_E, terms_E = tokens.sum(share_M * summed_M), tokens.sum(share_M * np.abs(summed_M))
    # Margin and shift are subtracted from beta * h. Divided by beta they are in the units of the sums.
    constants_E = np.zeros(len(terms_E)) + (np.abs(fixed.margin_U)[rows.unit_E] + abs(fixed.shift)) / a.beta
    terms_E = terms_E + constants_E + np.abs(fixed.match_E)
    slope_E = _slope(a, rows, fixed, sums_E)
    # How much the slope changes if the sums are wrong by `NUDGE`: the chosen ones too high and the rejected ones too
    # low, or the other way round. Both are tried, since a slope with a corner may change in one direction only.
    signed_E = NUDGE * terms_E * np.where(rows.side_E == 1, 1.0, -1.0)
    slope_change_E = np.maximum(
        *(np.abs(_slope(a, rows, fixed, sums_E + nudge_E) - slope_E) for nudge_E in (signed_E, -signed_E))
    )
    pair_weight_E = _wpo_weight(batch, tokens, rows) if a.weights == "wpo" else np.ones(len(slope_E))
    factor_M = a.coef * weight_M * pair_weight_E[batch.sequence_M] * share_M
    size_E = np.abs(slope_E) + slope_change_E / NUDGE
    if kind(a.link) in FLAT:
        # The slope of a sigmoid is at most 1/4. Where it is flat, the true slope is far smaller than what rounding does
        # to it.
        size_E = size_E + 0.25 * a.beta * np.abs(_score(a, sums_E)[1])
    return Demand(
        want_M + factor_M * slope_E[batch.sequence_M],
        size_M + factor_M * size_E[batch.sequence_M],
        fixed.sure_E[batch.sequence_M],
    )


def _slope(a: PreferenceAlgorithm, rows: JudgedRows, fixed: _Constants, sums_E: np.ndarray) -> np.ndarray:
    """[E]: the derivative of each judgement's loss by the sum s of each of its completions, before weights."""
    h_E, by_sum_E = _score(a, sums_E)
    u_E, good = a.beta * h_E - fixed.shift, rows.side_E == 1
    out = np.zeros(len(h_E))
    if a.rows == "label":
        return a.beta * by_sum_E * np.where(good, a.good, a.bad) * _of_side(a.link, u_E, good, a.beta)
    c, r = rows.at(1), rows.at(0)
    if a.match == "rewards":
        # A chosen completion is compared with a rejected score of the same rank, and a rejected one with a chosen
        # score. Both are constants, so each side has a slope of its own.
        out[c] = _noisy(a, a.beta * (h_E[c] - fixed.match_E[c]))
        out[r] = -_noisy(a, a.beta * (fixed.match_E[r] - h_E[r]))
    elif a.link.of == "sides":
        out[c] = _of_side(a.link, u_E[c], good[c], a.beta)
        out[r] = _of_side(a.link, u_E[r], good[r], a.beta)
    elif kind(a.link) == "AnchoredDown":
        # The loss is sigmoid(u_c) - sigmoid(u_c - u_r) up to a constant. `_bump` is even: _bump(-x) = _bump(x).
        out[r] = _bump(u_E[r] - u_E[c])
        out[c] = _bump(u_E[c]) - out[r]
    else:
        x = u_E[c] - u_E[r] - fixed.margin_U - (a.beta * fixed.match_E[c] if a.match == "margins" else 0.0)
        out[c] = _noisy(a, x)
        out[r] = -out[c]
    return a.beta * by_sum_E * out


def _constants(a: PreferenceAlgorithm, batch: Batch, rows: JudgedRows, tokens: _Tokens, shift: float) -> _Constants:
    """The constants of a minibatch: the margins of its pairs, and the numbers of `match`."""
    units, margin = len(rows.weight_U), a.margin
    margin_U = np.zeros(units)
    match kind(margin):
        case "FixedMargin":
            margin_U += margin.gamma  # type: ignore[union-attr]
        case "RatioMargin":
            margin_U += margin.ratio * a.beta  # type: ignore[union-attr]
        case "DataMargin":
            assert rows.margin_U is not None
            margin_U = margin.coef * rows.margin_U  # type: ignore[union-attr]
    match_E, sure_E = np.zeros(len(rows.unit_E)), np.ones(len(rows.unit_E), bool)
    if a.match is not None:
        c, r = rows.at(1), rows.at(0)
        # Ranks are those at the start of the step. They do not change with the log-probs, so they have no gradient.
        start_M, reference_M = (batch[s].astype(np.float64) for s in (START, REFERENCE))
        if a.match == "margins":
            policy_E, reference_E = (tokens.scores(a, x) for x in (start_M, reference_M))
            match_E[c], sure = _at_rank(policy_E[c] - policy_E[r], reference_E[c] - reference_E[r])
            match_E[r], sure_E[c], sure_E[r] = match_E[c], sure, sure
        else:
            h_E = tokens.scores(a, start_M - reference_M)
            match_E[c], sure_E[c] = _at_rank(h_E[c], h_E[r])
            match_E[r], sure_E[r] = _at_rank(h_E[r], h_E[c])
    return _Constants(shift, match_E, margin_U, sure_E)


def _at_rank(own: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(for each entry of `own` the entry of `other` with the same rank, whether that rank is beyond rounding)."""
    # rank = smaller entries, plus equal entries before it. The loss sorts instead: this is written in another way.
    rank = np.array([int((own < x).sum() + (own[:i] == x).sum()) for i, x in enumerate(own)])
    # Every entry is near itself. If a second one is near it, rounding decides their ranks.
    near = np.abs(own[:, None] - own[None, :]) <= SAME * (1 + np.abs(own))[:, None]
    return np.sort(other)[rank], near.sum(1) == 1


def _wpo_weight(batch: Batch, tokens: _Tokens, rows: JudgedRows) -> np.ndarray:
    """[E]: each pair's weight for `weights=wpo`: the product over both sides of exp(mean of log p - log sum p^2)."""
    logp_M = batch[START].astype(np.float64)
    mean_E = tokens.sum(logp_M - np.log(batch[COLLISION].astype(np.float64))) / tokens.length_E
    # The product of two exponentials is the exponential of the sum.
    return np.exp(np.bincount(rows.unit_E, mean_E))[rows.unit_E]


def _added(a: PreferenceAlgorithm, batch: Batch, rows: JudgedRows, tokens: _Tokens) -> tuple[np.ndarray, np.ndarray]:
    """(the gradient of the added terms, its absolute value), [M] each."""
    weight_M, side_M = rows.weight_E[batch.sequence_M], rows.side_E[batch.sequence_M]
    out = np.zeros(batch.spoken)
    for term in a.add:
        coef: float = term.coef  # type: ignore[attr-defined]
        if kind(term) == "Optimism":
            out = out + coef * weight_M * batch[OPPONENT]
            continue
        # A gold completion stands on side 2 of its unit, beside the chosen and the rejected one.
        on_M = weight_M * (side_M == (2 if kind(term) == "GoldNLL" else 1))
        divisor = 1.0 if getattr(term, "over", "tokens") == "sequences" else on_M.sum()
        out = out - coef * on_M / (divisor or 1.0)  # 0: no completion is on that side, so the term is 0
    return out, np.abs(out)


def running_shift(
    a: PreferenceAlgorithm, batch: Batch, rows: JudgedRows, total: float, count: float
) -> tuple[float, float]:
    """(sum, count) of the rewards of all completions so far, this minibatch included. `shift=running` is their mean."""
    start_M = batch[START].astype(np.float64)
    l_M = start_M - batch[REFERENCE] if a.against == "reference" else start_M
    u_E = a.beta * _Tokens(batch.sequence_M, rows.unit_E).scores(a, l_M)
    return total + float(u_E.sum()), count + len(u_E)
