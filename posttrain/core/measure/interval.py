"""Means and gains with their 95 % intervals. Prompts are the units, because samples of one prompt correlate."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.gauge import Gauge
from posttrain.core.measure.number_text import number_text

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution: 95 % lie between -Z95 and Z95."""


def interval(mean: float, low: float, high: float, sign: str = "") -> str:
    """A mean with its interval as text. It is `-` if nothing was judged.

    Ends that are not finite are told as `[one prompt]`, the usual reason why there is no interval.

    >>> interval(0.5, 0.25, 0.75), interval(0.5, -math.inf, math.inf), interval(math.nan, math.nan, math.nan)
    ('0.500 [0.250, 0.750]', '0.500 [one prompt]', '-')
    """
    if math.isnan(mean):
        return "-"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{number_text(mean, f'{sign}.3f')} [one prompt]"
    middle, *ends = (number_text(x, f"{sign}.3f", (high - low) / 2) for x in (mean, low, high))
    return f"{middle} [{', '.join(ends)}]"


def student95(freedom: float) -> float:
    """The 97.5 % point of Student's t: exact for 1 to 4 degrees of freedom, up to 20 % too large between these numbers.
    Above 4 it is Cornish and Fisher's expansion, with an error below 0.3 %.

    >>> round(student95(2), 3), round(student95(9), 3)
    (4.303, 2.262)
    """
    # Up to 4 degrees of freedom the expansion is too far off, so a table is read. Between its entries
    # the value is linear in 1/n. t is convex in 1/n, so this value is never too small.
    exact = (12.7062, 4.3027, 3.1824, 2.7764)
    if freedom <= len(exact):
        return float(np.interp(1 / max(freedom, 1.0), [1 / n for n in range(len(exact), 0, -1)], exact[::-1]))
    # t = z + g1 / n + g2 / n^2 + g3 / n^3, each g a polynomial in z.
    z, n = Z95, freedom
    fifth, seventh = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / (4 * n) + fifth / (96 * n**2) + seventh / (384 * n**3)


@dataclass(frozen=True)
class Score:
    """A mean over prompts with its 95 % interval, whose ends are infinite where there is none.

    Samples of one prompt are not independent. So each prompt counts once, with the mean of its samples.
    """

    mean: float
    low: float
    high: float
    prompts: int

    @staticmethod
    def of(per_prompt: Sequence[float] | np.ndarray, low: float = 0.0, high: float = 1.0) -> Score:
        """The score of one value per prompt, on a scale from `low` to `high`.

        If every value is an end of the scale, the mean is a proportion and the interval is Wilson's. Else z^2/2
        pseudo-observations are added at each end of the scale, as Agresti and Coull do for proportions, so that it is
        no point if all prompts agree. It is the normal interval of all these values, cut to the scale. One value has
        none, and values on a scale without width (`high` not above `low`) have none.

        >>> str(Score.of([1.0] * 20)), str(Score.of([0.5] * 20)), str(Score.of([0.0, 0.25] * 10))
        ('1.000 [0.839, 1.000]', '0.500 [0.419, 0.581]', '0.125 [0.077, 0.293]')
        """
        x = np.asarray(per_prompt, np.float64)
        if not len(x):
            return Score(math.nan, math.nan, math.nan, 0)
        mean, n = float(x.mean()), len(x)
        if n == 1 or not high > low:
            return Score(mean, -math.inf, math.inf, n)
        # y in [0, 1]. p = (sum y + z^2 / 2) / (n + z^2) is the centre of both intervals.
        y, square = (x - low) / (high - low), Z95**2
        p = (float(y.sum()) + square / 2) / (n + square)
        if np.all((y == 0) | (y == 1)):
            share = float(y.mean())
            half = Z95 * math.sqrt(n * share * (1 - share) + square / 4) / (n + square)
        else:
            # Sum of squares about p: of the values, and of z^2 / 2 imagined values at each end (0 and 1).
            # For values of 0 and 1 alone this is the interval of Agresti and Coull.
            squares = float(np.square(y - p).sum()) + square / 2 * (p * p + (1 - p) ** 2)
            half = Z95 * math.sqrt(squares) / (n + square)
        # p lies nearer to the middle than the mean, which may lie outside the interval around p: then it is widened.
        bottom, top = (low + (high - low) * min(max(e, 0.0), 1.0) for e in (p - half, p + half))
        return Score(mean, min(bottom, mean), max(top, mean), n)

    @staticmethod
    def free(values: Sequence[float] | np.ndarray) -> Score:
        """The score of values on a scale without ends, such as losses: the mean with Student's interval. It is a point
        if all values are equal. One value has no interval."""
        x = np.asarray(values, np.float64)
        if not len(x):
            return Score(math.nan, math.nan, math.nan, 0)
        half = student95(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf
        return Score(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))

    @property
    def known(self) -> tuple[float, float, float] | None:
        """Mean and interval as plain numbers; None if nothing was judged."""
        return None if math.isnan(self.mean) else (self.mean, self.low, self.high)

    def gauge(self) -> Gauge:
        return Gauge(self.mean * self.prompts, self.prompts) if self.prompts else Gauge(0.0, 0)

    def __str__(self) -> str:
        return interval(self.mean, self.low, self.high)


def _both(before: Mapping[Hashable, float], after: Mapping[Hashable, float]) -> tuple[np.ndarray, np.ndarray]:
    """The values of the prompts that are in both. They are paired: the difficulty of a prompt cancels."""
    both = [k for k in before if k in after]
    return np.array([before[k] for k in both], np.float64), np.array([after[k] for k in both], np.float64)


@dataclass(frozen=True)
class Gain:
    """The mean difference of two measurements of the same prompts, with its 95 % interval.

    Each prompt is compared with itself, so differences between prompts do not widen the interval. It is valid for
    prompts like these and for these two policies, and says nothing about training with another seed.
    """

    before: float
    """Mean of the first measurement, over the prompts that both measured."""
    after: float
    low: float
    high: float
    prompts: int
    better: int
    """Prompts whose value rose."""
    worse: int

    @property
    def mean(self) -> float:
        return self.after - self.before

    @staticmethod
    def of(before: Mapping[Hashable, float], after: Mapping[Hashable, float], scale: float = 1.0) -> Gain:
        """The gain over the prompts that are in both; each maps a prompt to the mean of its samples.

        One imagined prompt is added at each end, as Agresti and Min (2005) add pairs to the table of two
        proportions. The interval is the normal one of all these values, cut to the scale, so it is never a point.

        Args:
            scale: width of the scale that the values are on. Differences are in [-scale, scale].

        >>> g = Gain.of({i: 0.25 for i in range(40)}, {i: 0.25 + i % 2 / 2 for i in range(40)})
        >>> print(g, g.better, g.worse)
        +0.250 [+0.138, +0.338] 20 0
        """
        # Paired: the variance is that of the differences, in which the difficulty of a prompt cancels.
        x, y = _both(before, after)
        n, d = len(x), (y - x) / scale
        low, high = -math.inf, math.inf
        if n > 1:
            # Two imagined prompts are added, with the differences -1 and +1 (`d` is in units of `scale`).
            middle = float(d.sum()) / (n + 2)
            squares = float(np.square(d - middle).sum()) + (1 - middle) ** 2 + (1 + middle) ** 2
            half = Z95 * math.sqrt(squares) / (n + 2)
            mean = float(d.mean())
            low, high = (scale * min(max(e, -1.0), 1.0) for e in (min(middle - half, mean), max(middle + half, mean)))
        return Gain._of(x, y, d, low, high)

    @staticmethod
    def free(before: Mapping[Hashable, float], after: Mapping[Hashable, float]) -> Gain:
        """The gain of values on a scale without ends, by Student's interval of the differences.

        >>> print(Gain.free({i: 2.0 + i for i in range(9)}, {i: 1.9 + i - i % 2 / 10 for i in range(9)}))
        -0.144 [-0.185, -0.104]
        """
        x, y = _both(before, after)
        difference = Score.free(y - x)
        return Gain._of(x, y, y - x, difference.low, difference.high)

    @staticmethod
    def _of(x: np.ndarray, y: np.ndarray, d: np.ndarray, low: float, high: float) -> Gain:
        """The gain from `x` to `y` by prompt. `d`: the differences in units of their scale."""
        if not len(x):
            return Gain(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
        # Sums of the same outcomes in another order may differ by rounding: such a prompt is neither better nor worse.
        better, worse = (int((sign * d > 1e-12).sum()) for sign in (1, -1))
        return Gain(float(x.mean()), float(y.mean()), low, high, len(x), better, worse)

    def __str__(self) -> str:
        if not self.prompts:
            return "-"
        return interval(self.mean, self.low, self.high, "+")

    @property
    def means(self) -> str:
        """The mean before and after, as text."""
        half = (self.high - self.low) / 2 if math.isfinite(self.high - self.low) else None
        return " -> ".join(number_text(x, size=half) for x in (self.before, self.after))
