"""Measures the worth of a reward model's scores beside its accuracy: whether its probabilities are calibrated, and
which part of the scores is length or another surface feature."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.measure.interval import Score
from posttrain.system.errors import DataError

BINS = 10
"""Bins of a reliability diagram."""
_PRAISED = "great|good|excellent|wonderful|fantastic|brilliant|interesting"
FLATTERY = re.compile(
    r"\b(you(?:'| a)re (?:absolutely |completely |totally |quite |so )?(?:right|correct)"
    r"|i (?:completely |totally |fully )?agree"
    rf"|(?:{_PRAISED}) (?:question|point|idea|choice|work)"
    r"|i(?:'m| am) (?:so |very |really )?sorry|i apologi[sz]e|my apologies|my mistake"
    r"|thank you for (?:pointing|asking|sharing))\b"
)
"""Phrases by which a completion agrees with, praises or apologises to the user, in English. Preference data favour them
whether or not the user is right (2310.13548)."""


def flattery(text: str) -> int:
    """Returns the number of phrases of `FLATTERY` that a text has.

    >>> flattery("Great question! You're absolutely right, and I apologize."), flattery("The question is great.")
    (3, 0)
    """
    return len(FLATTERY.findall(text.lower().replace("\u2019", "'")))


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs for which about the same probability was said."""

    low: float
    high: float
    said: float
    """Mean probability that the completion it prefers was the chosen one."""
    right: Score
    """Share of pairs in which it was."""


@dataclass(frozen=True)
class Calibration:
    """The distance between the probabilities that a reward model says and what happens."""

    bins: tuple[ReliabilityBin, ...]
    error: float
    """Expected calibration error (1706.04599): mean over pairs of |said - right| of their bin."""

    def lines(self) -> list[str]:
        """The reliability diagram, a line a bin."""
        out = [f"expected calibration error {self.error:.3f}"]
        for b in self.bins:
            out.append(f"  said {b.low:.2f} to {b.high:.2f}: {b.said:.3f}, right {b.right} ({b.right.prompts} pairs)")
        return out


def calibration(chosen: Sequence[float] | np.ndarray, rejected: Sequence[float] | np.ndarray) -> Calibration:
    """Calibration of pairs under Bradley-Terry: it says that the completion with the higher score was chosen with
    probability sigmoid(|difference|), in [0.5, 1].

    Raises:
        DataError: there is no pair, or a score is not finite.
    """
    gap, right = _ordered(chosen, rejected)
    if not len(gap):
        raise DataError("calibration needs at least one pair")
    # sigmoid(|gap|): exp of a number below 0, so it cannot overflow.
    said = 1 / (1 + np.exp(-np.abs(gap)))
    edges = np.linspace(0.5, 1.0, BINS + 1)
    # A probability of exactly 1 lies on the last edge and belongs to the last bin.
    bin_of = np.clip(np.digitize(said, edges) - 1, 0, BINS - 1)
    bins: list[ReliabilityBin] = []
    error = 0.0
    for i in range(BINS):
        in_bin = bin_of == i
        if in_bin.any():
            bins.append(ReliabilityBin(edges[i], edges[i + 1], float(said[in_bin].mean()), Score.of(right[in_bin])))
            # Weighted by pairs, so that a bin of few pairs moves the error little.
            error += float(in_bin.sum()) * abs(float(said[in_bin].mean()) - float(right[in_bin].mean()))
    return Calibration(tuple(bins), error / len(gap))


@dataclass(frozen=True)
class Debiased:
    """Scores without what a linear function of surface features explains of them."""

    scores: np.ndarray
    """[S]"""
    removed: Mapping[str, float]
    """For each feature the score that one standard deviation of it was worth."""
    share: float
    """Share of the scores' variance that was removed."""

    def lines(self) -> list[str]:
        """Returns lines that tell people what was removed from the scores."""
        each = ", ".join(f"{name} {x:+.3g}" for name, x in self.removed.items())
        return [f"removed {self.share:.1%} of the scores' variance: a standard deviation of {each}"]


def debias(scores: Sequence[float] | np.ndarray, features: Mapping[str, Sequence[float] | np.ndarray]) -> Debiased:
    """Subtract the least-squares fit of centred surface features, such as the length in tokens or how often a
    completion agrees with the user (2409.17407 fits length alone). The mean score stays.

    A feature that is really a part of the quality is removed too: compare the accuracy before and after.

    Raises:
        DataError: a feature has another number of entries, or a number is not finite.
    """
    (y,) = finite(scores)
    columns: dict[str, np.ndarray] = {}
    for name, x in features.items():
        column = np.asarray(x, np.float64)
        if column.shape != y.shape or not np.all(np.isfinite(column)):
            raise DataError(f"feature {name!r}: give one finite number for each of the {len(y)} scores")
        # A feature that does not vary explains nothing, and could not be divided by its deviation.
        if (size := float(column.std())) > 0:
            columns[name] = (column - column.mean()) / size
    if not len(y) or not columns:
        return Debiased(y.copy(), dict.fromkeys(features, 0.0), 0.0)
    design = np.stack(list(columns.values()), 1)
    # Against centred scores and centred features no constant is fitted, so the mean stays.
    weights = np.linalg.lstsq(design, y - y.mean(), rcond=None)[0]
    residual = y - design @ weights
    variance = float(y.var())
    share = 0.0 if not variance > 0 else 1 - float(residual.var()) / variance
    worth = dict(zip(columns, weights.tolist(), strict=True))
    return Debiased(residual, {name: worth.get(name, 0.0) for name in features}, max(0.0, share))


def agrees(chosen: Sequence[float] | np.ndarray, rejected: Sequence[float] | np.ndarray) -> Score:
    """The share of pairs that scores order as they were judged, with its interval; a tie counts half."""
    return Score.of(_ordered(chosen, rejected)[1])


def _ordered(
    chosen: Sequence[float] | np.ndarray, rejected: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(by how much each chosen completion leads, 1 where it does, 1/2 for a tie, else 0), float64."""
    better, worse = finite(chosen, rejected)
    gap = better - worse
    return gap, np.where(gap == 0, 0.5, (gap > 0).astype(np.float64))


def finite(*scores: Sequence[float] | np.ndarray) -> list[np.ndarray]:
    """The scores in float64; DataError where their numbers differ, or one is not finite and so orders nothing."""
    arrays = [np.asarray(x, np.float64) for x in scores]
    if len({x.shape for x in arrays}) > 1 or not all(np.isfinite(x).all() for x in arrays):
        raise DataError(f"scores of shapes {[x.shape for x in arrays]}: give a finite one for each completion")
    return arrays
