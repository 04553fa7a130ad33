"""Published effects, small enough to rerun on every change, through the library's own credit and weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import DAPO, DR_GRPO, GRPO
from posttrain.toy.episodes import rewarded

CAP, PROMPTS, SIBLINGS, STEPS = 200, 16, 8, 400


@cache
def credit_by_pattern(a: Algorithm) -> np.ndarray:
    """Credit of every pattern of 8 outcomes, [256, 8]: a group's outcomes as bits name its row."""
    patterns = [[float(k >> i & 1) for i in range(SIBLINGS)] for k in range(2**SIBLINGS)]
    credit = credit_step(a, rewarded(*patterns), max_tokens=CAP, ema=0.0)
    return np.array([[e.advantage[0][0] for e in g.episodes] for g in credit.groups])


def lengths_after_training(a: Algorithm, seed: int, lr: float) -> np.ndarray:
    """Mean length of (wrong, correct) answers over the first and the last 20 steps, [2, 2].

    The outcome is a fair coin, so nothing can be learned about it. A wrong answer stops at each token with probability
    sigmoid(theta_0), a correct one with sigmoid(theta_1), both .05 at first, and is cut at 200. The gradient of log pi
    in its theta is 1[it stopped] * (1 - p) - (tokens that went on) * p, times the weight of each of its tokens.
    """
    rng = np.random.default_rng(seed)
    table = credit_by_pattern(a)
    theta = np.full(2, np.log(0.05 / 0.95))
    group = np.repeat(np.arange(PROMPTS), SIBLINGS)
    seen: list[list[float]] = []
    for _ in range(STEPS):
        correct = rng.integers(0, 2, (PROMPTS, SIBLINGS))
        p = (1 / (1 + np.exp(-theta)))[correct].ravel()
        drawn = rng.geometric(p)
        length = np.minimum(drawn, CAP)
        score = np.where(drawn < CAP, (1 - p) - (length - 1) * p, -length * p)
        advantage = table[correct @ (1 << np.arange(SIBLINGS))].ravel()
        step = weigh(a.aggregate, length.tolist(), group.tolist(), CAP) * advantage * score
        which = correct.ravel()
        seen.append([float(length[which == c].mean()) for c in (0, 1)])
        theta = theta + lr * np.array([step[which == c].sum() for c in (0, 1)])
    steps = np.array(seen)
    return np.stack([steps[:20].mean(0), steps[-20:].mean(0)])


def growth(a: Algorithm, lr: float) -> np.ndarray:
    """Last over first mean length of (wrong, correct), mean lengths taken over 3 seeds."""
    first, last = np.mean([lengths_after_training(a, seed, lr) for seed in range(3)], axis=0)
    return last / first


def test_length_bias_of_the_three_aggregations() -> None:
    """F.3.1: dividing by each answer's length makes wrong answers long (>= 3x) and correct ones short although nothing
    can be learned; a constant normaliser leaves both alone (+-15 %); a token mean per prompt lies between."""
    grpo, constant, tokens = growth(GRPO, 0.5), growth(DR_GRPO, 2.0), growth(DAPO, 0.5)
    assert grpo[0] >= 3 and grpo[1] < 0.5
    assert constant == pytest.approx([1, 1], abs=0.15)
    assert constant[0] < tokens[0] < grpo[0] and grpo[1] < tokens[1] < constant[1]
