"""A second, slow opinion on a step's credit and weights, written down from the definitions and sharing no code with them.

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
from posttrain.core.types import Episode, Scored, ScoredGroup, Stop

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
    return known is not None and all(f.name in known or f.default is MISSING or getattr(piece, f.name) == f.default for f in fields(piece))


@dataclass(frozen=True, eq=False)
class Opinion:
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

    @property
    def loud(self) -> bool:
        return not self.dropped and bool(np.any(self.credit))


def key(episode: Episode) -> bytes:
    """What was said and with which log-probs: finds an episode again in a batch."""
    said = [x for s in episode.segments for x in (s.ids[s.mask], s.logp[s.mask])]
    return b"".join(x.tobytes() for x in (*said[::2], *said[1::2]))


def opinions(a: Algorithm, groups: Sequence[ScoredGroup], *, max_tokens: int, ema: float) -> list[Opinion] | None:
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
    reward = [r - math.fsum(c) for (r, _), c in zip(shaped, paid, strict=True)]
    each = _centred(a, samples, [r for r, _ in shaped], reward, paid, ema)
    if each is None:
        return None
    compares = kind(a.baseline) in ("GroupMean", "Others")
    by_group: list[list[float]] = [[] for _ in groups]
    for (p, _), r in zip(samples, reward, strict=True):
        by_group[p].append(r)
    whole = _std(reward)
    for i, (p, _) in enumerate(samples):
        r = by_group[p]
        if compares and (len(r) < 2 or max(r) == min(r)):
            each[i] = each[i] * 0.0
            continue
        divisor = (
            1.0 if a.scale == "one" else whole if a.scale == "batch_std" else _std(r) if a.scale == "group_std" else math.fsum(r) / len(r)
        )
        each[i] = each[i] / divisor if divisor > 0 else each[i] * 0.0
    if a.whiten is not None:
        each = _white(a.whiten, each)
    targets = [_targets(a.baseline, s, r, c) for (_, s), (r, _), c in zip(samples, shaped, paid, strict=True)]
    return [Opinion(s, p, x, bool(why), t) for (p, s), x, (_, why), t in zip(samples, each, shaped, targets, strict=True)]


def _shaped(a: Algorithm, e: Episode, max_tokens: int) -> tuple[float, str]:
    """Reward after shaping, from the verdicts; and why the episode has no gradient."""
    r = math.fsum(j.weight * j.verdict.score for j in e.verdicts if j.counts and j.verdict.score is not None)
    why = "" if e.spoken else "said nothing"
    for piece in pieces(a.shape):
        if kind(piece) == "Signed":
            r = r + r - 1
        elif kind(piece) == "Overlong":
            over = e.spoken - max_tokens * (1 - piece.cache)
            r -= min(max(over / (piece.cache * max_tokens), 0.0), 1.0)
        elif kind(piece) == "DropTruncated" and e.stop in (Stop.LENGTH, Stop.TOKENS, Stop.CONTEXT, Stop.TIME):
            why = "truncated"
    return r, why


def _paid(a: Algorithm, s: Scored) -> np.ndarray | None:
    """What the KL takes from the reward at each spoken token."""
    said = s.start if a.anchor == "start" else tuple(x.logp[x.mask] for x in s.episode.segments)
    if said is None or s.reference is None:
        return None
    gap = np.concatenate(said).astype(np.float64) - np.concatenate(s.reference)
    pull: Any = a.pull
    value = {"k1": gap, "k2": gap * gap / 2, "k3": np.exp(-gap) - 1 + gap}.get(pull.estimator)
    return None if value is None else pull.coef * value


def _centred(
    a: Algorithm, samples: Sequence[tuple[int, Scored]], shaped: Sequence[float], reward: Sequence[float], paid: Sequence[Any], ema: float
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
            if s.values is None:
                return None
            turns = _turns(s.episode)
            out.append(_future(a.baseline, np.concatenate(s.values).astype(np.float64), shaped[i] - turns.sum(), paid[i] - turns))
            continue
        others = [reward[j] for j in members[p] if j != i]
        if name == "Zero":
            base = 0.0
        elif name == "GroupMean":
            base = math.fsum([*others, reward[i]]) / (len(others) + 1)
        elif name == "Others":
            base = math.fsum(others) / len(others) if others else reward[i]
        else:
            base = ema
            ema += (1 - a.baseline.decay) * (reward[i] - ema)  # type: ignore[union-attr]
        out.append(np.full(tokens, reward[i] - base))
    return out


def _targets(baseline: Any, s: Scored, shaped: float, paid: np.ndarray) -> np.ndarray | None:
    """What the value of each token is taught: its estimate corrected by GAE."""
    if kind(baseline) != "Value" or s.values is None:
        return None
    v = np.concatenate(s.values).astype(np.float64)
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


def _std(x: Sequence[float]) -> float:
    """Root of the sum of squared distances between all pairs, each once, over n (n - 1): ddof 1 without a mean."""
    n = len(x)
    if n < 2 or max(x) == min(x):
        return 0.0
    y = np.asarray(x, np.float64)
    y = y - y[0]
    return math.sqrt(max(0.0, (n * math.fsum(y * y) - math.fsum(y) ** 2) / (n * (n - 1))))


def _white(over: str, each: list[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and standard deviation 1 over the step's tokens, or over its samples."""
    loud = [x for x in each if len(x)]
    if not loud:
        return each
    flat = np.concatenate(loud)
    if flat.max() == flat.min():
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
