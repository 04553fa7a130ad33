"""A score for each step, or one for the answer: which of n answers is chosen where errors are early, and where late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.core.measure.answer_steps import Aggregate, aggregated

STEPS, ANSWERS, PROMPTS, NOISE, FLOOR = 8, 8, 4000, 0.5, 1e-3
WORLDS = {"early": (0, 1), "late": (STEPS - 2, STEPS - 1)}
"""The steps that go wrong, each with the chance `WRONG`."""
WRONG = 0.6
ARMS: dict[str, Aggregate] = {"outcome": "last", "mean": "mean", "product": "product", "minimum": "min"}


def values(hard: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """[PROMPTS, ANSWERS, STEPS]: the true chance of success after each step."""
    wrong_L = np.zeros(STEPS)
    wrong_L[list(hard)] = WRONG
    erred = np.cumsum(rng.random((PROMPTS, ANSWERS, STEPS)) < wrong_L, 2) > 0
    left_L = np.append(np.cumprod((1 - wrong_L)[::-1])[::-1][1:], 1.0)
    return np.where(erred, 0.0, left_L)


def chosen_right(scores: np.ndarray, true: np.ndarray, arm: str) -> float:
    """Share of prompts whose answer with the highest score is right."""
    kept = np.clip(scores, FLOOR, 1.0) if arm == "product" else scores
    whole = np.array([[aggregated(row.tolist(), ARMS[arm]) for row in prompt] for prompt in kept])
    best = np.argmax(whole, 1)
    return float(np.mean(true[np.arange(PROMPTS), best, -1] > 0))


def play(seed: int) -> Played:
    """The same answers for every arm; the noise of a step is its own, or all steps of an answer share one."""
    figures: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
    curves: dict[str, Curve] = {}
    for world, hard in WORLDS.items():
        rng = np.random.default_rng([seed, hard[0]])
        true = values(hard, rng)
        own = rng.normal(0, NOISE, true.shape)
        for noise, kind in ((own, ""), (np.broadcast_to(own[..., -1:], own.shape), ", one noise")):
            for arm in ARMS:
                figures[arm][f"{world}{kind}"] = chosen_right(true + noise, true, arm)
        curves[world] = Curve(range(1, 1 + len(ARMS)), [figures[arm][world] for arm in ARMS])
    return Played(figures, curves)


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    def above(arm: str, world: str) -> list[float]:
        return [f[arm][world] - f["outcome"][world] for f in each]

    process = [arm for arm in ARMS if arm != "outcome"]
    return [
        Statement(
            "early, on every seed: mean, product and minimum above the outcome score, the mean by at least .05",
            all(x > 0 for arm in process for x in above(arm, "early")) and min(above("mean", "early")) >= 0.05,
        ),
        Statement(
            "late, on every seed: none of the three above the outcome score by more than .01",
            all(x <= 0.01 for arm in process for x in above(arm, "late")),
        ),
        Statement("late, on every seed: the minimum below it by at least .02", max(above("minimum", "late")) <= -0.02),
        Statement(
            "one noise for all steps, on every seed: the mean is not above the outcome score, early or late",
            all(x <= 0 for world in WORLDS for x in above("mean", f"{world}, one noise")),
        ),
    ]


MINIATURE = Miniature(
    name="step_scores",
    item="C06",
    claim="A process reward model beats an outcome reward model at equal n where errors are early, not where late.",
    source="Math-Shepherd 2312.08935; issue 14",
    setup=(
        "Chains of 8 steps that nothing mends. Early: each of the first two steps goes wrong six times in ten;"
        " late: each of the last two. A score is the exact chance of success after a step plus N(0, .5). Of 8"
        " answers the one with the highest score is chosen: that of the whole answer (outcome), or its steps' by"
        " mean, product or minimum. 4000 prompts a seed."
    ),
    predicted=(
        "Early: all three above the outcome score, the mean by .05 or more. Late: none above it by more than .01,"
        " and the minimum below it by .02 or more. With one noise for all steps of an answer the mean is nowhere"
        " above."
    ),
    verdict=(
        "Holds in both halves. Where errors are late the process scores are far worse: they prefer answers that looked"
        " well before the hard step."
    ),
    play=play,
    judge=judge,
    picture=Picture(
        "A score for each step or for the answer",
        "1: outcome, 2: mean, 3: product, 4: minimum",
        "chosen answers that are right",
    ),
    seeds=(0, 1, 2, 3, 4),
)
