"""Overfitting on few prompts: GRPO's scale within each group against REINFORCE++'s over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import GRPO, REINFORCE_PP, REINFORCE_PP_BASELINE
from posttrain.toy.answers import ask, siblings
from posttrain.toy.sums import Sums
from posttrain.toy.training import ToyTrainer, credit_by_pattern

WORLD, TRAINED, G, STEPS, LR, K = Sums(), 16, 8, 150, 4e-3, 16
ARMS: dict[str, Algorithm] = {
    "GRPO": replace(GRPO, pull=None),
    "RF++": replace(REINFORCE_PP, pull=None),
    "RF++-baseline": replace(REINFORCE_PP_BASELINE, pull=None),
}


def train(a: Algorithm, seed: int) -> np.ndarray:
    """(train pass@1, test pass@1, test pass@16) before every step and after the last, exactly."""
    policy = WORLD.taught(seed, hidden=64, steps=300, right=0.3)
    made = torch.Generator().manual_seed(seed)
    order = torch.randperm(WORLD.prompts, generator=made)
    trained, tested = order[:TRAINED], order[TRAINED:]
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=LR), G, seed)
    out: list[tuple[float, ...]] = []
    for step in range(STEPS + 1):
        p = WORLD.solved(policy)
        out.append((float(p[trained].mean()), float(p[tested].mean()), float((1 - (1 - p[tested]) ** K).mean())))
        if step < STEPS:
            answers = ask(policy, siblings(trained, G), made)
            trainer.step(answers, credit_by_pattern(a, WORLD.rewards(answers, G)).ravel())
    return np.array(out)


def play(seed: int) -> Played:
    runs = {arm: train(a, seed) for arm, a in ARMS.items()}
    figures: dict[str, dict[str, float]] = {}
    for arm, x in runs.items():
        at = int(np.argmax(x[:, 0] >= 0.9))
        figures[arm] = {
            "train pass@1": float(x[-1, 0]),
            "test pass@1": float(x[-1, 1]),
            "test pass@16": float(x[-1, 2]),
            "steps to train .9": float(at),
            "test pass@16 then": float(x[at, 2]),
            "test pass@16 at first": float(x[0, 2]),
        }
    return Played(figures, {arm: Curve(x[:, 0].tolist(), x[:, 2].tolist()) for arm, x in runs.items()})


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    then, last = "test pass@16 then", "test pass@16"
    return [
        Statement(
            "all three memorise: train pass@1 > .98, test pass@16 down by more than .3",
            all(r["train pass@1"] > 0.98 and r[last] < r["test pass@16 at first"] - 0.3 for r in mean.values()),
        ),
        Statement(
            "at equal train pass@1 (.9) their test pass@16 agrees within .05",
            max(r[then] for r in mean.values()) - min(r[then] for r in mean.values()) < 0.05,
        ),
        Statement(
            "after 150 steps REINFORCE++ is not ahead of GRPO by .05 (the published sign)",
            mean["RF++"][last] < mean["GRPO"][last] + 0.05,
        ),
    ]


MINIATURE = Miniature(
    name="few_prompts",
    item="F.2 item 17, published F.1.8",
    claim=(
        "On a tiny set of prompts, scaling within each group overfits and a scale over the step does not. On 30 AIME"
        " problems GRPO trains to 95 % and keeps a test pass@16 of .4 %, REINFORCE++ trains to 71 % and keeps 40 %."
    ),
    source="REINFORCE++ 2501.03262",
    setup=(
        "a + b mod 11 by a network of 64 hidden units that imitated answers, 30 % of them put right. 16 of the 121"
        " prompts are trained on, the other 105 tested. 8 siblings, all 16 prompts every step, Adam 4e-3, 150 steps,"
        " no KL."
    ),
    predicted="Test pass@16 after training: REINFORCE++ > GRPO.",
    verdict=(
        "Does not hold here. All three fit the 16 prompts and forget the others alike. At equal train accuracy they"
        " are one curve, and at the end GRPO is slightly ahead. The published runs were compared at different train"
        " accuracies (95 % and 71 %). That is where the sign comes from in [Few prompts, half of them"
        " hard](#few-prompts-half-of-them-hard)."
    ),
    play=play,
    judge=judge,
    picture=Picture("Overfitting on few prompts", "train pass@1", "test pass@16"),
    notes=(
        (
            "A harder mixture (every other prompt imitated 90 % right, the rest 5 %), where GRPO's scale makes a lone"
            " success loud, gave the same: test pass@16 of .82 and .81 at train pass@1 .8. A step of 1e-2 did too."
        ),
    ),
)
