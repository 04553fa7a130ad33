"""Variance of the policy gradient under four baselines, at an equal number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import EMA, REINFORCE, RLOO
from posttrain.toy.answers import ask, groups_of, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import batch_of, loss_of

SAMPLES, PROMPTS, ACTIONS, DRAWS, WARM = 64, 64, 10, 60, 3
OTHERS = replace(RLOO, pull=None)
ARMS: dict[str, tuple[Algorithm, int]] = {
    "RLOO(4)": (OTHERS, 4),
    "RLOO(2)": (OTHERS, 2),
    "EMA": (EMA, 1),
    "none": (REINFORCE, 1),
}
SPREADS = {"prompts differ": 1.0, "prompts alike": 0.0}
WITHIN, MEAN = 0.5, 1.5


def gradients(a: Algorithm, g: int, policy: TabularPolicy, reward_PV: np.ndarray, seed: int) -> np.ndarray:
    """[DRAWS, P * V]: gradients of 64 samples each, 64 / g prompts drawn anew; the moving baseline is warmed up
    first."""
    made = torch.Generator().manual_seed(seed)
    ema, out = 0.0, []
    for _ in range(WARM + DRAWS):
        prompt_E = siblings(torch.randint(PROMPTS, (SAMPLES // g,), generator=made), g)
        answers = ask(policy, prompt_E, made)
        rewards_PG = reward_PV[prompt_E.numpy(), answers.tokens_ET[:, 0].numpy()].reshape(-1, g)
        credit = credit_step(a, groups_of(answers, rewards_PG), max_tokens=1, ema=ema)
        ema = credit.ema
        flat = np.array([e.advantage[0][0] for group in credit.groups for e in group.episodes])
        loss, _ = loss_of(a, batch_of(a, answers, flat, g), policy, answers)
        out.append(-torch.autograd.grad(loss, policy.table)[0].ravel().numpy())
    return np.array(out[WARM:])


def play(seed: int) -> Played:
    """A random softmax for each prompt; the reward is 1.5 plus the prompt's own level plus N(0, .5) for each action."""
    rng = np.random.default_rng(seed)
    policy = TabularPolicy(torch.as_tensor(rng.normal(size=(PROMPTS, 1, ACTIONS))))
    level_P, quality_PV = rng.normal(size=(PROMPTS, 1)), rng.normal(size=(PROMPTS, ACTIONS)) * WITHIN
    figures: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
    for world, spread in SPREADS.items():
        for arm, (a, g) in ARMS.items():
            x = gradients(a, g, policy, MEAN + spread * level_P + quality_PV, seed)
            figures[arm] |= {f"variance, {world}": float(x.var(0, ddof=1).sum())}
    curves = {w: Curve(range(1, 5), [figures[arm][f"variance, {w}"] for arm in ARMS]) for w in SPREADS}
    return Played(figures, curves)


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    differ, alike = ({arm: [f[arm][f"variance, {w}"] for f in each] for arm in ARMS} for w in SPREADS)

    def rising(v: dict[str, list[float]], *arms: str) -> bool:
        return all(np.all(np.diff(row) > 0) for row in zip(*(v[arm] for arm in arms), strict=True))

    return [
        Statement(
            "prompts differ, on every seed: RLOO(4) < RLOO(2) < EMA < none",
            rising(differ, "RLOO(4)", "RLOO(2)", "EMA", "none"),
        ),
        Statement(
            "prompts alike, on every seed: EMA < RLOO(4) < RLOO(2) < none",
            rising(alike, "EMA", "RLOO(4)", "RLOO(2)", "none"),
        ),
    ]


MINIATURE = Miniature(
    name="variance",
    item="F.2 item 8",
    claim=(
        "Siblings of the same prompt are a better baseline than a moving average over prompts, and more siblings a"
        " better one."
    ),
    source="RLOO 2402.14740",
    setup=(
        "Total variance (trace of the covariance) of the gradient of 64 samples: 16 prompts x 4, 32 x 2, or 64 x 1,"
        " drawn anew 60 times. 64 prompts of 10 actions; a reward is 1.5 + N(0, 1) for the prompt + N(0, .5) for the"
        " action. A second world has no prompt term."
    ),
    predicted=(
        "Prompts differ: RLOO(4) < RLOO(2) < EMA < none. Prompts alike: a sibling's reward tells nothing about the"
        " prompt that the moving average does not know, so EMA < RLOO(4) (4/3 of the reward's variance) < RLOO(2)"
        " (twice) < none."
    ),
    verdict="Holds where prompts differ more than the answers to one of them.",
    play=play,
    judge=judge,
    picture=Picture(
        "Gradient variance of baselines",
        "1: RLOO(4), 2: RLOO(2), 3: EMA, 4: none",
        "variance of the gradient",
        log_y=True,
    ),
    digits=4,
)
