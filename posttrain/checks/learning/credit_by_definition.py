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

from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import IMPLICIT, REFERENCE, START, VALUE, Stream
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
    module, name = type(piece).__module__, type(piece).__name__
    return name if module.startswith("posttrain.") else f"{module}.{name}"


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


@dataclass(frozen=True, eq=False)
class CreditTerms:
    """What the credit of one judged episode is computed from."""

    scored: Scored
    group: int
    """The number of its group in the step."""
    shaped: float
    """The reward after shaping."""
    penalties: np.ndarray
    """The KL penalty of each spoken token, which is subtracted from the reward."""
    reward: float
    """What siblings are compared by: `shaped` less the penalties."""
    size: float
    """The sum of the absolute terms of `reward`, which its rounding is relative to."""
    resolution: float
    """The coarsest resolution of the sources of the reward, relative to its terms."""
    why: str
    """Why the episode has no gradient; '' if it has one."""

    @property
    def spoken(self) -> int:
        return self.scored.episode.spoken

    def stream(self, stream: Stream) -> np.ndarray:
        """float64: a stream of the spoken tokens."""
        return np.concatenate(self.scored[stream]).astype(np.float64)


def expected_credit(
    a: Algorithm, groups: Sequence[ScoredGroup], *, max_tokens: int, ema: float
) -> list[ExpectedCredit] | None:
    """The credit of every judged episode of a step; None if the algorithm has a piece that is not covered, or a stream
    that it reads is missing."""
    name = kind(a.baseline)
    pays_kl = getattr(a.pull, "placement", "") in ("reward", "both")
    needed: tuple[Stream, ...] = {"Value": (VALUE,), "ImplicitOthers": (IMPLICIT, REFERENCE)}.get(name, ())
    if pays_kl:
        needed += (REFERENCE, START) if a.anchor == "start" else (REFERENCE,)
        if getattr(a.pull, "estimator", "") not in ("k1", "k2", "k3"):
            return None
    # One sibling without scores leaves the level of the others unknown.
    lacks = any(stream not in s for g in groups for s in g.episodes for stream in needed)
    if uncovered_credit(a) or lacks:
        return None
    samples = [_terms(a, s, p, max_tokens, pays_kl) for p, g in enumerate(groups) for s in g.episodes]
    members = [[x for x in samples if x.group == p] for p in range(len(groups))]
    centred = _centred(a, samples, members, ema, groups)
    # A value target is the estimate plus the GAE advantage.
    targets = [x.stream(VALUE) + c if name == "Value" else None for x, c in zip(samples, centred, strict=True)]
    scales = _scales(a, samples, members)
    # Times 0.0 and not 0.0: credit keeps one number for each spoken token.
    scaled = [c / scales[x.group] if scales[x.group] > 0 else c * 0.0 for x, c in zip(samples, centred, strict=True)]
    if a.whiten is not None:
        # `doubt`: the spread of the credit that rounding alone may make. Where siblings are compared it is 0, because
        # siblings that agree have a credit of exactly 0 by then.
        compares = name in COMPARES
        doubt = [0.0 if compares else _rounding(a, x, c) for x, c in zip(samples, scaled, strict=True)]
        scaled = _white(a.whiten, scaled, max(doubt, default=0.0))
    out: list[ExpectedCredit] = []
    for x, credit, target in zip(samples, scaled, targets, strict=True):
        # A prompt whose greedy answer has no reward has no baseline, and is not learned from. The same holds for an
        # answer that could not be scored behind its hint.
        group = groups[x.group].group
        no_baseline = name == "Greedy" and (group.greedy is None or group.greedy.reward is None)
        dropped = bool(x.why or x.scored.unhinted) or no_baseline
        # The discount of groups that are learned from again comes last, so that it changes no baseline and no scale.
        out.append(ExpectedCredit(x.scored, x.group, credit * group.discount, dropped, target))
    return out


def _terms(a: Algorithm, s: Scored, group: int, max_tokens: int, pays_kl: bool) -> CreditTerms:
    """The reward of an episode after shaping and after the KL penalty."""
    e = s.episode
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
    cost = _kl_penalty(a, s) if pays_kl else np.zeros(e.spoken)
    reward, size = r - math.fsum(cost), size + math.fsum(abs(x) for x in cost)
    return CreditTerms(s, group, r, cost, reward, size, _resolution(e), why)


def _kl_penalty(a: Algorithm, s: Scored) -> np.ndarray:
    """The KL penalty in the reward of each spoken token."""
    # The log-probs of the anchor: the learner's at the start of the step, or those of the sampler.
    anchor = s[START] if a.anchor == "start" else tuple(x.logp[x.mask] for x in s.episode.segments)
    gap = np.concatenate(anchor).astype(np.float64) - np.concatenate(s[REFERENCE])
    pull: Any = a.pull
    # With gap = log pi - log reference: k1 = gap, k2 = gap^2 / 2, k3 = e^-gap - 1 + gap.
    return pull.coef * {"k1": gap, "k2": gap * gap / 2, "k3": np.exp(-gap) - 1 + gap}[pull.estimator]


def verdict_terms(e: Episode) -> list[float]:
    """The terms of an episode's raw reward: weight times score of each verdict that counts."""
    # A score of a step that is not paid is no part of the outcome.
    return [j.weight * j.verdict.score for j in e.verdicts if j.counts and j.verdict.score is not None]


def turn_rewards(e: Episode) -> np.ndarray:
    """Returns the rewards that the environment paid for turns, at the last spoken token of each."""
    # `end` counts spoken tokens from 1.
    rewards = [(j.end or 0, j.weight * (j.verdict.score or 0.0)) for j in e.verdicts if j.paid]
    return np.array([math.fsum(score for end, score in rewards if end == t) for t in range(1, e.spoken + 1)])


def _resolution(e: Episode) -> float:
    """The coarsest resolution of the sources that gave the episode's outcome."""
    return max((j.resolution for j in e.verdicts if j.counts and j.verdict.score is not None), default=0.0)


def alike(values: Sequence[float], terms: Sequence[float], resolution: float) -> bool:
    """Returns whether numbers are equal up to rounding, which credit calls no spread.

    They are if the largest exceeds the smallest by at most `resolution` times the largest sum of absolute terms.
    """
    in_order = sorted(values)
    return len(in_order) < 2 or in_order[-1] - in_order[0] <= resolution * max(terms)


def same_outcome(episodes: Sequence[Episode]) -> bool:
    """Returns whether the judged ones of these episodes have the same raw outcome, up to rounding."""
    judged = [e for e in episodes if e.reward is not None]
    raw = [(verdict_terms(e), _resolution(e)) for e in judged]
    return not judged or alike(
        [math.fsum(t) for t, _ in raw],
        [math.fsum(map(abs, t)) for t, _ in raw],
        max(resolution for _, resolution in raw),
    )


def _rounding(a: Algorithm, x: CreditTerms, credit: np.ndarray) -> float:
    """The rounding of an episode's credit, if siblings are not compared. It is relative to the sum of the terms of the
    reward, the largest credit, and twice the largest value."""
    # Under a value baseline credit is a difference of estimates, and its rounding is relative to them.
    values = [abs(float(v)) for part in x.scored.find(VALUE) or () for v in part] if kind(a.baseline) == "Value" else []
    return x.resolution * (x.size + max(map(abs, credit.tolist()), default=0.0) + 2 * max(values, default=0.0))


def _scales(a: Algorithm, samples: Sequence[CreditTerms], members: Sequence[Sequence[CreditTerms]]) -> list[float]:
    """What the credit of each group is divided by; 0: the group has no credit, as where siblings are compared and
    agree."""

    def columns(of: Sequence[CreditTerms]) -> tuple[list[float], list[float], float]:
        """The rewards, the sizes of their terms, and the coarsest resolution."""
        return [x.reward for x in of], [x.size for x in of], max((x.resolution for x in of), default=0.0)

    # Over all groups of the step at once, for scale=batch_std.
    batch_std = _std(*columns(samples))
    groups = [columns(of) for of in members]
    # Groups that differ at all, for scale=mixed_share.
    mixed = sum(len(rewards) for rewards, sizes, resolution in groups if not alike(rewards, sizes, resolution))
    out: list[float] = []
    for rewards, sizes, resolution in groups:
        # Only where siblings are compared does their agreement mean that there is nothing to learn.
        agree = kind(a.baseline) in COMPARES and alike(rewards, sizes, resolution)
        average = math.fsum(rewards) / len(rewards) if rewards else 0.0
        scales = {
            "one": 1.0,
            "batch_std": batch_std,
            "group_std": _std(rewards, sizes, resolution),
            # A mean that is rounding alone would blow the credit up, so it counts as 0.
            "group_mean": average if rewards and average > resolution * max(sizes) else 0.0,
            "mixed_share": mixed / max(1, len(samples)),
        }
        out.append(0.0 if agree else scales[a.scale])
    return out


def _centred(
    a: Algorithm,
    samples: Sequence[CreditTerms],
    members: Sequence[Sequence[CreditTerms]],
    ema: float,
    groups: Sequence[ScoredGroup],
) -> list[np.ndarray]:
    """The reward minus its baseline and before any scale, for each episode's spoken tokens. `members`: the samples of
    each group."""
    name, baseline = kind(a.baseline), a.baseline
    out: list[np.ndarray] = []
    for x in samples:
        if name == "Value":
            out.append(_advantages_to_go(baseline, x))
        elif name in ("ToGo", "Greedy"):
            out.append(_to_go(name, x, groups[x.group].group.greedy))
        elif name == "ImplicitOthers":
            lead = [x.reward - m.reward for m in members[x.group] if m is not x]
            # The leave-one-out part is one number for the answer, the implicit part one for each token.
            out.append(math.fsum(lead) / max(1, len(lead)) + _implicit_worth(baseline, x, members[x.group]))
        elif name in ("Ema", "Zero"):
            credit = x.reward - (ema if name == "Ema" else 0.0)
            # The average moves after each episode, for the next one. A replayed group moved it already.
            if name == "Ema" and not groups[x.group].group.again:
                ema += (1 - baseline.decay) * credit  # type: ignore[union-attr]
            out.append(np.full(x.spoken, credit))
        else:
            out.append(np.full(x.spoken, _compared(baseline, x, members[x.group])))
    return out


def _advantages_to_go(value: Any, x: CreditTerms) -> np.ndarray:
    """GAE as an explicit sum over spoken tokens: A_t = sum_k (gamma lambda)^k delta_{t+k}."""
    v, turns = x.stream(VALUE), turn_rewards(x.scored.episode)
    if not len(v):
        return v
    # A penalty is paid with a minus, and turns at their ends. The rest of the reward comes with the last token.
    earned = np.negative(x.penalties - turns)
    earned[-1] += x.shaped - turns.sum()
    # delta_t = r_t + gamma V_{t+1} - V_t, where V is 0 behind the last token.
    delta = earned + value.gamma * np.append(v[1:], 0.0) - v
    fade = (value.gamma * value.gae_lambda) ** np.arange(len(v))
    # The sum over k >= 0 looks forward, so the deltas are turned round before the convolution, and the sums after it.
    return np.convolve(delta[::-1], fade)[: len(v)][::-1]


def _to_go(name: str, x: CreditTerms, greedy: Episode | None) -> np.ndarray:
    """`_centred` under "ToGo" and "Greedy". In both, a token answers only for the penalties from itself on."""
    baseline = 0.0 if greedy is None or name == "ToGo" else math.fsum(verdict_terms(greedy))
    earned = turn_rewards(x.scored.episode) if name == "ToGo" else np.zeros(x.spoken)
    costs_to_go = np.cumsum(x.penalties[::-1])[::-1]
    # From each token on: the reward, less what turns before it earned, and less the penalties of this and later tokens.
    return x.shaped - baseline - costs_to_go - (np.cumsum(earned) - earned)


def _implicit_worth(baseline: Any, x: CreditTerms, mates: Sequence[CreditTerms]) -> np.ndarray:
    """The sum of implicit process rewards from each token to the end of an answer, each less the siblings' level. An
    implicit reward is beta times the log-ratio of a token."""
    ratios = {id(m): m.stream(IMPLICIT) - np.concatenate(m.scored[REFERENCE]) for m in mates}
    others = [float(ratios[id(m)].mean()) if len(ratios[id(m)]) else 0.0 for m in mates if m is not x]
    # The level is a mean over the other answers of their means over tokens: a long one counts no more.
    level = math.fsum(others) / len(others) if others else 0.0
    lead = ratios[id(x)] - level
    # The sum from each token to the end: turned round, summed by a convolution with ones, and turned back.
    return baseline.beta * np.convolve(lead[::-1], np.ones(len(lead)))[: len(lead)][::-1] if len(lead) else lead


def _compared(baseline: Any, x: CreditTerms, mates: Sequence[CreditTerms]) -> float:
    """The reward of one of several siblings minus its baseline, from the differences to the others."""
    lead = [x.reward - m.reward for m in mates if m is not x]
    match kind(baseline):
        case "GroupMean":
            # r_i - mean(r) = sum_j (r_i - r_j) / n: equal rewards give an exact 0.
            return math.fsum(lead) / (len(lead) + 1)
        case "Others":
            return math.fsum(lead) / len(lead) if lead else 0.0
        case "LengthMean":
            # The mean is weighted by length: sum_j n_j (r_i - r_j) / sum_j n_j.
            weighted_lead = [m.spoken * (x.reward - m.reward) for m in mates]
            return math.fsum(weighted_lead) / max(1, sum(m.spoken for m in mates))
        case "SoftMean":
            # r_i - tau log mean_j exp(r_j / tau), from differences, so that no large reward overflows.
            total = np.logaddexp.reduce([-d / baseline.tau for d in [0.0, *lead]])
            return baseline.tau * (math.log(len(mates)) - float(total))
        case _:  # SecondBest
            # Only the best sibling has credit: its lead over the second. Of equal ones it is the last.
            best = max(enumerate(mates), key=lambda row: (row[1].reward, row[0]))[1]
            return min(lead) if x is best and lead else 0.0


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
    """Credit whitened over the step's tokens or samples: mean 0, standard deviation 1.

    It is 0 everywhere if it spreads by at most `doubt`.
    """
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
