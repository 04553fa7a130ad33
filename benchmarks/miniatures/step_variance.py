"""The variance of credit by steps beside that of one reward for the whole answer, by the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement

LENGTHS = (1, 2, 4, 8, 16, 32)
GROUPS, SIBLINGS, RIGHT, NOISE, SUCCESS = 6000, 8, 0.7, 0.5, 0.5


def without_own(x: np.ndarray) -> np.ndarray:
    """[G, K, ...]: each answer's number less the mean of its siblings'."""
    return x - (x.sum(1, keepdims=True) - x) / (SIBLINGS - 1)


def formula(steps: int, noise: float = 0.0) -> float:
    """The ratio of variances where the reward is a sum over steps."""
    p, k = RIGHT, SIBLINGS
    spread = p * (1 - p)
    own = spread * (1 - 2 * p) ** 2 + spread**2 / (k - 1)
    other = spread**2 * k / (k - 1)
    return (own + noise**2 * spread * k / (k - 1)) / (own + (steps - 1) * other)


def summed(steps: int, rng: np.random.Generator) -> tuple[float, float]:
    """(step / outcome, noisy step / outcome): variances of a step's gradient where the reward is a sum over steps."""
    right = (rng.random((GROUPS, SIBLINGS, steps)) < RIGHT).astype(float)
    score = right - RIGHT
    whole = without_own(right.sum(2))[..., None] * score
    noisy = right + rng.normal(0, NOISE, right.shape)
    own, with_noise = without_own(right) * score, without_own(noisy) * score
    of = whole.var((0, 1)).mean()
    return float(own.var((0, 1)).mean() / of), float(with_noise.var((0, 1)).mean() / of)


def chained(steps: int, rng: np.random.Generator) -> float:
    """The same where an answer is right only if all of its steps are, with the exact values on both sides."""
    p = SUCCESS ** (1 / steps)
    right = rng.random((GROUPS * SIBLINGS, steps)) < p
    alive = np.cumprod(right, 1)
    left = p ** np.arange(steps - 1, -1, -1)
    gained = np.diff(alive * left, axis=1, prepend=SUCCESS)
    score = right - p
    whole = (alive[:, -1:] - SUCCESS) * score
    return float((gained * score).var(0).mean() / whole.var(0).mean())


def play(seed: int) -> Played:
    figures: dict[str, dict[str, float]] = {"sum": {}, "sum, noisy scores": {}, "chain": {}}
    for steps in LENGTHS:
        rng = np.random.default_rng([seed, steps])
        own, noisy = summed(steps, rng)
        found = {"sum": own, "sum, noisy scores": noisy}
        if steps > 1:  # with one step both are the same number for every answer
            found["chain"] = chained(steps, rng)
        for arm, ratio in found.items():
            figures[arm][f"L = {steps}"] = ratio
    curves = {arm: Curve(LENGTHS[-len(found) :], list(found.values())) for arm, found in figures.items()}
    curves["1 / L"] = Curve(LENGTHS, [1 / n for n in LENGTHS])
    return Played(figures, curves)


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    def at(arm: str, steps: int) -> list[float]:
        return [f[arm][f"L = {steps}"] for f in each]

    longer = [n for n in LENGTHS if n > 1]
    return [
        Statement(
            "sum, on every seed: each ratio within a tenth of the formula",
            all(abs(x / formula(n) - 1) <= 0.1 for n in LENGTHS for x in at("sum", n)),
        ),
        Statement(
            "sum, on every seed: L times the ratio lies in .7 to 1 from L = 2 on",
            all(0.7 <= n * x <= 1 for n in longer for x in at("sum", n)),
        ),
        Statement(
            "noisy scores, on every seed: above 1 at L = 2, below .3 at L = 8",
            min(at("sum, noisy scores", 2)) > 1 and max(at("sum, noisy scores", 8)) < 0.3,
        ),
        Statement(
            "chain, on every seed: nowhere below .8, larger for each larger L, and in 1.2 to 1.7 at L = 32",
            all(0.8 <= a < b for n, m in pairwise(longer) for a, b in zip(at("chain", n), at("chain", m), strict=True))
            and all(1.2 <= x <= 1.7 for x in at("chain", 32)),
        ),
    ]


MINIATURE = Miniature(
    name="step_variance",
    item="C06",
    claim="Credit by steps has 1/L of the variance of one reward for an answer of L steps.",
    source="issue 14",
    setup=(
        "The variance of the gradient of a step's logit for one answer, mean over steps, with credit by steps over that"
        " with the outcome. Sum: the reward is how many of L independent steps are right, each with .7; credit is"
        " against 7 siblings; noisy scores have N(0, .5) of their own. Chain: right only if all L steps are, with"
        " success .5, and exact values (progress against the outcome less .5). 6000 groups of 8 a seed."
    ),
    predicted=(
        "Sum: .0399 / (.0399 + .0504 (L - 1)), which is .79 / L to .89 / L. Noisy scores: above 1 at L = 2, below .3 at"
        " L = 8. Chain: no fall, toward 1.44."
    ),
    verdict=(
        "Holds where the reward is a sum over steps, by the formula. In a chain of which one wrong step loses all, step"
        " credit has more variance than the outcome from L = 4 on, although its mean is the same. One part of the"
        " prediction was wrong: at L = 2 the chain's ratio is .85, not .9 or more."
    ),
    play=play,
    judge=judge,
    picture=Picture("Variance of step credit over that of the outcome", "steps L", "ratio", log_x=True, log_y=True),
    seeds=(0, 1, 2, 3, 4),
)
