"""What a miniature is: a claim, a prediction, a way to play it on a seed, and the statements its figures must make
true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Figures = Mapping[str, Mapping[str, float]]
"""arm -> name of the figure -> number."""


@dataclass(frozen=True)
class Curve:
    """One line of the picture."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Played:
    """One seed's outcome."""

    figures: Figures
    curves: Mapping[str, Curve]


@dataclass(frozen=True)
class Picture:
    """Axes of the picture; `log_x` and `log_y` where the scale is logarithmic."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Statement:
    """One thing the figures say, and whether they do."""

    text: str
    true: bool


@dataclass(frozen=True)
class Miniature:
    """One published effect."""

    name: str
    item: str
    """Where it stands in the survey of papers: the item of its table F.2, and of F.3 where values are given."""
    claim: str
    source: str
    setup: str
    predicted: str
    """The sign, written down before anything was measured."""
    verdict: str
    """What was found, in words: holds, holds in part, or does not hold, and why."""
    play: Callable[[int], Played]
    judge: Callable[[Figures, Sequence[Figures]], list[Statement]]
    """Statements about the mean over seeds, and about each seed."""
    picture: Picture
    digits: int = 3
    notes: Sequence[str] = field(default_factory=tuple)
    seeds: Sequence[int] = (0, 1, 2)
    """Fixed beforehand; more than three where the effect is small against the noise between seeds."""


def mean(each: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """The mean of every figure over seeds."""
    return {arm: {name: float(np.mean([f[arm][name] for f in each])) for name in each[0][arm]} for arm in each[0]}


T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at .975, for 1, 2, ... 15 degrees of freedom."""


def interval(x: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds (Student's t). The whole line where there is one seed."""
    if len(x) < 2:
        return float("-inf"), float("inf")
    half = T975[min(len(x) - 1, len(T975)) - 1] * float(np.std(x, ddof=1)) / len(x) ** 0.5
    return float(np.mean(x)) - half, float(np.mean(x)) + half


def gains(each: Sequence[Figures], figure: str, arm: str, other: str) -> list[float]:
    """How far one arm's figure lies above another's, seed by seed."""
    return [f[arm][figure] - f[other][figure] for f in each]


def mean_curves(each: Sequence[Played]) -> dict[str, Curve]:
    """The mean of every curve over seeds; curves of one arm share their x."""
    return {
        arm: Curve(list(each[0].curves[arm].x), [float(y) for y in np.mean([p.curves[arm].y for p in each], axis=0)])
        for arm in each[0].curves
    }


def first_at_least(x: Sequence[float], y: Sequence[float], target: float) -> float:
    """The first x whose y reaches the target; infinity where none does."""
    return next((float(a) for a, b in zip(x, y, strict=True) if b >= target), float("inf"))
