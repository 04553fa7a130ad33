"""Credit of one step: shaping, KL in the reward, baseline, scale, whitening. numpy float64.

    A = (r - baseline) / scale

Baselines are in `algorithm.credit.baseline_values`, shapings in `algorithm.credit.reward_shaping`; a scale is one
`case` here. A group-relative baseline gives exactly 0 where the rewards have no spread. There is no spread with fewer
than two rewards, or where max - min is at most their resolution times the largest sum of absolute terms. This is tested
before any division (`core.measure.equal_numbers`). Scales and whitening use the same rule.

Worked example, rewards [1, 0, 0, 1] of one prompt:

    baseline groupmean                     [.5, -.5, -.5, .5]
    baseline groupmean, scale group_std    [.8660, -.8660, -.8660, .8660]
    baseline others                        [.6667, -.6667, -.6667, .6667]

A name ends in the axis of its array or list: _P prompts (groups) of the step, _G siblings of one prompt, _T spoken
tokens of one sample, _V the siblings of a prompt to which one source gave a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from posttrain.algorithm.credit.baseline_values import Siblings, by_token, centred
from posttrain.algorithm.credit.judged_sample import Sample, compared_rewards, penalty
from posttrain.algorithm.credit.reward_shaping import best_spread, shaped, sizes
from posttrain.algorithm.credit.reward_spread import Array, whitened
from posttrain.algorithm.credit.reward_spread import mean as _mean
from posttrain.algorithm.credit.reward_spread import std as _std
from posttrain.algorithm.credit.turn_credit import earned
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.scored import Credit, EpisodeCredit, GroupCredit, Scored, ScoredGroup
from posttrain.core.streams import VALUE
from posttrain.core.verdict import size
from posttrain.ladder.algorithm import Algorithm


def credit_step(
    a: Algorithm,
    groups: Sequence[ScoredGroup],
    *,
    max_tokens: int,
    ema: float,
    emas: Mapping[str, float] = MappingProxyType({}),
) -> Credit:
    """Credit of every spoken token of a step, computed over whole groups.

    Args:
        a: the algorithm; only its baseline, scale, rewards, whiten, shape, and a KL in the credit are read.
        groups: groups with their judged episodes scored; a group may have none.
        max_tokens: L_max of the sampling contract (`Overlong`, `Cosine`).
        ema: the moving baseline before this step (`Ema`); other baselines return it unchanged.
        emas: the moving baselines of single sources of tasks, by source (`SourceEma`); empty for other baselines.

    Raises:
        InvariantError: a stream that the algorithm reads is missing.
    """
    # Shaping, baseline and scale look at one group; whitening looks at the whole step, so
    # all groups are centred before it begins. A KL of single tokens comes after whitening:
    # divided by a deviation of rewards it would not be coef times a KL any more.
    samples_P = [_samples(a, g, max_tokens) for g in groups]
    returns: list[Array | None] = [None] * sum(len(samples) for samples in samples_P)
    if a.baseline.per_token:
        credits_P = [by_token(a.baseline, a, samples) for samples in samples_P]
        raw = [x_T for of_group in credits_P for x_T in of_group.credit]
        silent_P = [of_group.silent for of_group in credits_P]
        # Without values there are no targets: one None for each sample.
        returns = [x_T for of_group in credits_P for x_T in of_group.returns or [None] * len(of_group.credit)]
    else:
        raw, silent_P, moving = _by_samples(a, samples_P, groups, {**emas, ALL: ema})
        # `moving` is read after ALL was taken out of it: what stays are the sources.
        ema, emas = moving.pop(ALL), moving
    samples_in_order = [s for samples in samples_P for s in samples]
    final = (
        raw
        if a.whiten is None
        else whitened(
            a.whiten,
            raw,
            [_task_source(s) for s in samples_in_order],
            [_credit_noise(a, s, x) for s, x in zip(samples_in_order, raw, strict=True)],
        )
    )
    if a.charges_tokens:
        final = [x - s.penalty_T for x, s in zip(final, samples_in_order, strict=True)]
    # The discount of replayed groups would change the mean and deviation by which fresh groups are whitened. So it
    # comes last.
    discounts = (g.group.discount for g, samples in zip(groups, samples_P, strict=True) for _ in samples)
    final = [x if d == 1 else x * d for x, d in zip(final, discounts, strict=True)]
    # Flat lists in the order of group and sibling: `_episode_credit` takes them back in this order.
    rows = iter(zip(final, returns, strict=True))
    return Credit(
        tuple(
            GroupCredit(g.group, tuple(_episode_credit(s, *next(rows)) for s in samples), silent)
            for g, samples, silent in zip(groups, samples_P, silent_P, strict=True)
        ),
        ema,
        emas,
    )


ALL = "*"
"""Key of the moving baseline of all tasks."""


def without_credit(credit: Credit) -> Credit:
    """The same step with credit 0 everywhere. Value targets stay, the policy does not change (value warm-up, A19)."""
    groups = tuple(
        replace(
            g, episodes=tuple(replace(e, advantage=tuple(np.zeros_like(x) for x in e.advantage)) for e in g.episodes)
        )
        for g in credit.groups
    )
    return replace(credit, groups=groups)


def _samples(a: Algorithm, group: ScoredGroup, max_tokens: int) -> list[Sample]:
    """One prompt's judged siblings, shaped; all dropped where the baseline needs a judged greedy answer and has
    none."""
    episodes = [s.episode for s in group.episodes]
    raw = np.array([0.0 if a.rewards == "none" else e.reward for e in episodes], np.float64)
    terms = np.array([0.0 if a.rewards == "none" else size(e.verdicts) for e in episodes], np.float64)
    # The policy learns from the shaped reward. The raw outcome stays in the episode, for filters and pass rates.
    rewards, dropped = shaped(a.shape, raw, episodes, max_tokens)
    terms = sizes(a.shape, raw, terms, episodes, max_tokens)
    # Without its baseline the reward of this prompt would count in full, while those of
    # other prompts count as differences. So nothing is learned from the prompt.
    if a.baseline.greedy and (group.group.greedy is None or group.group.greedy.reward is None):
        dropped = ["the greedy answer was not judged"] * len(episodes)
    # `unhinted`: the teacher was to see a hint and saw none, so it is the policy itself and teaches nothing.
    dropped = [why or s.unhinted for why, s in zip(dropped, group.episodes, strict=True)]
    paid = [np.zeros(e.spoken) if a.rewards == "none" else earned(e) for e in episodes]
    rows = zip(group.episodes, rewards, terms, paid, dropped, strict=True)
    return [Sample(s, float(r), float(t), penalty(a, s), paid_T, why) for s, r, t, paid_T, why in rows]


def _task_source(s: Sample) -> str:
    """The task's column `source`, for whitening and moving baselines by source. Reward sources are something else."""
    return str(s.scored.episode.task.info.get("source", ""))


def _credit_noise(a: Algorithm, s: Sample, credit_T: Array) -> float:
    """Size up to which a sample's credit counts as rounding, for whitening.

    It is 0 where siblings were compared, because equal siblings have credit 0 already.
    """
    # Whitening divides by the deviation. Where all credit is equal up to rounding, the division would
    # turn this rounding into credit of size 1. Rounding grows with the terms that credit is computed from:
    # the reward, the baseline (no larger than reward and credit together), and the values V_t and V_{t+1}.
    if a.group_relative:
        return 0.0
    values = (
        max((float(np.max(np.abs(v), initial=0.0)) for v in s.scored.find(VALUE) or ()), default=0.0)
        if a.learns_values
        else 0.0
    )
    return rounding([s.charged_size + float(np.max(np.abs(credit_T), initial=0.0)) + 2 * values], s.resolution)


# --- one number per sample -----------------------------------------------------------------------------------------


def _by_samples(
    a: Algorithm, samples_P: Sequence[Sequence[Sample]], groups: Sequence[ScoredGroup], emas: Mapping[str, float]
) -> tuple[list[Array], list[bool], dict[str, float]]:
    """Credit [T] of every sample, from its reward and those of its siblings; which groups are silent; and the moving
    baselines afterwards.

    A KL in the reward is subtracted from the whole episode, or from each token as the sum from this token on ("to
    go"). The scale is computed from whole rewards. It divides all of the credit, also the KL to go and the rewards of
    turns.
    """
    # First one number a sample: reward less baseline. Then it is spread over the tokens [T].
    if a.rewards == "each":
        # Each source has a baseline and a scale of its own. No KL is subtracted here: one in the reward belongs to no
        # source, so `ladder.algorithm` refuses it with rewards=each, and one of single tokens comes after whitening.
        centred_P = [_by_reward_source(a, [s.scored for s in samples]) for samples in samples_P]
        silent_P, divisors, moving = [not np.any(c) for c in centred_P], [1.0] * len(samples_P), dict(emas)
    else:
        centred_P, silent_P, divisors, moving = _whole_rewards(a, samples_P, groups, emas)
    rows = zip(centred_P, divisors, samples_P, strict=True)
    raw = [_over_tokens(a, s, x, divisor) for c, divisor, samples in rows for x, s in zip(c, samples, strict=True)]
    return raw, silent_P, moving


def _whole_rewards(
    a: Algorithm, samples_P: Sequence[Sequence[Sample]], groups: Sequence[ScoredGroup], emas: Mapping[str, float]
) -> tuple[list[Array], list[bool], list[float], dict[str, float]]:
    """(reward minus baseline [G] of each prompt, which prompts are silent, their scales, the moving baselines)."""
    # Rewards less the whole KL. Spread, noise and scale are computed
    # from these numbers, also where each token pays its KL to go.
    moving, compared_P = dict(emas), [compared_rewards(a, samples) for samples in samples_P]
    rewards_P, noise_P = [r for r, _ in compared_P], [noise for _, noise in compared_P]
    # Silent: siblings are compared and agree, so nobody has credit.
    silent_P = [a.group_relative and not spread(r, noise) for r, noise in zip(rewards_P, noise_P, strict=True)]
    centred_P: list[Array] = []
    for r, silent, samples, group in zip(rewards_P, silent_P, samples_P, groups, strict=True):
        lengths = np.array([s.spoken for s in samples], np.float64)
        # With a KL to go each token pays its part (`_over_tokens`). So the sample does not pay it here as well.
        uncharged = np.array([s.shaped for s in samples]) if a.baseline.to_go else r
        # All siblings have one task, and so one source.
        source = _task_source(samples[0]) if samples and a.baseline.each_source else ALL
        # A silent group keeps zeros. A moving baseline is never silent,
        # since it compares no siblings, so it sees every reward.
        centred_G, after = np.zeros_like(r), moving.get(source, 0.0)
        if not silent:
            centred_G, after = _centred(a, uncharged, lengths, group, after)
        # The next group is compared with the average as it is after this group.
        moving |= {source: after} if samples else {}
        centred_P.append(centred_G)
    return centred_P, silent_P, _scales(a, rewards_P, noise_P, samples_P), moving


def _over_tokens(a: Algorithm, s: Sample, difference: float, divisor: float) -> Array:
    """Credit [T] of a sample from its reward minus baseline (`difference`), less what a token does not answer for, and
    divided by `divisor`."""
    x_T = np.full(s.spoken, difference)
    if a.baseline.to_go and a.charges_answers:
        # Reversed cumulative sum: token t pays sum_{k >= t} coef * KL_k.
        x_T = x_T - np.cumsum(s.penalty_T[::-1])[::-1]
    if a.baseline.earns_to_go:
        # `difference` holds the rewards of all turns. What was paid before token t is not
        # owed to it; its own turn's reward, at the end of the turn, stays.
        x_T = x_T - (np.cumsum(s.paid_T) - s.paid_T)
    # No epsilon: where there is no scale, there was no spread, and 0 is exact.
    return x_T / divisor if divisor > 0 else np.zeros_like(x_T)


def _centred(a: Algorithm, r: Array, lengths: Array, group: ScoredGroup, ema: float) -> tuple[Array, float]:
    """(reward minus baseline [G] of one prompt, the moving baseline afterwards)."""
    greedy = group.group.greedy
    greedy_reward = 0.0 if greedy is None or greedy.reward is None else greedy.reward
    return centred(a.baseline, Siblings(r, lengths, greedy_reward, ema, group.group.again, group.episodes))


def _by_reward_source(a: Algorithm, scored: Sequence[Scored]) -> Array:
    """GDPO (A31): each source's rewards are centred and scaled over the siblings on which it did not abstain, then
    summed with the sources' weights [G]."""
    total = np.zeros(len(scored))
    # In order of first appearance, so that the sum over sources is always formed in the same order.
    sources = list(dict.fromkeys(j.source for s in scored for j in s.episode.verdicts if j.counts))
    for source in sources:
        valued = _of_source(scored, source)
        r = np.array([score for _, _, score in valued], np.float64)
        noise = _noise_of_source(scored, source)
        # A source on which all agree adds exactly 0, and leaves the others as they are.
        if not spread(r, noise):
            continue
        lengths = np.array([scored[i].episode.spoken for i, _, _ in valued], np.float64)
        # Only baselines with `of_sources` come here. They read rewards alone.
        centred_V, _ = centred(a.baseline, Siblings(r, lengths))
        scale = _std(r, noise) if a.scale == "group_std" else 1.0
        for (i, weight, _), x in zip(valued, centred_V, strict=True):
            total[i] += weight * x / scale
    return total


def _of_source(scored: Sequence[Scored], source: str) -> list[tuple[int, float, float]]:
    """(sibling, weight, score) of each sibling to which a source gave a value. A source that pays turns gives the
    weighted sum of these payments, with weight 1."""
    verdicts_G = [[j for j in s.episode.verdicts if j.source == source and j.counts] for s in scored]
    # A sibling that was paid nothing has the value 0; it is not left out.
    if any(j.paid for js in verdicts_G for j in js):
        return [(i, 1.0, math.fsum(j.weight * (j.verdict.score or 0.0) for j in js)) for i, js in enumerate(verdicts_G)]
    return [
        (i, j.weight, j.verdict.score) for i, js in enumerate(verdicts_G) for j in js if j.verdict.score is not None
    ]


def _noise_of_source(scored: Sequence[Scored], source: str) -> float:
    """The largest difference of the siblings' scores of one source that counts as rounding."""
    verdicts_G = [
        [j for j in s.episode.verdicts if j.source == source and j.counts and j.verdict.score is not None]
        for s in scored
    ]
    sizes_G = [
        math.fsum(abs(j.verdict.score or 0.0) * (abs(j.weight) if j.paid else 1.0) for j in js) for js in verdicts_G
    ]
    return rounding(sizes_G, max((j.resolution for js in verdicts_G for j in js), default=0.0))


def _scales(
    a: Algorithm, rewards_P: Sequence[Array], noise_P: Sequence[float], samples_P: Sequence[Sequence[Sample]]
) -> list[float]:
    """The scale of each group's credit. It is 0 or less where there is no spread, and credit is then exactly 0."""
    match a.scale:
        case "one":
            return [1.0] * len(rewards_P)
        case "group_std":
            return [_std(r, noise) for r, noise in zip(rewards_P, noise_P, strict=True)]
        case "batch_std":
            # One deviation for the whole step. Groups without spread count in it
            # too: their reward may differ from that of other groups.
            return [_std(np.concatenate([np.zeros(0), *rewards_P]), max(noise_P, default=0.0))] * len(rewards_P)
        case "group_mean":
            means = [_mean(r) if len(r) else 0.0 for r in rewards_P]
            # For rewards of at least 0 only. A mean of 0, up to rounding, means that
            # no sibling succeeded: then there is no credit to divide.
            return [m if m > noise else 0.0 for m, noise in zip(means, noise_P, strict=True)]
        case "best_std":
            assert a.best_of is not None  # `ladder.algorithm` refuses best_std without it
            k = a.best_of.k
            # Credit is divided by k, with which `BestOf` multiplied the rewards,
            # and by the deviation of the best raw outcome of k siblings.
            outcomes = [np.array([s.scored.episode.reward for s in samples], np.float64) for samples in samples_P]
            return [
                min(k, len(r)) * best_spread(r, k) if spread(r, n) else 0.0
                for r, n in zip(outcomes, noise_P, strict=True)
            ]
        case "mixed_share":
            rewards_count = sum(len(r) for r in rewards_P)
            # Groups without spread have credit 0 and still count in the denominator of the
            # loss. Dividing by the share of the others makes up for them (GPG, 2504.02546).
            rewards_with_spread = sum(len(r) for r, noise in zip(rewards_P, noise_P, strict=True) if spread(r, noise))
            return [rewards_with_spread / rewards_count if rewards_count else 0.0] * len(rewards_P)


def _episode_credit(s: Sample, advantage_T: Array, return_T: Array | None) -> EpisodeCredit:
    """The per-token arrays cut back into the episode's segments."""
    # Each cut ends a segment, so nothing is behind the last one; an episode without segments has no part.
    # Only `return_T` may be None.
    cuts = np.cumsum([segment.spoken for segment in s.scored.episode.segments])
    parts, targets = (None if x is None else tuple(np.split(x, cuts)[:-1]) for x in (advantage_T, return_T))
    return EpisodeCredit(s.scored, s.shaped, parts or (), targets, s.dropped)
