"""Best of n: of n samples the one with the highest score is taken. Its distribution, its divergence, and estimates.

Axis letters: R all answers of a policy, N samples.

>>> [round(best_of_kl_bound(n), 6) for n in (4, 16, 64)]
[0.636294, 1.835089, 3.174508]
>>> round(best_of_mean(np.arange(1, 100) / 100, 4), 6)  # uniforms at their mean ranks: n / (n + 1)
0.8
"""

from __future__ import annotations

import math

import numpy as np

from posttrain.system.errors import ConfigError


def best_of_kl_bound(n: int) -> float:
    """The most that KL(best of n || policy) can be: log n - (n - 1) / n. It is reached where no two scores are equal
    and every answer is rare (2401.01879)."""
    _at_least_one(n)
    return math.log(n) - (n - 1) / n


def best_of_probabilities(p_R: np.ndarray, score_R: np.ndarray, n: int) -> np.ndarray:
    """The probability [R] of each answer as the best of n samples. Of equal scores the first sample is taken.

    Answers with one score are taken in proportion to their probabilities. All answers of a score have together the
    probability that the best of n has it: F(score)^n - F(below)^n, with F the share of answers up to a score.

    >>> best_of_probabilities(np.array([0.5, 0.5]), np.array([0.0, 1.0]), 2).tolist()
    [0.25, 0.75]
    """
    _at_least_one(n)
    _, level_R = np.unique(score_R, return_inverse=True)
    of_level = np.bincount(level_R, weights=p_R)
    upto = np.minimum(np.cumsum(of_level) / of_level.sum(), 1.0)
    best = np.diff(upto**n, prepend=0.0)
    return p_R * np.divide(best, of_level, out=np.zeros_like(best), where=of_level > 0)[level_R]


def best_of_mean(score_N: np.ndarray, n: int, worth_N: np.ndarray | None = None) -> float:
    """What the best of n is worth in the mean, estimated from N >= n samples without bias.

    Of all choices of n among the N samples, the i-th smallest score is the best in C(i - 1, n - 1) of C(N, n). So the
    estimate is the mean over all these choices, and its variance is smaller than that of one choice.

    Args:
        score_N: the score by which the best is chosen.
        worth_N: what a sample is worth, such as its true value where the score is a proxy. None: its score. Samples
            with one score share their mean worth, as if ties were broken at random.
    """
    _at_least_one(n)
    count = len(score_N)
    if n > count:
        raise ConfigError(f"the best of {n} cannot be estimated from {count} samples: draw at least {n}")
    order = np.argsort(score_N, kind="stable")
    share_N = np.zeros(count)
    share = n / count  # of the largest: C(N - 1, n - 1) / C(N, n)
    for i in range(count, n - 1, -1):
        share_N[i - 1] = share
        share *= (i - n) / (i - 1) if i > 1 else 0.0
    _, level_N = np.unique(score_N[order], return_inverse=True)
    worth = (score_N if worth_N is None else worth_N)[order].astype(np.float64)
    of_level = np.bincount(level_N, weights=worth) / np.bincount(level_N)
    return float(share_N @ of_level[level_N])


def _at_least_one(n: int) -> None:
    if n < 1:
        raise ConfigError(f"best of {n}: take the best of at least 1 sample")
