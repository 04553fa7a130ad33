"""Where a run will end: the sigmoid of reward over compute, and its fit (ScaleRL, 2510.13786; A28).

    R(C) = start + (asymptote - start) / (1 + (middle / C)^exponent)

The asymptote says what a recipe can reach, exponent and middle how soon. A fit over the first part of a run says little
about the asymptote before the curve has bent: look at `Fit.bent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain.core.errors import DataError

Array = NDArray[np.float64]
ROUNDS, SIDE = 40, 15
"""The search grid is laid this often, with this many places on a side; each time 0.7 times as wide, around the best
place."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Reward over compute, in any unit of compute."""

    start: float
    """Reward without compute."""
    asymptote: float
    """Reward without end."""
    middle: float
    """Compute at which half the way is made."""
    exponent: float
    """How steeply, on a logarithmic axis of compute."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The curve of least squares, with how well it fits."""

    curve: Curve
    residual: float
    """Root mean square of reward less curve."""
    bent: bool
    """Whether the last point lies past the middle; before that the asymptote is a guess."""


def reward_at(compute: float, curve: Curve) -> float:
    """Expected reward after `compute`.

    >>> curve = Curve(start=.2, asymptote=.6, middle=100, exponent=1)
    >>> round(reward_at(100, curve), 12), round(reward_at(300, curve), 12)
    (0.4, 0.5)
    """
    if compute <= 0:
        return curve.start
    ahead = curve.exponent * (math.log(curve.middle) - math.log(compute))
    return curve.start + (curve.asymptote - curve.start) / (1 + math.exp(min(ahead, 700.0)))


def fit(compute: Sequence[float] | Array, reward: Sequence[float] | Array, *, start: float | None = None) -> Fit:
    """The curve closest to measured points, in least squares.

    For each middle and exponent the other two numbers are a linear regression, so only two are searched: on a grid over
    the logarithms of both, laid again and again around its best place.

    Args:
        compute: positive, at least 4 points (3 with `start`); leave the first unsteady part of a run out.
        start: reward without compute, where it is known.

    Raises:
        DataError: too few points, or compute that is not positive.
    """
    c, r = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    need = 4 if start is None else 3
    if c.shape != r.shape or c.ndim != 1 or len(c) < need or np.any(c <= 0) or not np.all(np.isfinite(r)):
        raise DataError(
            f"fit: {len(c)} points of compute for {len(r)} rewards; at least {need} with compute > 0 are needed"
        )
    center = np.array([np.log(c).mean(), 0.0])
    width = np.array([max(np.ptp(np.log(c)), 1.0) * 1.5, 2.5])
    best: tuple[float, float, float] = (np.inf, 0.0, 0.0)
    for _ in range(ROUNDS):
        middles, exponents = (x + w * np.linspace(-1, 1, SIDE) for x, w in zip(center, width, strict=True))
        m, e = (x.ravel() for x in np.meshgrid(middles, exponents, indexing="ij"))
        share = 1 / (1 + np.exp(-np.exp(e)[:, None] * (np.log(c) - m[:, None])))
        error, low, rise = _regress(share, r, start)
        at = int(np.argmin(error))
        if error[at] < best[0]:
            best = (float(error[at]), float(low[at]), float(rise[at]))
            center = np.array([m[at], e[at]])
        width *= 0.7
    curve = Curve(
        start=best[1], asymptote=best[1] + best[2], middle=float(np.exp(center[0])), exponent=float(np.exp(center[1]))
    )
    return Fit(curve=curve, residual=float(np.sqrt(best[0] / len(c))), bent=bool(c.max() > curve.middle))


def _regress(share: Array, r: Array, start: float | None) -> tuple[Array, Array, Array]:
    """Least squares of r = low + rise * share for every row of `share` [K, n]: (squared error, low, rise), each [K]."""
    if start is None:
        mean = share.mean(1, keepdims=True)
        spread = ((share - mean) ** 2).sum(1)
        rise = ((share - mean) * (r - r.mean())).sum(1) / np.maximum(spread, 1e-300)
        low = r.mean() - rise * mean[:, 0]
    else:
        rise = (share * (r - start)).sum(1) / np.maximum((share**2).sum(1), 1e-300)
        low = np.full(len(share), start)
    return ((low[:, None] + rise[:, None] * share - r) ** 2).sum(1), low, rise
