"""Lengths of answers: a lognormal with a mean and a spread, cut at the longest that is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from posttrain.system.errors import ConfigError

POINTS = 512
"""Number of quantiles over which means are taken."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers.

    >>> Lengths(prompt=100, mean=500, most=500).longest(8)
    500.0
    >>> round(Lengths(prompt=100, mean=1, cv=1, most=10**9).longest(8), 1)
    2.7
    """

    prompt: int
    mean: float
    """Mean length of answers, before they are cut."""
    most: int
    """`sampling.max_tokens`: an answer ends there at the latest."""
    cv: float = 0.0
    """Standard deviation of an answer's length, as a share of the mean. 0: all answers have the mean length."""

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("mean", 1), ("most", 1), ("cv", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"lengths: {name}={getattr(self, name):g} must be at least {least}")

    def quantile(self, share: float) -> float:
        """The length that this share of answers does not exceed."""
        if not self.cv:
            return min(self.mean, self.most)
        # A lognormal of mean m and standard deviation cv m: sigma^2 = log(1 + cv^2), mu = log m - sigma^2 / 2. Its
        # quantile is exp(mu + z sigma).
        variance = math.log1p(self.cv * self.cv)
        z = NormalDist().inv_cdf(share)
        return min(self.mean * math.exp(z * math.sqrt(variance) - variance / 2), self.most)

    def longest(self, count: int) -> float:
        """The expected length of the longest of `count` answers."""
        return self.answer if not self.cv or count <= 1 else _longest(self, count)

    @cached_property
    def answer(self) -> float:
        """The mean length of answers after they are cut."""
        # The mean over quantiles in the middle of equal shares, since a lognormal that is cut has no closed form that
        # is simpler. At 0 and 1 a quantile does not exist.
        return math.fsum(self.quantile((i + 0.5) / POINTS) for i in range(POINTS)) / POINTS


@lru_cache(maxsize=4096)
def _longest(lengths: Lengths, count: int) -> float:
    """`Lengths.longest` for answers of different lengths."""
    # The largest of n uniform random numbers is distributed as u^(1/n), with one uniform number u. For many answers it
    # rounds to 1, where the quantile is infinite.
    at = ((i + 0.5) / POINTS for i in range(POINTS))
    return math.fsum(lengths.quantile(min(u ** (1 / count), 1 - 1e-12)) for u in at) / POINTS
