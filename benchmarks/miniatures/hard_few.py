"""Few prompts of which half are hard, many siblings: how fast each credit fits them, and what that costs elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.miniatures.few_prompts import ARMS, K, TRAINED, WORLD
from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement, gains, interval
from benchmarks.miniatures.world import Trainer, ask, credit_by_pattern, siblings
from posttrain.core.algorithm import Algorithm

G, STEPS, LR, EASY = 64, 100, 0.1, 0.6


def train(a: Algorithm, seed: int) -> np.ndarray:
    """(train pass@1, test pass@16) before every step and after the last, exactly."""
    policy = WORLD.taught(seed, hidden=64, steps=300, right=(EASY, 0.0))
    made = torch.Generator().manual_seed(seed)
    order = torch.randperm(WORLD.prompts, generator=made)
    trained, tested = order[:TRAINED], order[TRAINED:]
    trainer = Trainer(a, policy, torch.optim.SGD(policy.parameters(), lr=LR), G, seed)
    out: list[tuple[float, float]] = []
    for step in range(STEPS + 1):
        p = WORLD.solved(policy)
        out.append((float(p[trained].mean()), float((1 - (1 - p[tested]) ** K).mean())))
        if step < STEPS:
            answers = ask(policy, siblings(trained, G), made)
            trainer.step(answers, credit_by_pattern(a, WORLD.rewards(answers, G)).ravel())
    return np.array(out)


TRAIN, TEST, EQUAL, START = (
    "train pass@1 when GRPO reaches .9",
    "test pass@16 then",
    "test pass@16 at own train .8",
    "test pass@16 at first",
)


def play(seed: int) -> Played:
    runs = {arm: train(a, seed) for arm, a in ARMS.items()}
    then = int(np.argmax(runs["GRPO"][:, 0] >= 0.9))
    assert then, "GRPO never reached .9 on train"
    figures = {
        arm: {TRAIN: float(x[then, 0]), TEST: float(x[then, 1]), EQUAL: float(x[int(np.argmax(x[:, 0] >= 0.8)), 1]), START: float(x[0, 1])}
        for arm, x in runs.items()
    }
    return Played(figures, {arm: Curve(range(STEPS + 1), x[:, 1].tolist()) for arm, x in runs.items()})


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    slower, better = interval(gains(each, TRAIN, "RF++", "GRPO")), interval(gains(each, TEST, "RF++", "GRPO"))
    own = interval(gains(each, TEST, "RF++-baseline", "GRPO"))
    return [
        Statement(f"when GRPO reaches .9 on train, REINFORCE++ is behind it there (95 % interval {slower[0]:+.3f} to {slower[1]:+.3f})", slower[1] < 0),
        Statement(f"and ahead of it on test pass@16, the published sign ({better[0]:+.3f} to {better[1]:+.3f})", better[0] > 0),
        Statement("at equal train pass@1 (.8) their test pass@16 agrees within .05", abs(mean["RF++"][EQUAL] - mean["GRPO"][EQUAL]) < 0.05),
        Statement(f"REINFORCE++-baseline is not ahead of GRPO ({own[0]:+.3f} to {own[1]:+.3f})", own[0] <= 0),
    ]  # fmt: skip
