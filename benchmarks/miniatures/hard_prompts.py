"""Which prompts an estimator works on: RLOO, GRPO and MaxRL at equal update norm, on prompts from easy to nearly
hopeless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import GRPO, MAXRL, RLOO
from posttrain.toy.answers import ask, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import batch_of, credit_by_pattern, loss_of

PROMPTS, ACTIONS, G, STEPS, NORM, HARD = 64, 50, 16, 300, 0.05 * 8, 0.02
ARMS: dict[str, Algorithm] = {"RLOO": replace(RLOO, pull=None), "GRPO": replace(GRPO, pull=None), "MaxRL": MAXRL}
EXPECTED = {"RLOO": (0.844, 0.896, 0.590), "GRPO": (0.884, 0.929, 0.700), "MaxRL": (0.990, 1.000, 0.989)}
COLUMNS = ("pass@1", "pass@16", "pass@1 where p0 < .02")


def start(seed: int) -> torch.Tensor:
    """Probability of the one correct action, log-uniform in .002 ... .6, [P]."""
    return torch.as_tensor(np.exp(np.random.default_rng(seed).uniform(np.log(0.002), np.log(0.6), PROMPTS)))


def train(a: Algorithm, seed: int) -> np.ndarray:
    """Probability of the correct action before and after every step, [STEPS + 1, P]."""
    p0 = start(seed)
    logits = torch.zeros(PROMPTS, 1, ACTIONS, dtype=torch.float64)
    logits[:, 0, 0] = torch.log(p0 * (ACTIONS - 1) / (1 - p0))
    policy, made = TabularPolicy(logits), torch.Generator().manual_seed(seed)
    prompt_E = siblings(torch.arange(PROMPTS), G)
    out = [p0.numpy()]
    for _ in range(STEPS):
        answers = ask(policy, prompt_E, made)
        credit = credit_by_pattern(a, (answers.tokens_ET == 0).double().numpy().reshape(PROMPTS, G))
        batch = batch_of(a, answers, credit.ravel(), G)
        (gradient,) = torch.autograd.grad(loss_of(a, batch, policy, answers)[0], policy.table)
        with torch.no_grad():
            policy.table -= NORM * gradient / gradient.norm().clamp_min(1e-12)
            out.append(torch.softmax(policy.table[:, 0], -1)[:, 0].numpy())
    return np.array(out)


def figures_of(p: np.ndarray, hard: np.ndarray) -> dict[str, float]:
    return dict(zip(COLUMNS, (float(p.mean()), float((1 - (1 - p) ** 16).mean()), float(p[hard].mean())), strict=True))


def play(seed: int) -> Played:
    hard = start(seed).numpy() < HARD
    runs = {arm: train(a, seed) for arm, a in ARMS.items()}
    figures = {"before": figures_of(runs["RLOO"][0], hard)} | {arm: figures_of(p[-1], hard) for arm, p in runs.items()}
    every = range(0, STEPS + 1, 10)
    return Played(
        figures, {arm: Curve(list(every), [float(p[k][hard].mean()) for k in every]) for arm, p in runs.items()}
    )


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    wanted = np.array([EXPECTED[arm] for arm in ARMS])
    found = np.array([[mean[arm][c] for c in COLUMNS] for arm in ARMS])
    hard = COLUMNS[2]
    return [
        Statement(
            "pass@1 of hard prompts, on every seed: MaxRL > GRPO > RLOO",
            all(f["MaxRL"][hard] > f["GRPO"][hard] > f["RLOO"][hard] for f in each),
        ),
        Statement(
            "pass@1 and pass@16, on every seed: MaxRL > GRPO > RLOO",
            all(f["MaxRL"][c] > f["GRPO"][c] > f["RLOO"][c] for f in each for c in COLUMNS[:2]),
        ),
        Statement(
            "the survey's values F.3.3 within .05 (pass@1, pass@16) and .12 (hard prompts)",
            bool((abs(found - wanted) < [0.05, 0.05, 0.12]).all()),
        ),
    ]


MINIATURE = Miniature(
    name="hard_prompts",
    item="F.2 item 3, values F.3.3",
    claim=(
        "What divides the credit decides which prompts are worked on: dividing by the group's mean (MaxRL) weighs a"
        " prompt by about 1/p, by its standard deviation (GRPO) by about 1/sqrt(p), nothing (RLOO) not at all."
    ),
    source="MaxRL 2602.02710",
    setup=(
        "64 prompts of 50 actions, one correct, its probability at first log-uniform in .002 ... .6; a softmax of its"
        " own for each prompt; 16 siblings, 300 steps, every update scaled to the same norm .4. RLOO and GRPO without"
        " their KL."
    ),
    predicted="pass@1 of prompts with p0 < .02, and over all: MaxRL > GRPO > RLOO.",
    verdict=(
        "Holds, with the survey's values. Prompts share nothing here, so this shows the weighting and not what it costs"
        " elsewhere."
    ),
    play=play,
    judge=judge,
    picture=Picture("Weighting of hard prompts", "step", "pass@1 of prompts with p0 < .02"),
)
