"""Credit of one step: shaping, KL in the reward, baseline, scale, whitening. numpy float64.

    A = (r - baseline) / scale

A baseline, a scale or a shaping is one `case` here. Group-relative baselines without spread (max == min of the rewards
they compare, tested before any division, or fewer than two of them) give exactly 0.

Worked example, rewards [1, 0, 0, 1] of one prompt: groupmean [.5, -.5, -.5, .5], with group_std +-.8660, others +-.6667.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from posttrain.algorithm import kl
from posttrain.algorithm.value import gae
from posttrain.core.algorithm import (
    KL,
    Algorithm,
    DropTruncated,
    Ema,
    GroupMean,
    Others,
    Overlong,
    Shaping,
    Signed,
    Value,
    Whiten,
    Zero,
)
from posttrain.core.errors import InvariantError
from posttrain.core.types import Credit, Episode, EpisodeCredit, GroupCredit, Scored, ScoredGroup, Stop

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Sample:
    """A judged episode between shaping and credit."""

    scored: Scored
    shaped: float
    penalty_T: Array
    """coef * KL estimate of each spoken token; zeros where the reward carries no KL."""
    dropped: str

    @property
    def reward(self) -> float:
        """What scalar baselines compare: the shaped reward less the whole episode's KL."""
        return self.shaped - math.fsum(self.penalty_T)


def credit_step(a: Algorithm, groups: Sequence[ScoredGroup], *, max_tokens: int, ema: float) -> Credit:
    """Credit of every spoken token of a step, whole groups at once.

    Args:
        a: the algorithm; only its baseline, scale, whiten, shape, and a KL placed in the reward are read.
        groups: groups with their judged episodes scored; a group may have none.
        max_tokens: L_max of the sampling contract (`Overlong`).
        ema: the moving baseline before this step (`Ema`); handed back unchanged by other baselines.

    Raises:
        InvariantError: a stream that the algorithm reads is missing.
    """
    samples_P = [[_sample(a, s, max_tokens) for s in g.episodes] for g in groups]
    rewards_P = [np.array([s.reward for s in samples]) for samples in samples_P]
    silent_P = [a.group_relative and not spread(r) for r in rewards_P]
    returns: Sequence[Array | None]
    if isinstance(a.baseline, Value):
        pairs = [_with_values(a.baseline, s) for samples in samples_P for s in samples]
        raw, returns = [p[0] for p in pairs], [p[1] for p in pairs]
    else:
        centred_P, ema = _centred(a, rewards_P, silent_P, ema)
        scalars = [x for centred in centred_P for x in centred]
        tokens = [s.scored.episode.spoken for samples in samples_P for s in samples]
        raw, returns = [np.full(n, x) for x, n in zip(scalars, tokens, strict=True)], [None] * len(tokens)
    divisors = [d for d, r in zip(_scales(a, rewards_P), rewards_P, strict=True) for _ in r]
    scaled = [x / d if d > 0 else np.zeros_like(x) for x, d in zip(raw, divisors, strict=True)]
    final = scaled if a.whiten is None else whitened(a.whiten, scaled)
    rows = iter(zip(final, returns, strict=True))
    return Credit(
        tuple(
            GroupCredit(g.group, tuple(_episode_credit(s, *next(rows)) for s in samples), silent)
            for g, samples, silent in zip(groups, samples_P, silent_P, strict=True)
        ),
        ema,
    )


# --- shaping -----------------------------------------------------------------------------------------------------


def _sample(a: Algorithm, scored: Scored, max_tokens: int) -> _Sample:
    reward, dropped = scored.episode.reward, ""
    assert reward is not None, "Scored refuses an episode that was not judged"
    for piece in a.shape:
        reward, why = shape(piece, reward, scored.episode, max_tokens)
        dropped = dropped or why
    if scored.episode.spoken == 0:
        dropped = dropped or "said nothing"
    return _Sample(scored, reward, _penalty(a, scored), dropped)


def shape(piece: Shaping, reward: float, episode: Episode, max_tokens: int) -> tuple[float, str]:
    """(reward after one piece of shaping, why the episode may carry no gradient or '').

    `Overlong` is DAPO Eq. 13 (A10), clamped: L_max 100, cache 20: 80 tokens -> 0, 85 -> -.25, 90 -> -.5, 100 and above -> -1.
    """
    match piece:
        case Signed():
            return 2 * reward - 1, ""
        case Overlong(cache=share):
            cache = share * max_tokens
            return reward + min(0.0, max(-1.0, (max_tokens - cache - episode.spoken) / cache)), ""
        case DropTruncated():
            return reward, "truncated" if episode.stop in (Stop.LENGTH, Stop.CONTEXT) else ""


def _penalty(a: Algorithm, scored: Scored) -> Array:
    """coef * estimate per spoken token [T] of a KL in the reward (A34), under the anchor's log-probs; else zeros."""
    if not (isinstance(a.pull, KL) and kl.in_reward(a.pull)):
        return np.zeros(scored.episode.spoken)
    mu = tuple(s.logp[s.mask] for s in scored.episode.segments)
    said_T = _joined(mu if a.anchor == "behaviour" else scored.start, "start", a)
    gap_T = said_T - _joined(scored.reference, "reference", a)
    return a.pull.coef * kl.estimate(a.pull.estimator, torch.from_numpy(gap_T)).numpy()  # pyright: ignore[reportUnknownMemberType]


def _joined(parts: tuple[np.ndarray, ...] | None, name: str, a: Algorithm) -> Array:
    """Per-segment arrays as one [T] over the episode's spoken tokens."""
    if parts is None:
        raise InvariantError(f"credit of {a.name!r} reads the stream {name!r}, which was not scored")
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


# --- baseline and scale ------------------------------------------------------------------------------------------


def spread(rewards: Array) -> bool:
    """Whether siblings can be compared: at least two, and max != min."""
    return len(rewards) > 1 and bool(rewards.max() != rewards.min())


def _centred(a: Algorithm, rewards_P: Sequence[Array], silent_P: Sequence[bool], ema: float) -> tuple[list[Array], float]:
    """Reward less baseline, one array [G] per prompt, and the moving baseline afterwards. Means are exact sums, so siblings may be permuted."""
    out: list[Array] = []
    for r, silent in zip(rewards_P, silent_P, strict=True):
        if silent:
            out.append(np.zeros_like(r))
            continue
        match a.baseline:
            case Zero():
                out.append(r)
            case Ema(decay=decay):
                before: list[float] = []
                for x in r:
                    before.append(ema)
                    ema = decay * ema + (1 - decay) * float(x)
                out.append(r - np.array(before))
            case GroupMean():
                out.append(r - _mean(r))
            case Others():
                out.append(r - (math.fsum(r) - r) / (len(r) - 1))
            case Value():
                raise InvariantError("a value baseline gives credit per token, not per sample")
    return out, ema


def _with_values(value: Value, s: _Sample) -> tuple[Array, Array]:
    """(advantage [T], return [T]): the shaped reward at the last spoken token, the KL where it was paid (A05)."""
    if s.scored.values is None:
        raise InvariantError("credit with a value baseline reads the stream 'values', which was not scored")
    values_T = np.concatenate([np.zeros(0), *s.scored.values]).astype(np.float64)
    rewards_T = -s.penalty_T
    if len(rewards_T):
        rewards_T[-1] += s.shaped
    return gae(values_T, rewards_T, gamma=value.gamma, gae_lambda=value.gae_lambda)


def _scales(a: Algorithm, rewards_P: Sequence[Array]) -> list[float]:
    """What each group's credit is divided by; 0 or less where there is no scale, and credit is then exactly 0."""
    match a.scale:
        case "one":
            return [1.0] * len(rewards_P)
        case "group_std":
            return [_std(r) for r in rewards_P]
        case "batch_std":
            return [_std(np.concatenate([np.zeros(0), *rewards_P]))] * len(rewards_P)
        case "group_mean":
            return [_mean(r) if len(r) else 0.0 for r in rewards_P]


def _mean(x: Array) -> float:
    return math.fsum(x) / len(x)


def _std(x: Array) -> float:
    """Standard deviation, ddof 1; exactly 0 without spread."""
    return math.sqrt(math.fsum((x - _mean(x)) ** 2) / (len(x) - 1)) if spread(x) else 0.0


def whitened(whiten: Whiten, credit: Sequence[Array]) -> list[Array]:
    """Credit less its mean, over its standard deviation (ddof 1), over the whole step; centred zeros where all agree.

    `token` counts every token once, so long episodes weigh more; `sample` every episode once, its tokens sharing that one.
    """
    spoken = [x for x in credit if len(x)]
    if not spoken:
        return list(credit)
    flat = np.concatenate(spoken)
    if flat.max() == flat.min():
        return [np.zeros_like(x) for x in credit]
    weight = np.concatenate([np.full(len(x), 1.0 if whiten == "token" else 1 / len(x)) for x in spoken])
    count = float(len(flat) if whiten == "token" else len(spoken))
    mean = math.fsum(weight * flat) / count
    if count < 2:
        return [x - mean for x in credit]
    std = math.sqrt(math.fsum(weight * (flat - mean) ** 2) / (count - 1))
    return [(x - mean) / std for x in credit]


def _episode_credit(s: _Sample, advantage_T: Array, return_T: Array | None) -> EpisodeCredit:
    """The per-token arrays cut back into the episode's segments."""
    cuts = np.cumsum([segment.spoken for segment in s.scored.episode.segments])[:-1]
    parts = tuple(np.split(advantage_T, cuts))
    return EpisodeCredit(s.scored, s.shaped, parts, None if return_T is None else tuple(np.split(return_T, cuts)), s.dropped)
