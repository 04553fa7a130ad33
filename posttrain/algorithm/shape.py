"""Shaping: what the algorithm makes of the raw outcome before it compares. One `case` a piece; group pieces see all siblings.

Filters, pass rates and difficulty read the raw outcome, never this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain.core.errors import DataError
from posttrain.core.pieces.shape import (
    BestOf,
    Cosine,
    DropTruncated,
    Gate,
    Overlong,
    RankLength,
    RateLength,
    RelativeLength,
    Repetition,
    Shaping,
    Signed,
    TargetLength,
)
from posttrain.core.types import Episode
from posttrain.core.verdict import SOLVED

Array = NDArray[np.float64]


def shaped(pieces: Sequence[Shaping], rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> tuple[Array, list[str]]:
    """(rewards [G] after all pieces, why each episode may carry no gradient or '') of one prompt's judged siblings."""
    dropped = ["said nothing" if e.spoken == 0 else "" for e in episodes]
    for piece in pieces:
        if isinstance(piece, DropTruncated):
            dropped = [d or ("truncated" if cut_off(e) else "") for d, e in zip(dropped, episodes, strict=True)]
        else:
            rewards = shape(piece, rewards, episodes, max_tokens)
    return rewards, dropped


def sizes(pieces: Sequence[Shaping], rewards: Array, terms: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """Sums of absolute terms [G] of the rewards after all pieces; `terms` are those of the raw `rewards`.

    Signed makes 2 * .6 + 1 of a .1 + .2 - .3 whose terms are .6: its 0 is known to 2.2 times the resolution.
    """
    for piece in pieces:
        after = shape(piece, rewards, episodes, max_tokens)
        match piece:
            case Signed():
                terms = 2 * terms + 1
            case BestOf(k=k, gain=gain):
                terms = np.full(len(terms), min(k, len(terms)) * (1 + gain) * np.max(terms, initial=0.0))
            case TargetLength(form="most"):
                pass  # a share of them
            case Gate() | Cosine():
                terms = np.maximum(terms, np.abs(after))
            case RelativeLength(coef=coef):
                known = _references(episodes)
                terms = known[:, 0] + 1 + coef * (terms + np.abs(known[:, 1]))
            case _:
                terms = terms + np.abs(after - rewards)
        rewards = after
    return terms


def cut_off(episode: Episode) -> bool:
    return episode.stop.cut


def shape(piece: Shaping, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """Rewards [G] after one piece. Numeric cases: A10, A32, C04.

    `Overlong` is DAPO Eq. 13, clamped: L_max 100, cache 20: 80 tokens -> 0, 85 -> -.25, 90 -> -.5, 100 and above -> -1.
    """
    length = np.array([e.spoken for e in episodes], np.float64)
    solved = np.array([e.reward is not None and e.reward >= SOLVED for e in episodes])
    match piece:
        case Signed():
            return 2 * rewards - 1
        case Overlong(cache=share):
            cache = share * max_tokens
            return rewards + np.clip((max_tokens - cache - length) / cache, -1.0, 0.0)
        case DropTruncated():
            return rewards
        case BestOf(k=k):
            return min(k, len(rewards)) * (best_gain(rewards, k) if piece.gain else best_of(rewards, k))
        case RankLength(coef=coef):
            width = np.ptp(length) if len(length) else 0.0
            bonus = 0.5 - (length - length.min()) / width if width > 0 else np.zeros_like(length)
            return rewards + coef * np.where(solved, bonus, np.minimum(0.0, bonus))
        case TargetLength(target=target, alpha=alpha, form=form):
            gap = np.array([float(e.task.info.get("n_gold", target)) for e in episodes]) - length
            return rewards - alpha * np.abs(gap) if form == "exact" else rewards * np.clip(alpha * gap + 0.5, 0.0, 1.0)
        case RateLength(beta=beta):
            rate = float(solved.mean()) if len(solved) else 0.0
            return rewards - beta * max(rate, 1 / max(1, len(solved))) * length
        case Cosine():
            swing = (1 + np.cos(np.pi * np.minimum(length / max_tokens, 1.0))) / 2
            right = piece.solved_long + (piece.solved_short - piece.solved_long) * swing
            wrong = piece.wrong_long + (piece.wrong_short - piece.wrong_long) * swing
            return np.where([cut_off(e) for e in episodes], piece.exceeded, np.where(solved, right, wrong))
        case Repetition(n=n, penalty=penalty):
            return rewards - penalty * np.array([repeated(_said(e), n) for e in episodes])
        case Gate(source=source, otherwise=otherwise):
            return np.where([_opened(e, source) for e in episodes], rewards, otherwise)
        case RelativeLength(coef=coef):
            known = _references(episodes)
            return known[:, 0] / np.maximum(length, 1.0) - 1 + coef * (rewards - known[:, 1])


def best_of(rewards: Array, k: int) -> Array:
    """Mean over the k-subsets that hold sample i of their best reward, for every i [G].

    For outcomes of {0, 1}: 1 for a success, 1 - C(wrong-1, k-1) / C(G-1, k-1) for a failure (A32). Fewer than k samples
    count as one subset of all of them.
    """
    n, k = len(rewards), min(k, len(rewards))
    if n == 0:
        return rewards
    order = np.argsort(rewards, kind="stable")
    low_to_high = rewards[order]
    total = math.comb(n - 1, k - 1)
    # Among the subsets that hold i, the one at rank j > rank(i) is the best of C(j - 1, k - 2) of them.
    above = np.array([math.comb(j - 1, k - 2) if k >= 2 and j >= 1 else 0 for j in range(n)], np.float64) * low_to_high
    after = np.concatenate([np.cumsum(above[::-1])[::-1][1:], [0.0]])
    own = np.array([math.comb(j, k - 1) for j in range(n)], np.float64) * low_to_high
    out = np.empty(n)
    out[order] = (own + after) / total
    for value in np.unique(rewards):
        tied = rewards == value
        out[tied] = math.fsum(out[tied]) / np.count_nonzero(tied)
    return out


def best_gain(rewards: Array, k: int) -> Array:
    """Mean over the k-subsets that hold sample i of their best reward less that of the others in it, for every i [G] (PKPO, Eq. 33).

    Sample i adds r_i - r_j where j is the best of the others and worse: so it is for C(rank(j), k - 2) of the subsets. [1, 0, 0]
    with k=2 -> [1, 0, 0]; with k=1 nobody else is there, and it is the reward.
    """
    n, k = len(rewards), min(k, len(rewards))
    if k < 2:
        return rewards
    low_to_high = np.sort(rewards)
    share = np.array([math.comb(j, k - 2) for j in range(n)], np.float64) / math.comb(n - 1, k - 1)
    return np.array([math.fsum(share * np.maximum(r - low_to_high, 0.0)) for r in rewards])


def best_spread(rewards: Array, k: int) -> float:
    """Standard deviation of the best reward over all k-subsets (all of them, so ddof 0): sqrt(p (1 - p)) for outcomes of {0, 1}."""
    n, k = len(rewards), min(k, len(rewards))
    if n == 0:
        return 0.0
    chance = np.array([math.comb(j, k - 1) for j in range(n)], np.float64) / math.comb(n, k)
    best = np.sort(rewards)
    mean = math.fsum(chance * best)
    return math.sqrt(math.fsum(chance * (best - mean) ** 2))


def repeated(ids: Sequence[int] | NDArray[np.int32], n: int) -> float:
    """Share of n-grams that occurred before: [5, 5, 5, 5, 5] with n=2 -> .75; fewer than n tokens -> 0."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _said(episode: Episode) -> list[int]:
    return [int(i) for s in episode.segments for i in s.ids[s.mask]]


def _opened(episode: Episode, source: str) -> bool:
    """Whether a source gave the whole of its reward."""
    scores = [j.verdict.score for j in episode.verdicts if j.source == source]
    if not scores:
        named = ", ".join(sorted({j.source for j in episode.verdicts}))
        raise DataError(f"shape=gate reads the reward source {source!r}, and there are {named}: add it to env.rewards, with weight 0")
    return all(s is not None and s >= SOLVED for s in scores)


def _references(episodes: Sequence[Episode]) -> Array:
    """[G, 2]: mean length and mean reward of the reference policy on each episode's task."""
    return np.array([[_reference(e, "reference_length"), _reference(e, "reference_accuracy")] for e in episodes]).reshape(-1, 2)


def _reference(episode: Episode, name: str) -> float:
    value = episode.task.info.get(name)
    if value is None:
        raise DataError(
            f"shape=relativelength reads {name!r} of every task, and task {episode.task.id!r} has none. Sample the reference policy "
            "first and store its mean length and accuracy in the tasks' columns"
        )
    return float(value)
