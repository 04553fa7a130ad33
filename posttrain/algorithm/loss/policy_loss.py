"""The loss of one micro-batch: REINFORCE's gradient with a factor per token, plus further terms.

    loss = sum_t weight_t * ( -sg[c_t * push_t] * A_t * logp_t + pull_t - coef_H * H_t + coef_V * value_loss_t )

It is a plain weighted sum. The weights were normalised over the whole minibatch, so micro-batches and ranks add up. The
printed loss is a surrogate; only its gradient has a meaning, and it equals that of the published objective (law 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithm.credit.value_estimates import value_loss
from posttrain.algorithm.loss import reference_penalty
from posttrain.algorithm.loss.distribution_distance import jensen_shannon
from posttrain.algorithm.loss.minibatch_streams import CHOSEN, HEARD, IMITATE, MIX, WAS_SHOWN
from posttrain.algorithm.loss.mismatch_correction import CorrectionFactor, correct
from posttrain.algorithm.loss.push_factor import Push, TrustInputs, bounded_exp, importance, push
from posttrain.algorithm.loss.reference_penalty import pull_term
from posttrain.algorithm.loss.step_scale import ANSWER_RATIO, ANSWER_RATIO_SQUARE
from posttrain.algorithm.loss.token_selection import paid
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, TOP_LOGP, VALUE, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.system.errors import InvariantError


@dataclass(frozen=True, eq=False)
class Terms:
    """A differentiable scalar, and gauges of its computation (sums and counts over tokens)."""

    loss: Tensor
    gauges: Gauges


def objective(a: Algorithm, batch: Streams, scores: TokenScores) -> Terms:
    """Loss and gauges of one micro-batch of whole episodes. Those of a minibatch are the sums over its micro-batches.

    Args:
        a: the algorithm; all its choices are read, except those of credit and rollout.
        batch: streams [M], on the device of the scores.
        scores: differentiable log-prob [M] of each spoken token, with entropy, value and candidates where `a` reads
            them.

    Raises:
        InvariantError: a stream or score that the algorithm reads is missing.
    """
    # Order: what the ratio is taken against, the ratio, the trust region's factor, the correction, the choice of
    # tokens. Each multiplies a factor that is not differentiated; only log pi and the further terms have a gradient.
    logp_M: Tensor = scores.logp
    start_M = _start(a, logp_M.detach(), batch)
    # The log-ratio keeps its gradient, for pulls that are functions of it. `importance` detaches the ratio itself.
    log_ratio_M = logp_M - (batch[MU] if a.anchor == "behaviour" else start_M)
    ratio_M = importance(a.ratio, log_ratio_M, batch)
    pushed = push(
        a.clip,
        TrustInputs(
            ratio_M, log_ratio_M.detach(), batch[ADVANTAGE], logp_M.detach(), batch, _detached(scores.candidates)
        ),
    )
    # start/mu is apart from pi/anchor: the trust region must bound what
    # the updates did, not what sampler and learner disagree about.
    corrected = correct(a.correction, start_M, logp_M, batch) if a.correction else None
    factor_M = pushed.push_M if corrected is None else corrected.used_M * pushed.push_M
    # Last, so that it replaces the factor of a shown token. A demonstration has no sampler,
    # so its ratio, trust region and correction have no meaning.
    factor_M = _chosen(a, factor_M, logp_M.detach(), batch)
    # Every published objective has the gradient -factor * A * grad log pi for some factor (law 1), so none is
    # differentiated through its min, clip or ratio.
    term_M = -(factor_M * batch[ADVANTAGE]).detach() * logp_M + _further_terms(a, log_ratio_M, logp_M, batch, scores)
    gauge_sums = _GaugeSums(batch)
    # Under the policy's weights: a silent token has value error
    # too, which is why values keep silent tokens in the batch.
    if (value := a.learns_values) is not None:
        value_M, return_M = _present(scores.value, "value", a), batch[RETURN]
        each_M = value_loss(value_M, batch.find(VALUE), return_M, value.clip)
        term_M = term_M + value.coef * each_M
        gauge_sums.values(each_M, value_M, return_M)
    gauge_sums.policy(ratio_M, pushed, factor_M)
    if a.tokens is not None and a.tokens.silences:
        gauge_sums.masked(batch[CHOSEN])
    # An algorithm that reads no start has none in later optimizer steps either: a distance of 0 would be false there.
    gauge_sums.drift(logp_M, start_M, log_ratio_M, scores.entropy, knows_start=START in batch or "start" in a.reads)
    if corrected is not None:
        gauge_sums.correction(corrected)
    if a.step_scale is not None:
        gauge_sums.answers(logp_M.detach())
    # A sum and not a mean: WEIGHT already holds the denominators of the whole minibatch.
    loss = (batch[WEIGHT] * term_M).sum()
    if a.hears:
        gauge_sums.heard(_present(scores.heard, "heard", a))
    # Imitation has weights of its own, which sum to 1 over the imitated tokens alone, so it stands outside of WEIGHT.
    return Terms(loss if a.imitate is None else loss + imitation(a, logp_M, batch, scores), gauge_sums.gauges())


def supervised(weight_M: Tensor, logp_M: Tensor) -> Tensor:
    """Maximum likelihood: -sum_t weight_t * logp_t. The weights are normalised over the whole minibatch."""
    return -(weight_M * logp_M).sum()


def _start(a: Algorithm, now_M: Tensor, batch: Streams) -> Tensor:
    """Log-probs of the policy at the start of the step [M]: scored, the current ones, or interpolated (A-3PO, A26)."""
    # log prox = (1 - alpha) log mu + alpha log pi. pi enters as a number: the anchor has no gradient.
    if a.anchor == "proximal":
        return batch[MU] + batch[MIX] * (now_M - batch[MU])
    # Without START this is the first optimizer step, and pi is its own start:
    # log pi - sg[log pi] is 0 with the gradient of log pi, so the ratio is exactly 1.
    known_M = batch.find(START)
    return now_M if known_M is None else known_M


def _chosen(a: Algorithm, factor_M: Tensor, now_M: Tensor, batch: Streams) -> Tensor:
    """The push after the choice of tokens. Shown tokens get the gradient of p / (p + gamma) (LUFFY, A24)."""
    if a.tokens is not None and a.tokens.silences:
        factor_M = factor_M * batch[CHOSEN]
    if a.shown is None:
        return factor_M
    shown_M = batch[WAS_SHOWN]
    return torch.where(shown_M, 0.0 if a.shown.gamma is None else shown_push(now_M, a.shown.gamma), factor_M)


def shown_push(logp_M: Tensor, gamma: float) -> Tensor:
    """d f(p) / d log p of f(p) = p / (p + gamma): gamma .1 and p .01, .1, .5, .9 -> .0826, .25, .1389, .09 (A24)."""
    # df/d log p = p f'(p). It is largest at p = gamma and falls on both sides: a token
    # that the policy knows, or that is far out of its reach, is learned from little.
    p_M = logp_M.exp()
    return gamma * p_M / (p_M + gamma).square()


def _further_terms(a: Algorithm, log_ratio_M: Tensor, logp_M: Tensor, batch: Streams, scores: TokenScores) -> Tensor:
    """The differentiable terms beside the policy term, per token [M]."""
    # All of them are per token and get WEIGHT afterwards, so they too are normalised over the whole minibatch.
    term_M = torch.zeros_like(logp_M)
    if a.pull is not None and (pull_M := pull_term(a.pull, log_ratio_M, logp_M, batch)) is not None:
        term_M = term_M + pull_M
    if a.tokens is not None and (paid_M := paid(a.tokens, batch[CHOSEN], log_ratio_M)) is not None:
        term_M = term_M + paid_M
    if a.entropy is not None:
        term_M = term_M - a.entropy.coef * _present(scores.entropy, "entropy", a)
    if a.distill is not None:
        teacher_MK, student_MK = batch[TOP_LOGP], _present(scores.candidates, "candidates", a)
        term_M = term_M + a.distill.coef * jensen_shannon(teacher_MK, student_MK, a.distill.beta)
    return term_M


def imitation(a: Algorithm, logp_M: Tensor, batch: Streams, scores: TokenScores) -> Tensor:
    """-coef * weighted log-prob of the imitated tokens; the weights sum to 1 over the minibatch (A19, A24, ECHO)."""
    assert a.imitate is not None
    # [H] log-probs of told tokens, or [M] of spoken ones. HEARD holds the
    # same weight everywhere, so its first entry is that of each told token.
    logp_of_imitated: Tensor = _present(scores.heard, "heard", a) if a.hears else logp_M
    weight = batch[HEARD][0] if a.hears else batch[IMITATE]
    if a.imitate.unsure:
        # A weight, not a term: p (1 - p) is not differentiated.
        weight = weight * unsure(logp_of_imitated.detach())
    return -a.imitate.coef * (weight * logp_of_imitated).sum()


def unsure(logp_M: Tensor) -> Tensor:
    """CHORD-phi's p (1 - p): .01 -> .0099, .5 -> .25, .99 -> .0099 (A24)."""
    # 1 - p by `expm1`: near 1 a p in float32 has few digits of 1 - p left.
    return logp_M.exp() * -torch.expm1(logp_M)


def _present(score: Tensor | None, name: str, a: Algorithm) -> Tensor:
    """The score; InvariantError where the forward pass did not give it."""
    if score is None:
        raise InvariantError(
            f"the objective of {a.name!r} reads {name!r}, which the forward pass was not asked for: pass it to"
            " `Learner.forward`"
        )
    return score


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


class _GaugeSums:
    """Gauges of one micro-batch: sums stay on the device and are read once, at the end."""

    def __init__(self, batch: Streams) -> None:
        self._batch = batch
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        """Number of items that a gauge counts, where they are not tokens."""

    def _add(self, name: str, x_M: Tensor) -> None:
        # Summed on the device: reading each number at once would wait for the device each time.
        self._sums[name] = x_M.detach().sum(dtype=self._batch[WEIGHT].dtype)

    def policy(self, ratio_M: Tensor, pushed: Push, factor_M: Tensor) -> None:
        """Sizes of the ratios, and how many tokens were masked. `ratio_square` shows a few very large ratios."""
        self._add("policy/clip_low", pushed.low_M)
        self._add("policy/clip_high", pushed.high_M)
        self._add("policy/ratio", ratio_M)
        self._add("policy/ratio_square", ratio_M.square())
        self._add("policy/surrogate", factor_M * self._batch[ADVANTAGE])

    def masked(self, chosen_M: Tensor) -> None:
        """Tokens that `Algorithm.tokens` masks: they have no policy gradient, whatever the trust region says."""
        self._add("policy/masked", ~chosen_M.bool())

    def heard(self, logp_H: Tensor) -> None:
        """Log-probs of what the policy was told between its turns."""
        self._add("policy/heard", logp_H)
        self._counts["policy/heard"] = float(len(logp_H))

    def drift(
        self, logp_M: Tensor, start_M: Tensor, log_ratio_M: Tensor, entropy_M: Tensor | None, *, knows_start: bool
    ) -> None:
        """Distances per token: to the start of the step, the anchor and the reference (k3), and to the sampler.

        The mismatch is between start and mu. Where the start was not scored, the current policy is used instead. Shown
        tokens have no sampler, so they have no mismatch.
        """
        now_M, b = logp_M.detach(), self._batch
        # A stored log-prob of 0 stands for a demonstration's unknown one, and would be a large mismatch.
        mu_M = torch.where(b[WAS_SHOWN], start_M, b[MU]) if WAS_SHOWN in b else b[MU]
        # k3(gap) = exp(-gap) - 1 + gap with gap = log p - log q estimates KL(p || q) from tokens
        # drawn from p. So p is the sampler, or the policy nearest to it: start and anchor
        # against pi, mu against start. Towards the reference, p is pi.
        if knows_start:
            self._add("policy/kl_start", reference_penalty.estimate("k3", start_M - now_M))
        self._add("policy/kl_anchor", reference_penalty.estimate("k3", -log_ratio_M.detach()))
        self._add("mismatch/logp_gap", (start_M - mu_M).abs())
        self._add("mismatch/kl", reference_penalty.estimate("k3", mu_M - start_M))
        if REFERENCE in b:
            self._add("policy/kl_reference", reference_penalty.estimate("k3", now_M - b[REFERENCE]))
        if entropy_M is not None:
            self._add("policy/entropy", entropy_M)

    def values(self, loss_M: Tensor, value_M: Tensor, return_M: Tensor) -> None:
        """Value loss, and the sums for explained variance: 1 - Var(residual) / Var(return)."""
        # Variances are made of sums and sums of squares, which add up over micro-batches and ranks; variances do not.
        residual_M = return_M - value_M.detach()
        self._add("value/loss", loss_M)
        self._add("value/return", return_M)
        self._add("value/return_square", return_M.square())
        self._add("value/residual", residual_M)
        self._add("value/residual_square", residual_M.square())

    def correction(self, corrected: CorrectionFactor) -> None:
        """Raw and used start/mu. `effective_share` computes the effective sample size from used and used_square."""
        self._add("correction/raw", corrected.raw_M)
        self._add("correction/used", corrected.used_M)
        self._add("correction/used_square", corrected.used_M.square())
        self._add("correction/silenced", corrected.used_M == 0)

    def answers(self, now_M: Tensor) -> None:
        """pi(y)/mu(y) of every response, not bounded by any trust region. Each token has its share of the response's
        number, so that the sum over tokens is that over responses."""
        b = self._batch
        # A response's number divided over its tokens: a sum over tokens then
        # counts each response once, and the sum of 1 / |y| counts the responses.
        ratio_M, length_M = bounded_exp(b.episode_sum(now_M - b[MU])), b.episode_length()
        self._add(ANSWER_RATIO, ratio_M / length_M)
        self._add(ANSWER_RATIO_SQUARE, ratio_M.square() / length_M)
        responses = round(float((1 / length_M).sum()))
        self._counts |= dict.fromkeys((ANSWER_RATIO, ANSWER_RATIO_SQUARE), responses)

    def gauges(self) -> Gauges:
        count = float(len(self._batch[WEIGHT]))
        # One transfer for all gauges.
        sums = torch.stack(list(self._sums.values())).cpu().numpy()
        return {name: Gauge(float(x), self._counts.get(name, count)) for name, x in zip(self._sums, sums, strict=True)}
