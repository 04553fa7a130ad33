"""A second, slow opinion on a step's credit and weights, written down from the definitions and sharing no code with
them.

The audit understands the pieces listed here at the settings listed here; of an algorithm with any other piece it says
nothing (None). Where both opinions exist they must agree to rounding, so a bug has to be made twice to stay unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from posttrain.core.algorithm import Algorithm
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import REFERENCE, START, VALUE
from posttrain.core.types import Episode, Stop
from posttrain.role.culprits import key

READS: dict[str, tuple[str, ...]] = {
    "Zero": (),
    "Ema": ("decay",),
    "GroupMean": (),
    "Others": (),
    "Value": ("gae_lambda", "gamma", "coef", "clip"),
    "KL": ("coef", "estimator", "placement"),
    "SequenceL2": ("coef",),
    "Signed": (),
    "Overlong": ("cache",),
    "DropTruncated": (),
    "Clip": ("low", "high"),
    "Truncate": ("cap", "level"),
    "Mask": ("low", "high", "level"),
    "EntropyBonus": ("coef",),
}
"""Pieces the audits understand, each with the settings they read; any other setting must stand at its default."""
NEUTRAL = {
    "credit": {
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
    },
    "loss": {
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
    },
}
"""Choices of an algorithm that have no part in its credit, or in what the loss asks of a log-prob."""


def kind(piece: object) -> str:
    return type(piece).__name__


def understood(a: Algorithm, matter: str, read: Iterable[str]) -> bool:
    """Whether an audit of `matter` that knows the choices `read` knows everything that matters here."""
    for f in fields(a):
        value = getattr(a, f.name)
        if f.name in NEUTRAL[matter] or value == f.default:
            continue
        if f.name not in read or not all(plain(p) for p in pieces(value)):
            return False
    return True


def pieces(value: object) -> tuple[Any, ...]:
    """The pieces of a choice that holds none, one or several."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def plain(piece: Any) -> bool:
    """A word, or a piece whose settings beyond those in `READS` stand at their defaults."""
    if isinstance(piece, str):
        return True
    known = READS.get(kind(piece))
    return known is not None and all(
        f.name in known or f.default is MISSING or getattr(piece, f.name) == f.default for f in fields(piece)
    )


@dataclass(frozen=True, eq=False)
class ExpectedCredit:
    """What one episode should get: credit of each spoken token, and whether it may carry a gradient at all."""

    scored: Scored
    group: int
    credit: np.ndarray
    dropped: bool
    returns: np.ndarray | None = None
    """Value targets, where the algorithm learns values."""

    @property
    def key(self) -> bytes:
        return key(self.scored.episode)


def expected_credit(
    a: Algorithm, groups: Sequence[ScoredGroup], *, max_tokens: int, ema: float
) -> list[ExpectedCredit] | None:
    """The credit of every judged episode of a step; None where the algorithm has a piece this does not understand."""
    if getattr(a.pull, "placement", "") == "token" or a.whiten not in (None, "token", "sample"):
        return None
    kl_reward = kind(a.pull) == "KL" and a.pull is not None and getattr(a.pull, "placement", "") in ("reward", "both")
    reads = {"baseline", "scale", "whiten", "shape", "anchor", *(("pull",) if kl_reward else ())}
    if not understood(a, "credit", reads if kl_reward else {*reads, "pull"}) or a.scale not in (
        "one",
        "group_std",
        "batch_std",
        "group_mean",
    ):
        return None
    samples = [(p, s) for p, g in enumerate(groups) for s in g.episodes]
    shaped = [_shaped(a, s.episode, max_tokens) for _, s in samples]
    paid: list[np.ndarray] = []
    for _, s in samples:
        cost = _paid(a, s) if kl_reward else np.zeros(s.episode.spoken)
        if cost is None:
            return None
        paid.append(cost)
    reward = [r - math.fsum(c) for (r, *_), c in zip(shaped, paid, strict=True)]
    terms = [size + math.fsum(abs(x) for x in c) for (_, size, _), c in zip(shaped, paid, strict=True)]
    fine = [_resolution(s.episode) for _, s in samples]
    each = _centred(a, samples, [r for r, *_ in shaped], reward, paid, ema)
    if each is None:
        return None
    members = [[i for i, (p, _) in enumerate(samples) if p == group] for group in range(len(groups))]
    each = _divided(a, members, each, reward, terms, fine)
    if a.whiten is not None:
        compares = kind(a.baseline) in ("GroupMean", "Others")
        doubt = [
            0.0 if compares else f * _summed(a, s, x, t)
            for (_, s), x, t, f in zip(samples, each, terms, fine, strict=True)
        ]
        each = _white(a.whiten, each, max(doubt, default=0.0))
    targets = [_targets(a.baseline, s, r, c) for (_, s), (r, *_), c in zip(samples, shaped, paid, strict=True)]
    return [
        ExpectedCredit(s, p, x, bool(why), t)
        for (p, s), x, (*_, why), t in zip(samples, each, shaped, targets, strict=True)
    ]


def alike(values: Sequence[float], terms: Sequence[float], resolution: float) -> bool:
    """Whether numbers are one number up to rounding: sorted, the last is no further from the first than `resolution` of
    the largest sum of absolute terms. The audit's own word for what credit calls no spread."""
    in_order = sorted(values)
    return len(in_order) < 2 or in_order[-1] - in_order[0] <= resolution * max(terms)


def same_outcome(episodes: Sequence[Episode]) -> bool:
    """Whether the judged ones among these have one raw outcome, up to rounding."""
    judged = [e for e in episodes if e.reward is not None]
    raw = [(_terms(e), _resolution(e)) for e in judged]
    return not judged or alike(
        [math.fsum(t) for t, _ in raw], [math.fsum(map(abs, t)) for t, _ in raw], max(f for _, f in raw)
    )


def _terms(e: Episode) -> list[float]:
    return [j.weight * j.verdict.score for j in e.verdicts if j.counts and j.verdict.score is not None]


def _resolution(e: Episode) -> float:
    return max((j.resolution for j in e.verdicts if j.counts and j.verdict.score is not None), default=0.0)


def _summed(a: Algorithm, s: Scored, credit: np.ndarray, terms: float) -> float:
    """What rounding of an episode's credit is relative to, where it is compared with no sibling: its reward, its
    baseline, its values."""
    values = [abs(float(v)) for part in s.find(VALUE) or () for v in part] if kind(a.baseline) == "Value" else []
    return terms + max(map(abs, credit.tolist()), default=0.0) + 2 * max(values, default=0.0)


def _divided(
    a: Algorithm,
    members: Sequence[Sequence[int]],
    each: Sequence[np.ndarray],
    reward: Sequence[float],
    terms: Sequence[float],
    fine: Sequence[float],
) -> list[np.ndarray]:
    """Credit over its scale: 0 where siblings are compared and agree, or where there is nothing to divide by."""
    out = list(each)
    whole = _std(reward, terms, max(fine, default=0.0))
    for at in members:
        r, t, f = [reward[i] for i in at], [terms[i] for i in at], max((fine[i] for i in at), default=0.0)
        agree = kind(a.baseline) in ("GroupMean", "Others") and alike(r, t, f)
        average = math.fsum(r) / len(r) if r else 0.0
        scales = {
            "one": 1.0,
            "batch_std": whole,
            "group_std": _std(r, t, f),
            "group_mean": average if r and average > f * max(t) else 0.0,
        }
        for i in at:
            out[i] = out[i] * 0.0 if agree or not scales[a.scale] > 0 else out[i] / scales[a.scale]
    return out


def _shaped(a: Algorithm, e: Episode, max_tokens: int) -> tuple[float, float, str]:
    """Reward after shaping, from the verdicts; the sum of its absolute terms; and why the episode has no gradient."""
    r, size = math.fsum(_terms(e)), math.fsum(map(abs, _terms(e)))
    why = "" if e.spoken else "said nothing"
    for piece in pieces(a.shape):
        if kind(piece) == "Signed":
            r, size = r + r - 1, size + size + 1
        elif kind(piece) == "Overlong":
            over = e.spoken - max_tokens * (1 - piece.cache)
            fine = min(max(over / (piece.cache * max_tokens), 0.0), 1.0)
            r, size = r - fine, size + fine
        elif kind(piece) == "DropTruncated" and e.stop in (Stop.LENGTH, Stop.TOKENS, Stop.CONTEXT, Stop.TIME):
            why = "truncated"
    return r, size, why


def _paid(a: Algorithm, s: Scored) -> np.ndarray | None:
    """What the KL takes from the reward at each spoken token."""
    said = s.find(START) if a.anchor == "start" else tuple(x.logp[x.mask] for x in s.episode.segments)
    if said is None or REFERENCE not in s:
        return None
    gap = np.concatenate(said).astype(np.float64) - np.concatenate(s[REFERENCE])
    pull: Any = a.pull
    value = {"k1": gap, "k2": gap * gap / 2, "k3": np.exp(-gap) - 1 + gap}.get(pull.estimator)
    return None if value is None else pull.coef * value


def _centred(
    a: Algorithm,
    samples: Sequence[tuple[int, Scored]],
    shaped: Sequence[float],
    reward: Sequence[float],
    paid: Sequence[Any],
    ema: float,
) -> list[np.ndarray] | None:
    """Credit before any scale, over each episode's spoken tokens."""
    out: list[np.ndarray] = []
    name = kind(a.baseline)
    members: dict[int, list[int]] = {}
    for i, (p, _) in enumerate(samples):
        members.setdefault(p, []).append(i)
    for i, (p, s) in enumerate(samples):
        tokens = s.episode.spoken
        if name == "Value":
            if VALUE not in s:
                return None
            turns = _turns(s.episode)
            out.append(
                _future(
                    a.baseline, np.concatenate(s[VALUE]).astype(np.float64), shaped[i] - turns.sum(), paid[i] - turns
                )
            )
            continue
        lead = [reward[i] - reward[j] for j in members[p] if j != i]
        if name == "Zero":
            credit = reward[i]
        elif name == "GroupMean":
            credit = math.fsum(lead) / (len(lead) + 1)
        elif name == "Others":
            credit = math.fsum(lead) / len(lead) if lead else 0.0
        else:
            credit = reward[i] - ema
            ema += (1 - a.baseline.decay) * credit  # type: ignore[union-attr]
        out.append(np.full(tokens, credit))
    return out


def _targets(baseline: Any, s: Scored, shaped: float, paid: np.ndarray) -> np.ndarray | None:
    """What the value of each token is taught: its estimate corrected by GAE."""
    if kind(baseline) != "Value" or VALUE not in s:
        return None
    v = np.concatenate(s[VALUE]).astype(np.float64)
    turns = _turns(s.episode)
    return v + _future(baseline, v, shaped - turns.sum(), paid - turns)


def _turns(e: Episode) -> np.ndarray:
    """What the world gave for turns, at the last spoken token of each."""
    given = [(j.end or 0, j.weight * (j.verdict.score or 0.0)) for j in e.verdicts if j.paid]
    return np.array([math.fsum(score for end, score in given if end == t) for t in range(1, e.spoken + 1)])


def _future(value: Any, v: np.ndarray, shaped: float, paid: np.ndarray) -> np.ndarray:
    """GAE as the sum it is: A_t = sum_k (gamma lambda)^k delta_{t+k}, over spoken tokens."""
    if not len(v):
        return v
    earned = np.negative(paid)
    earned[-1] += shaped
    delta = earned + value.gamma * np.append(v[1:], 0.0) - v
    fade = (value.gamma * value.gae_lambda) ** np.arange(len(v))
    return np.convolve(delta[::-1], fade)[: len(v)][::-1]


def _std(x: Sequence[float], terms: Sequence[float], resolution: float) -> float:
    """Root of the sum of squared distances between all pairs, each once, over n (n - 1): ddof 1 without a mean."""
    n = len(x)
    if alike(x, terms, resolution):
        return 0.0
    y = np.asarray(x, np.float64)
    y = y - y[0]
    return math.sqrt(max(0.0, (n * math.fsum(y * y) - math.fsum(y) ** 2) / (n * (n - 1))))


def _white(over: str, each: list[np.ndarray], doubt: float) -> list[np.ndarray]:
    """Mean 0 and standard deviation 1 over the step's tokens, or over its samples; zeros where no two differ by more
    than `doubt`."""
    loud = [x for x in each if len(x)]
    if not loud:
        return each
    first = loud[0][0]
    each = [x - first for x in each]
    loud = [x for x in each if len(x)]
    flat = np.concatenate(loud)
    if float(np.ptp(flat)) <= doubt:
        return [x * 0.0 for x in each]
    if over == "token":
        mean, std = float(flat.mean()), float(flat.std(ddof=1)) if len(flat) > 1 else 0.0
    else:
        count, mean = len(loud), math.fsum(float(x.mean()) for x in loud) / len(loud)
        std = math.sqrt(math.fsum(float(((x - mean) ** 2).mean()) for x in loud) / (count - 1)) if count > 1 else 0.0
    return [(x - mean) / std if std > 0 else x - mean for x in each]


def weights(aggregate: str, tokens: Sequence[int], groups: Sequence[int], max_tokens: int) -> np.ndarray | None:
    """The weight of a token of each episode of a minibatch; None for a way of averaging this does not know."""
    n = len(tokens)
    whole, in_group = sum(tokens), dict.fromkeys(groups, 0)
    for t, g in zip(tokens, groups, strict=True):
        in_group[g] += t
    each = {
        "token_mean": lambda t, g: 1 / whole,
        "prompt_mean": lambda t, g: 1 / len(in_group) / in_group[g],
        "sequence_mean": lambda t, g: 1 / n / t,
        "sequence_sum": lambda t, g: 1 / n,
        "constant": lambda t, g: 1 / n / max_tokens,
    }.get(aggregate)
    return None if each is None else np.array([each(t, g) for t, g in zip(tokens, groups, strict=True)])
