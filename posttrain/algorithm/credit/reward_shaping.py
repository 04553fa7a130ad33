"""Shaping: changes of the raw outcome before rewards are compared. A piece may read all siblings of a prompt.

Each is a type in `ladder.pieces.shape` and functions here, registered for that type: `shape`, and `grown` or `dropped`
where it needs them. Filters, pass rates and difficulty read the raw outcome, never the shaped reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.algorithm.register import missing
from posttrain.core.types import Episode
from posttrain.core.verdict import SOLVED
from posttrain.ladder.pieces.shape import (
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
from posttrain.system.errors import DataError

Array = NDArray[np.float64]


def shaped(
    pieces: Sequence[Shaping], rewards: Array, episodes: Sequence[Episode], max_tokens: int
) -> tuple[Array, list[str]]:
    """(rewards [G] after all pieces, why each episode may have no gradient or '') of one prompt's judged siblings."""
    # The first reason stays. A dropped episode keeps its reward: siblings are compared with it.
    why = ["said nothing" if e.spoken == 0 else "" for e in episodes]
    for piece in pieces:
        why = [reason or dropped(piece, e) for reason, e in zip(why, episodes, strict=True)]
        rewards = shape(piece, rewards, episodes, max_tokens)
    return rewards, why


def sizes(
    pieces: Sequence[Shaping], rewards: Array, terms: Array, episodes: Sequence[Episode], max_tokens: int
) -> Array:
    """Sums of absolute terms [G] of the rewards after all pieces; `terms` are those of the raw `rewards`.

    For .1 + .2 - .3 the terms are .6. `Signed` makes them 2 * .6 + 1 = 2.2, so rounding is 2.2 times the resolution.
    """
    # The pieces are applied once more, because `grown` needs the rewards before and after each of them.
    for piece in pieces:
        after = shape(piece, rewards, episodes, max_tokens)
        terms = grown(piece, terms, rewards, after, episodes)
        rewards = after
    return terms


# --- the functions of a piece ----------------------------------------------------------------------------------------


@singledispatch
def shape(piece: Shaping, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """Rewards [G] after one piece. Numeric cases: A10, A32, C04."""
    raise missing(piece, shape)


@singledispatch
def grown(piece: Shaping, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    """Sums of absolute terms [G] of the rewards `after` one piece, from the sums `terms` of the `rewards` before it.

    By default the change of a reward counts as one more term.
    """
    return terms + np.abs(after - rewards)


@singledispatch
def dropped(piece: Shaping, episode: Episode) -> str:
    """Returns the reason why an episode may have no gradient; '' where it may have one."""
    return ""


@shape.register
def _(piece: Signed, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    return 2 * rewards - 1


@grown.register
def _(piece: Signed, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    return 2 * terms + 1


@shape.register
def _(piece: Overlong, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """DAPO Eq. 13, clamped: L_max 100, cache 20: 80 tokens -> 0, 85 -> -.25, 90 -> -.5, 100 and above -> -1."""
    cache = piece.cache * max_tokens
    return rewards + np.clip((max_tokens - cache - _length(episodes)) / cache, -1.0, 0.0)


@shape.register
def _(piece: DropTruncated, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    return rewards


@dropped.register
def _(piece: DropTruncated, episode: Episode) -> str:
    return "truncated" if cut_off(episode) else ""


@shape.register
def _(piece: BestOf, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    # A sample is in k / G of all k-subsets. With the factor k the group's mean of
    # credit * grad log pi is the gradient of the mean, over all k-subsets, of the best reward.
    best = best_gain(rewards, piece.k) if piece.gain else best_of(rewards, piece.k)
    return min(piece.k, len(rewards)) * best


@grown.register
def _(piece: BestOf, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    # Every result may hold any sibling's reward, so the largest sum
    # of terms bounds all of them; `gain` subtracts a second one.
    return np.full(len(terms), min(piece.k, len(terms)) * (1 + piece.gain) * np.max(terms, initial=0.0))


@shape.register
def _(piece: RankLength, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    length = _length(episodes)
    width = np.ptp(length) if len(length) else 0.0
    # A wrong answer may lose by its length, but it gains nothing by being short.
    bonus = 0.5 - (length - length.min()) / width if width > 0 else np.zeros_like(length)
    return rewards + piece.coef * np.where(_solved(episodes), bonus, np.minimum(0.0, bonus))


@shape.register
def _(piece: TargetLength, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """exact: R - alpha * |target - length|. most: R * clip(alpha * (target - length) + .5, 0, 1)."""
    gap = np.array([_column("targetlength", e, "n_gold", piece.target) for e in episodes]) - _length(episodes)
    if piece.form == "exact":
        return rewards - piece.alpha * np.abs(gap)
    return rewards * np.clip(piece.alpha * gap + 0.5, 0.0, 1.0)


@grown.register
def _(piece: TargetLength, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    # The form "most" multiplies the reward by a number of [0, 1], so its terms do not grow.
    return terms if piece.form == "most" else terms + np.abs(after - rewards)


@shape.register
def _(piece: RateLength, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    solved = _solved(episodes)
    rate = float(solved.mean()) if len(solved) else 0.0
    # Length has a price also where no sibling solved the prompt: the rate is then 1 / G, as with one solved sibling.
    return rewards - piece.beta * max(rate, 1 / max(1, len(solved))) * _length(episodes)


@shape.register
def _(piece: Cosine, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    # swing falls from 1 at length 0 to 0 at max_tokens. Several turns may
    # have more tokens than one turn's limit, so the share is bounded.
    swing = (1 + np.cos(np.pi * np.minimum(_length(episodes) / max_tokens, 1.0))) / 2
    right = piece.solved_long + (piece.solved_short - piece.solved_long) * swing
    wrong = piece.wrong_long + (piece.wrong_short - piece.wrong_long) * swing
    return np.where([cut_off(e) for e in episodes], piece.exceeded, np.where(_solved(episodes), right, wrong))


@grown.register(Cosine)
@grown.register(Gate)
def _(piece: Cosine | Gate, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    # The result is either the reward as it was, or a number of
    # the piece itself: the larger of both sizes is safe for each.
    return np.maximum(terms, np.abs(after))


@shape.register
def _(piece: Repetition, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    return rewards - piece.penalty * np.array([repeated(_spoken_ids(e), piece.n) for e in episodes])


@shape.register
def _(piece: Gate, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    return np.where([_full_score(e, piece.source) for e in episodes], rewards, piece.otherwise)


@shape.register
def _(piece: RelativeLength, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    """length_ref / length - 1 + coef * (R - R_ref), with the reference policy's means on the same task."""
    means_G2 = _references(episodes)
    # An episode that said nothing has length 0. It is dropped (`shaped`), and its reward must still be a number.
    return means_G2[:, 0] / np.maximum(_length(episodes), 1.0) - 1 + piece.coef * (rewards - means_G2[:, 1])


@grown.register
def _(piece: RelativeLength, terms: Array, rewards: Array, after: Array, episodes: Sequence[Episode]) -> Array:
    means_G2 = _references(episodes)
    return means_G2[:, 0] + 1 + piece.coef * (terms + np.abs(means_G2[:, 1]))


# --- shared parts ----------------------------------------------------------------------------------------------------


def cut_off(episode: Episode) -> bool:
    """Whether a limit on tokens or time ended the episode."""
    return episode.stop.cut


def _length(episodes: Sequence[Episode]) -> Array:
    """Spoken tokens of each episode [G]."""
    return np.array([e.spoken for e in episodes], np.float64)


def _solved(episodes: Sequence[Episode]) -> NDArray[np.bool_]:
    return np.array([e.solved for e in episodes])


def best_of(rewards: Array, k: int) -> Array:
    """For every sample i [G]: the mean, over the k-subsets that contain i, of the best reward in the subset.

    For outcomes of {0, 1}: 1 for a success, 1 - C(wrong-1, k-1) / C(G-1, k-1) for a failure (A32). Fewer than k samples
    count as one subset of all of them.
    """
    # Sorted ascending, so that rank j means j samples are no better.
    # Each sum over subsets becomes a sum over the rank of the best.
    n, k = len(rewards), min(k, len(rewards))
    if n == 0:
        return rewards
    order = np.argsort(rewards, kind="stable")
    low_to_high = rewards[order]
    total = math.comb(n - 1, k - 1)
    # Of the subsets that contain i, the sample at rank j > rank(i) is the best in C(j - 1, k - 2).
    above = np.array([math.comb(j - 1, k - 2) if k >= 2 and j >= 1 else 0 for j in range(n)], np.float64) * low_to_high
    # `better_is_best`: subsets in which a better sample than i is best.
    # `as_best`: subsets in which i is best, with k - 1 others from the j samples below it.
    better_is_best = np.concatenate([np.cumsum(above[::-1])[::-1][1:], [0.0]])
    as_best = np.array([math.comb(j, k - 1) for j in range(n)], np.float64) * low_to_high
    out = np.empty(n)
    out[order] = (as_best + better_is_best) / total
    # The sort puts equal rewards in some order, and the rank decides. Their mean gives each of them the same.
    for value in np.unique(rewards):
        tied = rewards == value
        out[tied] = math.fsum(out[tied]) / np.count_nonzero(tied)
    return out


def best_gain(rewards: Array, k: int) -> Array:
    """For every sample i [G]: the mean, over the k-subsets that contain i, of how much i raises the best reward in the
    subset (PKPO, Eq. 33).

    It raises the best reward by r_i - r_j where j, the best of the others, is worse than i. That is so in
    C(rank(j), k - 2) of the subsets. [1, 0, 0] with k=2 -> [1, 0, 0]. With k=1 there are no others, and the result is
    the reward.
    """
    n, k = len(rewards), min(k, len(rewards))
    if k < 2:
        return rewards
    # Rank i and above add 0 here: there r - low_to_high is not positive. So the sum runs over all j without a bound.
    low_to_high = np.sort(rewards)
    share = np.array([math.comb(j, k - 2) for j in range(n)], np.float64) / math.comb(n - 1, k - 1)
    return np.array([math.fsum(share * np.maximum(r - low_to_high, 0.0)) for r in rewards])


def best_spread(rewards: Array, k: int) -> float:
    """Standard deviation of the best reward over all k-subsets (ddof 0): sqrt(p (1 - p)) for outcomes of {0, 1}."""
    n, k = len(rewards), min(k, len(rewards))
    if n == 0:
        return 0.0
    # The sample at rank j is the best of C(j, k - 1) of the C(n, k) subsets.
    chance = np.array([math.comb(j, k - 1) for j in range(n)], np.float64) / math.comb(n, k)
    best = np.sort(rewards)
    expected = math.fsum(chance * best)
    return math.sqrt(math.fsum(chance * (best - expected) ** 2))


def repeated(ids: Sequence[int] | NDArray[np.int32], n: int) -> float:
    """Share of n-grams that occurred before: [5, 5, 5, 5, 5] with n=2 -> .75; fewer than n tokens -> 0."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _spoken_ids(episode: Episode) -> list[int]:
    """The spoken token ids of all segments."""
    return [int(i) for s in episode.segments for i in s.ids[s.mask]]


def _full_score(episode: Episode, source: str) -> bool:
    """Returns whether a source gave a full score. Raises DataError where the episode has no such source."""
    scores = [j.verdict.score for j in episode.verdicts if j.source == source]
    if not scores:
        named = ", ".join(sorted({j.source for j in episode.verdicts}))
        raise DataError(
            f"shape=gate reads the reward source {source!r}, and there are {named}: add it to env.rewards, with"
            " weight 0"
        )
    return all(s is not None and s >= SOLVED for s in scores)


def _references(episodes: Sequence[Episode]) -> Array:
    """[G, 2]: mean length and mean reward of the reference policy on each episode's task."""
    names = ("reference_length", "reference_accuracy")
    return np.array([[_column("relativelength", e, name) for name in names] for e in episodes]).reshape(-1, 2)


def _column(shape: str, episode: Episode, name: str, otherwise: float | None = None) -> float:
    """A number from a column of the task, or `otherwise`; DataError where the task has no finite one."""
    value: Any = episode.task.info.get(name, otherwise)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"shape={shape} reads {name!r} of every task, and task {episode.task.id!r} has"
            f" {'none' if value is None else repr(value)}: write a number into that column"
            + (" (sample the reference policy first)" if otherwise is None else "")
        )
    return number
