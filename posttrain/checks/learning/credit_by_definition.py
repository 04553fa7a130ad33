"""Credit and weights of a step, computed a second way: slowly, from the definitions, sharing no code with the first.

`READS` lists the pieces and settings that are covered. For an algorithm with any other piece the functions return None.
Where both computations exist they must agree up to rounding. So a bug has to be made twice to stay unseen.

`expected_credit` goes in this order: shape each reward, subtract the KL penalty, subtract the baseline, divide by the
scale, whiten. `weights` gives the weight of each token. Beside each number goes the size of its terms, because rounding
is relative to that: credit is 0 where rewards differ by rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from posttrain.checks.learning.worth_by_definition import (
    advantages_to_go,
    implicit_worth,
    turn_rewards,
    value_targets,
    verdict_terms,
)
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import REFERENCE, START, VALUE
from posttrain.core.types import Episode, Stop
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.trainer import key

READS: dict[str, tuple[str, ...]] = {
    "Zero": (),
    "Ema": ("decay",),
    "ToGo": (),
    "Greedy": (),
    "GroupMean": (),
    "Others": (),
    "LengthMean": (),
    "SoftMean": ("tau",),
    "SecondBest": (),
    "ImplicitOthers": ("beta",),
    "Value": ("gae_lambda", "gamma", "coef", "clip"),
    "KL": ("coef", "estimator", "placement"),
    "Signed": (),
    "Overlong": ("cache",),
    "DropTruncated": (),
}
"""The pieces covered, each with the settings that are read. Any other setting must have its default."""
COMPARES = ("GroupMean", "Others", "LengthMean", "SoftMean", "SecondBest", "ImplicitOthers")
"""The baselines in `READS` under which siblings with equal outcomes have no credit."""
NEUTRAL = {
    "name",
    "paper",
    "note",
    "parent",
    "ratio",
    "clip",
    "aggregate",
    "correction",
    "filter",
    "entropy",
    "tokens",
    "curriculum",
    "imitate",
    "distill",
    "step_scale",
}
"""Choices of an algorithm that do not affect its credit."""
SCALES = ("one", "group_std", "batch_std", "group_mean", "mixed_share")
WHITENED = (None, "token", "sample")


def kind(piece: object) -> str:
    """The name of a piece's type, with its module where it is a user's own."""
    piece_type = type(piece)
    return (
        piece_type.__name__
        if piece_type.__module__.startswith("posttrain.")
        else f"{piece_type.__module__}.{piece_type.__name__}"
    )


def uncovered_credit(a: Algorithm) -> list[str]:
    """Names of the choices of an algorithm whose part of the credit has no second form here."""
    # A pull without a placement (the squared distances) is a term of the loss alone.
    placement = getattr(a.pull, "placement", "loss")
    neutral = NEUTRAL | {"pull"} if placement in ("loss", "token") else NEUTRAL
    covered = {"baseline", "scale", "whiten", "shape", "anchor", "pull"}
    names: list[str] = []
    for f in fields(a):
        value = getattr(a, f.name)
        # A choice at its default needs no form. Any other must be one that is read here, with all its pieces covered.
        if f.name not in neutral and value != f.default:
            names += [] if f.name in covered and all(plain(p) for p in pieces(value)) else [f.name]
    # A pull in the credit of single tokens is read nowhere here.
    if placement == "token":
        names.append("pull")
    return names + [name for name, known in (("scale", SCALES), ("whiten", WHITENED)) if getattr(a, name) not in known]


def pieces(value: object) -> tuple[Any, ...]:
    """The pieces of a choice, which holds none, one or several, as a tuple."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def plain(piece: Any) -> bool:
    """Returns whether this is a word, or a piece whose settings other than those in `READS` have their defaults."""
    if isinstance(piece, str):
        return True
    known = READS.get(kind(piece))
    return known is not None and all(
        f.name in known or f.default is MISSING or getattr(piece, f.name) == f.default for f in fields(piece)
    )


@dataclass(frozen=True, eq=False)
class ExpectedCredit:
    """The expected result of one episode."""

    scored: Scored
    group: int
    """The number of its group in the step."""
    credit: np.ndarray
    """The credit of each spoken token."""
    dropped: bool
    """Whether the episode is left out of the batch."""
    returns: np.ndarray | None = None
    """Value targets, if the algorithm learns values."""

    @property
    def key(self) -> bytes:
        """A key by which the episode is found in a minibatch: its spoken tokens and their log-probs."""
        return key(self.scored.episode)


def expected_credit(
    a: Algorithm, groups: Sequence[ScoredGroup], *, max_tokens: int, ema: float
) -> list[ExpectedCredit] | None:
    """The credit of every judged episode of a step; None if the algorithm has a piece that is not covered."""
    if uncovered_credit(a):
        return None
    kl_reward = getattr(a.pull, "placement", "") in ("reward", "both")
    # Groups are kept apart only by this number from here on.
    samples = [(p, s) for p, g in enumerate(groups) for s in g.episodes]
    shaped = [_shaped(a, s.episode, max_tokens) for _, s in samples]
    # For each sample, the KL penalty of each spoken token; it is subtracted from the reward.
    penalties: list[np.ndarray] = []
    for _, s in samples:
        cost = _kl_penalty(a, s) if kl_reward else np.zeros(s.episode.spoken)
        if cost is None:
            return None
        penalties.append(cost)
    # `reward` is what siblings are compared by. `terms` is the sum of absolute values that its rounding is relative to.
    reward = [r - math.fsum(c) for (r, *_), c in zip(shaped, penalties, strict=True)]
    terms = [size + math.fsum(abs(x) for x in c) for (_, size, _), c in zip(shaped, penalties, strict=True)]
    resolutions = [_resolution(s.episode) for _, s in samples]
    token_credit = _centred(a, samples, [r for r, *_ in shaped], reward, penalties, ema, groups)
    if token_credit is None:
        return None
    members = [[i for i, (p, _) in enumerate(samples) if p == group] for group in range(len(groups))]
    token_credit = _divided(a, members, token_credit, reward, terms, resolutions)
    if a.whiten is not None:
        compares = kind(a.baseline) in COMPARES
        # `doubt`: the spread of the credit that rounding alone may make. Where siblings are compared it is 0, because
        # siblings that agree have a credit of exactly 0 by then.
        doubt = [
            0.0 if compares else f * _rounding_size(a, s, x, t)
            for (_, s), x, t, f in zip(samples, token_credit, terms, resolutions, strict=True)
        ]
        token_credit = _white(a.whiten, token_credit, max(doubt, default=0.0))
    values = kind(a.baseline) == "Value"
    targets = [
        value_targets(a.baseline, s, r, c) if values else None
        for (_, s), (r, *_), c in zip(samples, shaped, penalties, strict=True)
    ]
    greedy = [g.group.greedy for g in groups]
    # A prompt whose greedy answer has no reward has no baseline, and is not learned from. The same holds for an answer
    # that could not be scored behind its hint.
    no_baseline = [
        kind(a.baseline) == "Greedy" and (greedy_episode is None or greedy_episode.reward is None)
        for greedy_episode in greedy
    ]
    return [
        # The discount of groups that are learned from again comes last, so that it changes no baseline and no scale.
        ExpectedCredit(s, p, x * groups[p].group.discount, bool(why or s.unhinted) or no_baseline[p], t)
        for (p, s), x, (*_, why), t in zip(samples, token_credit, shaped, targets, strict=True)
    ]


def alike(values: Sequence[float], terms: Sequence[float], resolution: float) -> bool:
    """Returns whether numbers are equal up to rounding, which credit calls no spread. They are if the largest exceeds
    the smallest by at most `resolution` times the largest sum of absolute terms."""
    in_order = sorted(values)
    return len(in_order) < 2 or in_order[-1] - in_order[0] <= resolution * max(terms)


def same_outcome(episodes: Sequence[Episode]) -> bool:
    """Returns whether the judged ones of these episodes have the same raw outcome, up to rounding."""
    judged = [e for e in episodes if e.reward is not None]
    raw = [(verdict_terms(e), _resolution(e)) for e in judged]
    return not judged or alike(
        [math.fsum(t) for t, _ in raw], [math.fsum(map(abs, t)) for t, _ in raw], max(f for _, f in raw)
    )


def _resolution(e: Episode) -> float:
    """The coarsest resolution of the sources that gave the episode's outcome."""
    return max((j.resolution for j in e.verdicts if j.counts and j.verdict.score is not None), default=0.0)


def _rounding_size(a: Algorithm, s: Scored, credit: np.ndarray, terms: float) -> float:
    """Returns the size that the rounding of an episode's credit is relative to, if siblings are not compared. It is the
    sum of the terms of the reward, the largest credit, and twice the largest value."""
    # Under a value baseline credit is a difference of estimates, and its rounding is relative to them.
    values = [abs(float(v)) for part in s.find(VALUE) or () for v in part] if kind(a.baseline) == "Value" else []
    return terms + max(map(abs, credit.tolist()), default=0.0) + 2 * max(values, default=0.0)


def _divided(
    a: Algorithm,
    members: Sequence[Sequence[int]],
    token_credit: Sequence[np.ndarray],
    reward: Sequence[float],
    terms: Sequence[float],
    resolutions: Sequence[float],
) -> list[np.ndarray]:
    """Credit divided by its scale. It is 0 if siblings are compared and agree, and if the scale is 0.

    Args:
        members: for each group, the places of its episodes in the lists that follow.
        token_credit: credit of each episode's spoken tokens.
        terms: for each reward, the sum of its absolute terms.
        resolutions: the resolution of each reward, relative to its terms.
    """
    out = list(token_credit)
    # Over all groups of the step at once, for scale=batch_std.
    batch_std = _std(reward, terms, max(resolutions, default=0.0))
    groups = [
        ([reward[i] for i in places], [terms[i] for i in places], max((resolutions[i] for i in places), default=0.0))
        for places in members
    ]
    # Groups that differ at all, for scale=mixed_share.
    mixed = sum(len(r) for r, t, f in groups if not alike(r, t, f))
    for places, (r, t, f) in zip(members, groups, strict=True):
        # Only where siblings are compared does their agreement mean that there is nothing to learn.
        agree = kind(a.baseline) in COMPARES and alike(r, t, f)
        average = math.fsum(r) / len(r) if r else 0.0
        scales = {
            "one": 1.0,
            "batch_std": batch_std,
            "group_std": _std(r, t, f),
            # A mean that is rounding alone would blow the credit up, so it counts as 0.
            "group_mean": average if r and average > f * max(t) else 0.0,
            "mixed_share": mixed / max(1, len(reward)),
        }
        # Times 0.0 and not 0.0: credit keeps one number for each spoken token.
        for i in places:
            out[i] = out[i] * 0.0 if agree or not scales[a.scale] > 0 else out[i] / scales[a.scale]
    return out


def _shaped(a: Algorithm, e: Episode, max_tokens: int) -> tuple[float, float, str]:
    """Reward after shaping; the sum of its absolute terms; and why the episode has no gradient ('' if it has one)."""
    r, size = math.fsum(verdict_terms(e)), math.fsum(map(abs, verdict_terms(e)))
    why = "" if e.spoken else "said nothing"
    for piece in pieces(a.shape):
        if kind(piece) == "Signed":
            # 2 r - 1; the size of its terms grows as well.
            r, size = r + r - 1, size + size + 1
        elif kind(piece) == "Overlong":
            # No penalty up to the last `cache` share of the token limit, then linear to -1 at the limit.
            over = e.spoken - max_tokens * (1 - piece.cache)
            penalty = min(max(over / (piece.cache * max_tokens), 0.0), 1.0)
            r, size = r - penalty, size + penalty
        elif kind(piece) == "DropTruncated" and e.stop in (Stop.LENGTH, Stop.TOKENS, Stop.CONTEXT, Stop.TIME):
            why = "truncated"
    return r, size, why


def _kl_penalty(a: Algorithm, s: Scored) -> np.ndarray | None:
    """The KL penalty in the reward of each spoken token; None if a stream it needs is missing."""
    # The log-probs of the anchor: the learner's at the start of the step, or those of the sampler.
    anchor = s.find(START) if a.anchor == "start" else tuple(x.logp[x.mask] for x in s.episode.segments)
    if anchor is None or REFERENCE not in s:
        return None
    gap = np.concatenate(anchor).astype(np.float64) - np.concatenate(s[REFERENCE])
    pull: Any = a.pull
    # With gap = log pi - log reference: k1 = gap, k2 = gap^2 / 2, k3 = e^-gap - 1 + gap.
    estimate = {"k1": gap, "k2": gap * gap / 2, "k3": np.exp(-gap) - 1 + gap}.get(pull.estimator)
    return None if estimate is None else pull.coef * estimate


def _centred(
    a: Algorithm,
    samples: Sequence[tuple[int, Scored]],
    shaped: Sequence[float],
    reward: Sequence[float],
    penalties: Sequence[Any],
    ema: float,
    groups: Sequence[ScoredGroup],
) -> list[np.ndarray] | None:
    """The reward minus its baseline and before any scale, for each episode's spoken tokens; None: not covered.

    Args:
        samples: (number of the group, episode).
        shaped: the rewards after shaping.
        reward: the same, less the KL penalty.
        penalties: the KL penalty of each spoken token.
    """
    name = kind(a.baseline)
    if name == "Value":
        return _by_values(a.baseline, samples, shaped, penalties)
    if name in ("ToGo", "Greedy"):
        return _to_go(name, samples, shaped, penalties, groups)
    # members[p]: the places of group p's episodes in `samples`.
    members: dict[int, list[int]] = {}
    for i, (p, _) in enumerate(samples):
        members.setdefault(p, []).append(i)
    if name == "ImplicitOthers":
        return _implicit(a.baseline, samples, reward, members)
    out: list[np.ndarray] = []
    for i, (p, s) in enumerate(samples):
        if name in ("Ema", "Zero"):
            credit = reward[i] - (ema if name == "Ema" else 0.0)
        else:
            mates = members[p]
            lengths = [samples[j][1].episode.spoken for j in mates]
            credit = _compared(a.baseline, mates.index(i), [reward[j] for j in mates], lengths)
        # The average moves after each episode, so the next one is compared with it. A replayed group moved it already.
        if name == "Ema" and not groups[p].group.again:
            ema += (1 - a.baseline.decay) * credit  # type: ignore[union-attr]
        out.append(np.full(s.episode.spoken, credit))
    return out


def _by_values(
    value: Any, samples: Sequence[tuple[int, Scored]], shaped: Sequence[float], penalties: Sequence[Any]
) -> list[np.ndarray] | None:
    """`_centred` under a value baseline; None where an episode has no values."""
    out: list[np.ndarray] = []
    for (_, s), reward, cost in zip(samples, shaped, penalties, strict=True):
        if VALUE not in s:
            return None
        turns = turn_rewards(s.episode)
        values = np.concatenate(s[VALUE]).astype(np.float64)
        # Turns are paid at their ends, and what is left of the reward at the last token.
        out.append(advantages_to_go(value, values, reward - turns.sum(), cost - turns))
    return out


def _to_go(
    name: str,
    samples: Sequence[tuple[int, Scored]],
    shaped: Sequence[float],
    penalties: Sequence[Any],
    groups: Sequence[ScoredGroup],
) -> list[np.ndarray]:
    """`_centred` under "ToGo" and "Greedy". In both, a token answers only for the penalties from itself on."""
    out: list[np.ndarray] = []
    for (p, s), reward, cost in zip(samples, shaped, penalties, strict=True):
        greedy_episode = groups[p].group.greedy if name == "Greedy" else None
        baseline = 0.0 if greedy_episode is None else math.fsum(verdict_terms(greedy_episode))
        earned = turn_rewards(s.episode) if name == "ToGo" else np.zeros(s.episode.spoken)
        costs_to_go = np.cumsum(cost[::-1])[::-1]
        # From each token on: the reward, less what turns before it earned, and less the penalties of this and later
        # tokens.
        out.append(reward - baseline - costs_to_go - (np.cumsum(earned) - earned))
    return out


def _implicit(
    baseline: Any,
    samples: Sequence[tuple[int, Scored]],
    reward: Sequence[float],
    members: dict[int, list[int]],
) -> list[np.ndarray] | None:
    """`_centred` under "ImplicitOthers"; None where a stream that it reads is missing."""
    out: list[np.ndarray] = []
    for i, (p, _) in enumerate(samples):
        worth = implicit_worth(baseline, i, members[p], samples)
        if worth is None:
            return None
        lead = [reward[i] - reward[j] for j in members[p] if j != i]
        # The leave-one-out part is one number for the answer, the implicit part one for each token.
        out.append(math.fsum(lead) / max(1, len(lead)) + worth)
    return out


def _compared(baseline: Any, i: int, rewards: Sequence[float], lengths: Sequence[int]) -> float:
    """Reward `i` of siblings minus its baseline, from the differences to the others. `lengths` are in tokens."""
    lead = [rewards[i] - r for j, r in enumerate(rewards) if j != i]
    match kind(baseline):
        case "GroupMean":
            # r_i - mean(r) = sum_j (r_i - r_j) / n: equal rewards give an exact 0.
            return math.fsum(lead) / (len(lead) + 1)
        case "Others":
            return math.fsum(lead) / len(lead) if lead else 0.0
        case "LengthMean":
            # The mean is weighted by length: sum_j n_j (r_i - r_j) / sum_j n_j.
            weighted_lead = [n * (rewards[i] - r) for n, r in zip(lengths, rewards, strict=True)]
            return math.fsum(weighted_lead) / max(1, sum(lengths))
        case "SoftMean":
            # r_i - tau log mean_j exp(r_j / tau), from differences, so that no large reward overflows.
            total = np.logaddexp.reduce([-x / baseline.tau for x in [0.0, *lead]])
            return baseline.tau * (math.log(len(rewards)) - float(total))
        case _:  # SecondBest
            # Only the best sibling has credit: its lead over the second.
            first = max(range(len(rewards)), key=lambda j: (rewards[j], j))
            return min(lead) if i == first and lead else 0.0


def _std(x: Sequence[float], terms: Sequence[float], resolution: float) -> float:
    """Standard deviation (ddof 1) from the squared distances of all pairs, so that no mean is needed."""
    n = len(x)
    if alike(x, terms, resolution):
        return 0.0
    y = np.asarray(x, np.float64)
    # Measured from the first number: the squares of equal rewards far from 0 would leave rounding.
    y = y - y[0]
    return math.sqrt(max(0.0, (n * math.fsum(y * y) - math.fsum(y) ** 2) / (n * (n - 1))))


def _white(over: str, token_credit: list[np.ndarray], doubt: float) -> list[np.ndarray]:
    """Credit whitened over the step's tokens or samples: mean 0, standard deviation 1. It is 0 everywhere if it spreads
    by at most `doubt`."""
    spoken = [x for x in token_credit if len(x)]
    if not spoken:
        return token_credit
    # Measured from the first number, so that credit that is equal everywhere becomes an exact 0.
    first = spoken[0][0]
    token_credit = [x - first for x in token_credit]
    spoken = [x for x in token_credit if len(x)]
    flat = np.concatenate(spoken)
    # Whitening would blow a spread of rounding up to a standard deviation of 1.
    if float(np.ptp(flat)) <= doubt:
        return [x * 0.0 for x in token_credit]
    if over == "token":
        mean, std = float(flat.mean()), float(flat.std(ddof=1)) if len(flat) > 1 else 0.0
    else:
        # Each sample counts once, however long: its mean in the mean, its mean square in the variance.
        count, mean = len(spoken), math.fsum(float(x.mean()) for x in spoken) / len(spoken)
        std = math.sqrt(math.fsum(float(((x - mean) ** 2).mean()) for x in spoken) / (count - 1)) if count > 1 else 0.0
    return [(x - mean) / std if std > 0 else x - mean for x in token_credit]


def weights(aggregate: str, tokens: Sequence[int], groups: Sequence[int], max_tokens: int) -> np.ndarray | None:
    """The weight of a token of each episode of a minibatch; None for an aggregation that is not covered."""
    n = len(tokens)
    all_tokens, in_group = sum(tokens), dict.fromkeys(groups, 0)
    for t, g in zip(tokens, groups, strict=True):
        in_group[g] += t
    # The weight of one token in an episode of t tokens and group g.
    weight_of = {
        "token_mean": lambda t, g: 1 / all_tokens,
        "prompt_mean": lambda t, g: 1 / len(in_group) / in_group[g],
        "sequence_mean": lambda t, g: 1 / n / t,
        "sequence_sum": lambda t, g: 1 / n,
        "constant": lambda t, g: 1 / n / max_tokens,
    }.get(aggregate)
    return None if weight_of is None else np.array([weight_of(t, g) for t, g in zip(tokens, groups, strict=True)])
