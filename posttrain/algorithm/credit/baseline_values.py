"""Baselines: what a reward is compared with. Each is a type in `ladder.pieces.baseline` and a function here, registered
for that type.

A baseline that gives one number per sample registers with `centred`. One that gives several registers with `by_token`.
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
from posttrain.ladder.pieces.baseline import (
    AnchorMean,
    Baseline,
    Ema,
    EnergyMean,
    Greedy,
    GroupMean,
    LengthMean,
    OffPolicyMean,
    Others,
    SecondBest,
    SoftMean,
    StepMean,
    ToGo,
    TurnMean,
    Value,
    Zero,
)
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.source_ema import SourceEma

# --- one number per sample -----------------------------------------------------------------------------------------


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
    """(reward minus baseline [G] of one prompt, the moving baseline afterwards).

    Means are exact sums, so permuting the siblings changes nothing. They are taken of differences from the lowest
    reward, so that rewards which are nearly equal are still centred.
    """
    raise missing(b, centred)


@centred.register(Zero)
@centred.register(ToGo)
def _(b: Zero | ToGo, siblings: Siblings) -> tuple[Array, float]:
    # `Zero` has no baseline. `ToGo` has none here either: `step_credit._over_tokens` takes off, token by token, what
    # was earned before the token.
    return siblings.rewards, siblings.ema


@centred.register(Ema)
@centred.register(SourceEma)
def _(b: Ema, siblings: Siblings) -> tuple[Array, float]:
    if siblings.again:
        return siblings.rewards - siblings.ema, siblings.ema
    # b_i must not depend on R_i: then E[b_i * grad log pi(y_i)] = 0 and the baseline adds
    # no bias. So each sample is compared with the average as the samples before it left it.
    before: list[float] = []
    ema = siblings.ema
    for x in siblings.rewards:
        before.append(ema)
        ema = b.decay * ema + (1 - b.decay) * float(x)
    return siblings.rewards - np.array(before), ema


@centred.register
def _(b: GroupMean, siblings: Siblings) -> tuple[Array, float]:
    over = from_lowest(siblings.rewards)
    return over - mean(over), siblings.ema


@centred.register
def _(b: Others, siblings: Siblings) -> tuple[Array, float]:
    over = from_lowest(siblings.rewards)
    # The sum less its own term is the sum of the others. There
    # are at least two siblings: without spread nobody calls this.
    return over - (math.fsum(over) - over) / (len(over) - 1), siblings.ema


@centred.register
def _(b: LengthMean, siblings: Siblings) -> tuple[Array, float]:
    # b = sum |y| R / sum |y|. A shift of all rewards shifts b by as much, so differences from the lowest may be used.
    over, total = from_lowest(siblings.rewards), math.fsum(siblings.lengths)
    return over - (math.fsum(siblings.lengths * over) / total if total else 0.0), siblings.ema


@centred.register
def _(b: OffPolicyMean, siblings: Siblings) -> tuple[Array, float]:
    """Rewards 1, 0, 0 with log w = log 2, 0, 0 and energies 1, 1, 2: weights 4, 1, 2, baseline 4/7."""
    # b = sum w^2 W R / sum w^2 W is the constant that makes E[w^2 |g|^2 (R - b)^2]
    # least, where W stands for |g|^2, the squared norm of a response's gradient.
    over = from_lowest(siblings.rewards)
    energy = np.array([math.fsum(joined(s[ENERGY])) for s in siblings.scored])
    log_w = np.array([math.fsum(joined(s[START]) - said_logp(s)) for s in siblings.scored])
    if not np.any(energy > 0):  # nobody has a gradient, so no baseline is better than another
        return over - mean(over), siblings.ema
    # A response without a gradient has no part in b, so it does not set the scale either: its
    # w may be larger than all others. `minimum` keeps its exp finite; its weight is 0 anyway.
    log_w -= log_w[energy > 0].max()  # so that the largest weight is not 0 nor inf
    weight = np.where(energy > 0, np.exp(2 * np.minimum(log_w, 0.0)) * energy, 0.0)
    return over - math.fsum(weight * over) / math.fsum(weight), siblings.ema


@centred.register
def _(b: SoftMean, siblings: Siblings) -> tuple[Array, float]:
    # log-sum-exp: R - tau log mean exp(R / tau) is the same for R - max R, and there every exponent is at most 0.
    under = siblings.rewards - siblings.rewards.max()
    return under - b.tau * math.log(math.fsum(np.exp(under / b.tau)) / len(under)), siblings.ema


@centred.register
def _(b: SecondBest, siblings: Siblings) -> tuple[Array, float]:
    r = siblings.rewards
    # Where two siblings have the best reward, the second best is equal to it, and no sibling has credit.
    order = np.argsort(r, kind="stable")
    lead_G = np.zeros_like(r)
    lead_G[order[-1]] = r[order[-1]] - r[order[-2]]
    return lead_G, siblings.ema


@centred.register
def _(b: Greedy, siblings: Siblings) -> tuple[Array, float]:
    return siblings.rewards - siblings.greedy, siblings.ema


# --- several numbers per sample ------------------------------------------------------------------------------------


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
def _(b: Value, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    pairs = [_with_values(b, s) for s in samples]
    return TokenCredit([advantage_T for advantage_T, _ in pairs], returns=[return_T for _, return_T in pairs])


def _with_values(value: Value, s: Sample) -> tuple[Array, Array]:
    """(advantage [T], return [T]) of one sample, from its rewards per token (A05).

    A turn's reward stands at the last token of the turn. The rest of the shaped reward stands at the last spoken token.
    Each token's KL stands at the token itself.
    """
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
    # Decoupled: values learn from targets with `gae_lambda`, while credit may
    # have a longer memory and so less bias. The values V_t are the same in both.
    lambda_of_credit = credit_lambda(value, s.spoken)
    if lambda_of_credit != value.gae_lambda:
        advantage_T, _ = gae(values_T, rewards_T, gamma=value.gamma, gae_lambda=lambda_of_credit)
    return advantage_T, return_T


def credit_lambda(value: Value, length: int) -> float:
    """Lambda of the credit of an answer of `length` tokens: `credit_lambda`, `gae_lambda`, or 1 - 1 / (alpha * length),
    not below 0 (A19)."""
    if value.length_alpha is not None:
        return max(0.0, 1 - 1 / (value.length_alpha * length)) if length else 0.0
    return value.gae_lambda if value.credit_lambda is None else value.credit_lambda


@by_token.register
def _(b: StepMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Process-supervised credit (A07). Steps are normalised over all steps of the group. The credit of a token is the
    sum over the steps that end at it or after it."""
    steps = [_steps(s) for s in samples]
    # Where no step was judged, each answer counts as one step. The rule is then that of outcomes.
    if not any(steps):
        rewards, noise = compared_rewards(a, samples)
        steps = [[(s.spoken, r)] for s, r in zip(samples, rewards.tolist(), strict=True)]
    else:
        noise = rounding([abs(v) for of_sample in steps for _, v in of_sample], max(s.resolution for s in samples))
    values = np.array([v for of_sample in steps for _, v in of_sample], np.float64)
    # All steps of all siblings lie in one flat array, since one mean and
    # one deviation compares them. They are handed back in the same order.
    credits = iter(compared(values, noise, scaled=a.scale == "group_std").tolist())
    raw: list[Array] = []
    for s, of_sample in zip(samples, steps, strict=True):
        ends_T = np.zeros(s.spoken)
        # `of_sample` stands first in zip: when it ends, no number of the shared iterator has been taken for it.
        for (end, _), x in zip(of_sample, credits, strict=False):
            # A step whose end is no token of the answer counts in the mean, and pays no token.
            if 0 < end <= s.spoken:
                ends_T[end - 1] += x
        # Sum to go: a token answers for the steps that end at it or
        # later, never for one that was over before it was said.
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
def _(b: EnergyMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Reward minus the mean over the siblings that have a token t, weighted by their energy W_t up to t (OTB, A04).

        sibling   reward   energies      W               credit
        1         1        .5, .5, .5    .5, 1, 1.5      3/4, 2/3, 0
        2         0        1.5, .5       1.5, 2          -1/4, -1/3

    The means at tokens 1 and 2 are .5 / 2 = 1/4 and 1 / 3. Only sibling 1 has a token 3, so its credit there is 0.
    """
    rewards, noise = compared_rewards(a, samples)
    if not spread(rewards, noise):
        return TokenCredit([np.zeros(s.spoken) for s in samples], True)
    # [G, T] with W_t in the row of each sibling. Behind the sibling's
    # end the row stays 0: a sibling without a token t has no part in the mean at t.
    weight_GT = np.zeros((len(samples), max(s.spoken for s in samples)))
    for row_T, s in zip(weight_GT, samples, strict=True):
        row_T[: s.spoken] = np.cumsum(joined(s.scored[ENERGY]))
    rewards = from_lowest(rewards)
    # b_t = sum W_t R / sum W_t over the columns. Sums are exact, so the order of the siblings cannot change b_t.
    total_T = np.array([math.fsum(w) for w in weight_GT.T])
    earned_T = np.array([math.fsum(w * rewards) for w in weight_GT.T])
    speaking_T = (np.array([s.spoken for s in samples])[:, None] > np.arange(len(total_T))).sum(0)
    # A sibling that is left alone would be compared with itself.
    # Where all energies are 0 there is no gradient to weigh.
    compared_T = (speaking_T > 1) & (total_T > 0)
    mean_T = np.divide(earned_T, total_T, out=np.zeros_like(total_T), where=compared_T)
    return TokenCredit(
        [np.where(compared_T, r - mean_T, 0.0)[: s.spoken] for r, s in zip(rewards, samples, strict=True)]
    )


@by_token.register
def _(b: ImplicitOthers, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    """Eq. 5 of 2502.01456: credit of the outcome, plus the sum to go of process rewards less the others' mean.

    Outcomes 1, 0 and process rewards [.2, 0], [-.1]. The outcome credit is 1, -1; mean process rewards are .1, -.1.
    The first answer's process rewards less -.1 are .3, .1. Their sums to go are .4, .1, so its credit is 1.4, 1.1.
    The second answer's credit is -1 + (-.1 - .1) = -1.2.
    """
    rewards, noise = compared_rewards(a, samples)
    if not spread(rewards, noise):
        return TokenCredit([np.zeros(s.spoken) for s in samples], True)
    # A_t = (R - mean R of the others) + sum_{k >= t} (p_k - mean p of the others). The
    # two parts are centred apart, since process rewards are in units of their own.
    outcome, _ = centred(Others(), Siblings(rewards, np.array([s.spoken for s in samples], np.float64)))
    process = process_rewards(b.beta, samples)
    return TokenCredit([x + to_go(p_T) for x, p_T in zip(outcome, process, strict=True)])


@by_token.register(TurnMean)
@by_token.register(AnchorMean)
def _(b: TurnMean | AnchorMean, a: Algorithm, samples: Sequence[Sample]) -> TokenCredit:
    (rewards, noise), scaled = compared_rewards(a, samples), a.scale == "group_std"
    inputs = ([s.scored.episode for s in samples], rewards, noise)
    credit = by_turn(b, *inputs, scaled=scaled) if isinstance(b, TurnMean) else by_state(b, *inputs, scaled=scaled)
    # Whether the group is silent is read from the credit: turns may differ where the outcomes do not.
    return TokenCredit(credit, not any(np.any(x) for x in credit))
