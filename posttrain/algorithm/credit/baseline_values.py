"""Baselines: what a reward is compared with. Each is a type in `ladder.pieces.baseline`, and a case of `centred` where
it gives one number per sample, or a function registered with `by_token` where it gives several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np

from posttrain.algorithm.credit.judged_sample import Sample, compared_rewards, joined, said_logp
from posttrain.algorithm.credit.process_rewards import process_rewards, to_go
from posttrain.algorithm.credit.reward_spread import Array, compared, from_lowest, mean
from posttrain.algorithm.credit.turn_credit import by_state, by_turn
from posttrain.algorithm.credit.value_estimates import gae, v_trace
from posttrain.algorithm.register import missing
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.scored import Scored
from posttrain.core.streams import ENERGY, START, VALUE
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces import baseline as pieces
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.implicit import ImplicitOthers


@dataclass(frozen=True, eq=False)
class Siblings:
    """The input of a baseline: the judged siblings of one prompt."""

    rewards: Array
    """Rewards after shaping [G]. Where the baseline is group-relative they have spread."""
    lengths: Array
    """Spoken tokens [G]."""
    greedy: float = 0.0
    """Reward of the prompt's greedy answer, where there is one."""
    ema: float = 0.0
    """The moving baseline before these samples."""
    again: bool = False
    """Whether an earlier step learned from them, so that the moving baseline has taken them in."""
    scored: Sequence[Scored] = ()
    """The siblings with the streams that the algorithm reads."""


@singledispatch
def centred(b: Baseline, siblings: Siblings) -> tuple[Array, float]:
    """(reward minus baseline [G] of one prompt, the moving baseline afterwards). Means are exact sums of differences
    from the lowest reward (`over`): permuting siblings changes nothing, and nearly equal rewards are still centred."""
    match b:
        case pieces.Zero() | pieces.ToGo():
            # `step_credit._over_tokens` takes off what was earned before a token, where it only answers for the rest.
            return siblings.rewards, siblings.ema
        case pieces.Ema():
            return _after_each(b.decay, siblings)
        case pieces.Greedy():
            return siblings.rewards - siblings.greedy, siblings.ema
        case pieces.GroupMean():
            over = from_lowest(siblings.rewards)
            return over - mean(over), siblings.ema
        case pieces.Others():
            over = from_lowest(siblings.rewards)
            # The sum of the others. There are at least two siblings: without spread nobody calls this.
            return over - (math.fsum(over) - over) / (len(over) - 1), siblings.ema
        case pieces.LengthMean():
            # b = sum |y| R / sum |y|. A shift of all rewards shifts b by as much, so differences may be used.
            over, total = from_lowest(siblings.rewards), math.fsum(siblings.lengths)
            return over - (math.fsum(siblings.lengths * over) / total if total else 0.0), siblings.ema
        case pieces.OffPolicyMean():
            return _off_policy(siblings), siblings.ema
        case pieces.SoftMean():
            # R - tau log mean exp(R / tau) is the same for R - max R, and there every exponent is at most 0.
            under = siblings.rewards - siblings.rewards.max()
            return under - b.tau * math.log(math.fsum(np.exp(under / b.tau)) / len(under)), siblings.ema
        case pieces.SecondBest():
            r = siblings.rewards
            # Where two siblings have the best reward, the second best is equal to it, and no sibling has credit.
            order = np.argsort(r, kind="stable")
            lead_G = np.zeros_like(r)
            lead_G[order[-1]] = r[order[-1]] - r[order[-2]]
            return lead_G, siblings.ema
        case _:
            raise missing(b, centred)


def _after_each(decay: float, siblings: Siblings) -> tuple[Array, float]:
    """`centred` by a moving average."""
    if siblings.again:
        return siblings.rewards - siblings.ema, siblings.ema
    # b_i must not depend on R_i: then E[b_i * grad log pi(y_i)] = 0 and the baseline adds no bias.
    before: list[float] = []
    ema = siblings.ema
    for x in siblings.rewards:
        before.append(ema)
        ema = decay * ema + (1 - decay) * float(x)
    return siblings.rewards - np.array(before), ema


def _off_policy(siblings: Siblings) -> Array:
    """Rewards 1, 0, 0 with log w = log 2, 0, 0 and energies 1, 1, 2: weights 4, 1, 2, baseline 4/7."""
    # The constant that makes E[w^2 |g|^2 (R - b)^2] least, where W stands for |g|^2, the squared gradient norm.
    over = from_lowest(siblings.rewards)
    energy = np.array([math.fsum(joined(s[ENERGY])) for s in siblings.scored])
    log_w = np.array([math.fsum(joined(s[START]) - said_logp(s)) for s in siblings.scored])
    if not np.any(energy > 0):  # nobody has a gradient, so no baseline is better than another
        return over - mean(over)
    # A response without a gradient has no part in b, nor in the scale. `minimum` keeps its exp finite.
    log_w -= log_w[energy > 0].max()  # so that the largest weight is not 0 nor inf
    weight = np.where(energy > 0, np.exp(2 * np.minimum(log_w, 0.0)) * energy, 0.0)
    return over - math.fsum(weight * over) / math.fsum(weight)


@dataclass(frozen=True, eq=False)
class TokenCredit:
    """Credit of one prompt's samples, per token."""

    credit: list[Array]
    """[T] of each sample."""
    silent: bool = False
    """Whether the samples have no spread."""
    returns: list[Array] | None = None
    """[T] of each sample: its value targets, where the baseline learns values."""


@singledispatch
def by_token(b: Baseline, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Credit of one prompt's samples from baselines that are `per_token`."""
    raise missing(b, by_token)


@by_token.register
def _(b: pieces.Value, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    pairs = [_with_values(b, s) for s in samples]
    return TokenCredit([advantage_T for advantage_T, _ in pairs], returns=[return_T for _, return_T in pairs])


def _with_values(value: pieces.Value, s: Sample) -> tuple[Array, Array]:
    """(advantage [T], return [T]) of one sample, from its rewards per token (A05): a turn's reward stands at its last
    token, the rest of the shaped reward at the last spoken one, each token's KL at the token itself."""
    values_T = joined(s.scored[VALUE])
    rewards_T = s.paid_T - s.penalty_T
    if len(rewards_T):
        # `shaped` holds what turns were paid as well, and that stands at their own ends already.
        rewards_T[-1] += s.shaped - math.fsum(s.paid_T)
    # The targets correct for the sampler by themselves, so this credit has one lambda for both.
    if value.trace is not None:
        log_T = joined(s.scored[START]) - said_logp(s.scored)
        return v_trace(
            values_T, rewards_T, np.exp(log_T), gamma=value.gamma, gae_lambda=value.gae_lambda, cap=value.trace
        )
    advantage_T, return_T = gae(values_T, rewards_T, gamma=value.gamma, gae_lambda=value.gae_lambda)
    # Decoupled: credit may have a longer memory than the targets, and so less bias.
    lambda_of_credit = credit_lambda(value, s.spoken)
    if lambda_of_credit != value.gae_lambda:
        advantage_T, _ = gae(values_T, rewards_T, gamma=value.gamma, gae_lambda=lambda_of_credit)
    return advantage_T, return_T


def credit_lambda(value: pieces.Value, length: int) -> float:
    """Lambda of an answer's credit: `credit_lambda`, `gae_lambda`, or 1 - 1 / (alpha * length), at least 0 (A19)."""
    if value.length_alpha is not None:
        return max(0.0, 1 - 1 / (value.length_alpha * length)) if length else 0.0
    return value.gae_lambda if value.credit_lambda is None else value.credit_lambda


@by_token.register
def _(b: pieces.StepMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Process-supervised credit (A07): steps are normalised over all steps of the group, and a token's credit is the
    sum over the steps that end at it or after it."""
    steps = [_steps(s) for s in samples]
    # Where no step was judged, each answer counts as one step. The rule is then that of outcomes.
    if not any(steps):
        rewards, noise = compared_rewards(a, samples)
        steps = [[(s.spoken, r)] for s, r in zip(samples, rewards.tolist(), strict=True)]
    else:
        noise = rounding([abs(v) for each in steps for _, v in each], max(s.resolution for s in samples))
    values = np.array([v for each in steps for _, v in each], np.float64)
    # One mean and one deviation compares all steps of all siblings.
    credits = iter(compared(values, noise, scaled=a.scale == "group_std").tolist())
    raw: list[Array] = []
    for s, each in zip(samples, steps, strict=True):
        ends_T = np.zeros(s.spoken)
        # `each` stands first in zip: when it ends, no number of the shared iterator has been taken for it.
        for (end, _), x in zip(each, credits, strict=False):
            if 0 < end <= s.spoken:
                ends_T[end - 1] += x
        # A token answers for the steps that end at it or later, never for one that was over before.
        raw.append(np.cumsum(ends_T[::-1])[::-1].copy())
    return TokenCredit(raw, not spread(values, noise))


def _steps(s: Sample) -> list[tuple[int, float]]:
    """(spoken tokens up to the step's end, value) of every judged step of an episode."""
    verdicts = s.scored.episode.verdicts
    return [
        (j.end, j.weight * j.verdict.score)
        for j in verdicts
        if j.end is not None and not j.paid and j.verdict.score is not None
    ]


@by_token.register
def _(b: pieces.EnergyMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Reward minus the mean over the siblings that have a token t, weighted by their energy W_t up to t (OTB, A04).

        sibling   reward   energies      W               credit
        1         1        .5, .5, .5    .5, 1, 1.5      3/4, 2/3, 0
        2         0        1.5, .5       1.5, 2          -1/4, -1/3

    The means at tokens 1 and 2 are .5 / 2 = 1/4 and 1 / 3. Only sibling 1 has a token 3, so its credit there is 0.
    """
    rewards, noise = compared_rewards(a, samples)
    if not spread(rewards, noise):
        return TokenCredit([np.zeros(s.spoken) for s in samples], True)
    # [G, T] with W_t in the row of each sibling, and 0 behind its end: there it has no part in the mean.
    weight_GT = np.zeros((len(samples), max(s.spoken for s in samples)))
    for row_T, s in zip(weight_GT, samples, strict=True):
        row_T[: s.spoken] = np.cumsum(joined(s.scored[ENERGY]))
    rewards = from_lowest(rewards)
    # b_t = sum W_t R / sum W_t over the columns. Sums are exact, so the order of the siblings cannot change b_t.
    total_T = np.array([math.fsum(w) for w in weight_GT.T])
    earned_T = np.array([math.fsum(w * rewards) for w in weight_GT.T])
    speaking_T = (np.array([s.spoken for s in samples])[:, None] > np.arange(len(total_T))).sum(0)
    # A sibling left alone would be compared with itself, and without energy there is no gradient to weigh.
    compared_T = (speaking_T > 1) & (total_T > 0)
    mean_T = np.divide(earned_T, total_T, out=np.zeros_like(total_T), where=compared_T)
    return TokenCredit(
        [np.where(compared_T, r - mean_T, 0.0)[: s.spoken] for r, s in zip(rewards, samples, strict=True)]
    )


@by_token.register
def _(b: ImplicitOthers, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Eq. 5 of 2502.01456: credit of the outcome, plus the sum to go of process rewards less the others' mean. Outcomes
    1, 0 and process rewards [.2, 0], [-.1]: the outcome credit is 1, -1; mean process rewards are .1, -.1. The first
    answer's less -.1 are .3, .1, with sums to go .4, .1: credit 1.4, 1.1. The second's is -1 + (-.1 - .1) = -1.2."""
    rewards, noise = compared_rewards(a, samples)
    if not spread(rewards, noise):
        return TokenCredit([np.zeros(s.spoken) for s in samples], True)
    # The two parts are centred apart, since process rewards are in units of their own.
    outcome, _ = centred(pieces.Others(), Siblings(rewards, np.array([s.spoken for s in samples], np.float64)))
    process = process_rewards(b.beta, samples)
    return TokenCredit([x + to_go(p_T) for x, p_T in zip(outcome, process, strict=True)])


@by_token.register(pieces.TurnMean)
@by_token.register(pieces.AnchorMean)
def _(b: pieces.TurnMean | pieces.AnchorMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    (rewards, noise), scaled = compared_rewards(a, samples), a.scale == "group_std"
    them = ([s.scored.episode for s in samples], rewards, noise)
    credit = by_turn(b, *them, scaled=scaled) if isinstance(b, pieces.TurnMean) else by_state(b, *them, scaled=scaled)
    # Whether the group is silent is read from the credit: turns may differ where the outcomes do not.
    return TokenCredit(credit, not any(np.any(x) for x in credit))
