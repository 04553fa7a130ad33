"""The control every reward needs: rewards that are coin flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import ask, siblings
from posttrain.toy.sums import Sums
from posttrain.toy.training import ToyTrainer, credit_by_pattern

WORLD, GROUPS, G, STEPS, LR = Sums(), 32, 8, 60, 1e-3
FREE = replace(GRPO, pull=None, clip=None)
CLIPPED = replace(GRPO, pull=None)
ARMS: dict[str, tuple[Algorithm, int, bool]] = {
    "true reward, no clip, 1 update": (FREE, 1, True),
    "coin, no clip, 1 update": (FREE, 1, False),
    "coin, no clip, 6 updates": (FREE, 6, False),
    "coin, clip .2, 6 updates": (CLIPPED, 6, False),
}


def train(a: Algorithm, inner: int, honest: bool, seed: int) -> np.ndarray:
    """(accuracy, probability of each prompt's favourite answer, entropy) before every step and after the last,
    exactly."""
    policy = WORLD.taught(seed, hidden=64, steps=400, right=0.45)
    made, coins = torch.Generator().manual_seed(seed), np.random.default_rng([seed, 19])
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=LR), G, seed, epochs=inner)
    everything = torch.arange(WORLD.prompts)
    out: list[tuple[float, ...]] = []
    for step in range(STEPS + 1):
        with torch.no_grad():
            p = torch.softmax(policy(everything, torch.zeros(WORLD.prompts, 1, dtype=torch.int64))[:, 0], -1)
        if step == 0:
            favourite = p.argmax(-1, keepdim=True)
        out.append((WORLD.accuracy(policy), float(p.gather(1, favourite).mean()), float(-(p * p.log()).sum(-1).mean())))
        if step < STEPS:
            answers = ask(policy, siblings(torch.randint(WORLD.prompts, (GROUPS,), generator=made), G), made)
            rewards = WORLD.rewards(answers, G) if honest else coins.integers(0, 2, (GROUPS, G)).astype(float)
            trainer.step(answers, credit_by_pattern(a, rewards).ravel())
    return np.array(out)


def play(seed: int) -> Played:
    runs = {arm: train(a, inner, honest, seed) for arm, (a, inner, honest) in ARMS.items()}
    figures = {
        arm: {
            "accuracy before": float(x[0, 0]),
            "gain": float(x[-1, 0] - x[0, 0]),
            "favourite's probability, change": float(x[-1, 1] - x[0, 1]),
            "entropy, change": float(x[-1, 2] - x[0, 2]),
        }
        for arm, x in runs.items()
    }
    return Played(figures, {arm: Curve(range(STEPS + 1), x[:, 0].tolist()) for arm, x in runs.items()})


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    true, one, free, clipped = ARMS
    favourite = "favourite's probability, change"
    return [
        Statement("the true reward gains more than .1, on every seed", all(f[true]["gain"] > 0.1 for f in each)),
        Statement(
            "coins, no clip, one update: |gain| < .05, on every seed", all(abs(f[one]["gain"]) < 0.05 for f in each)
        ),
        Statement(
            "coins and 6 updates gain nothing, with or without clip, on any seed",
            all(f[arm]["gain"] < 0.02 for f in each for arm in (free, clipped)),
        ),
        Statement(
            "they use up entropy all the same: by more than .2 nats, both",
            max(mean[arm]["entropy, change"] for arm in (free, clipped)) < -0.2,
        ),
        Statement(
            "nor do they sharpen the prior: the favourite answer's probability does not rise",
            max(mean[arm][favourite] for arm in (free, clipped)) < 0.02,
        ),
    ]


MINIATURE = Miniature(
    name="spurious",
    item="F.2 item 19",
    claim=(
        "A reward of coin flips teaches nothing; gains under it were reported, and explained by the clip, which over"
        " many inner updates favours what the policy already says."
    ),
    source="Spurious Rewards 2506.10947",
    setup=(
        "a + b mod 11 by a network of 64 hidden units that imitated answers, 45 % of them put right; 32 groups of 8,"
        " Adam 1e-3, 60 steps. The reward is the truth or a coin; 1 or 6 updates a step, with clip .2 or none. Exact"
        " probabilities."
    ),
    predicted=(
        "Coins without clip and with one update: about 0. Clip and many updates: perhaps sharper on the prior's"
        " favourite answer."
    ),
    verdict=(
        "Holds for the control: coins gain nothing. The sharpening did not show: many updates on coins move the network"
        " at random, entropy falls onto answers that were not the favourite, and the clip changes little."
    ),
    play=play,
    judge=judge,
    notes=(
        (
            "Also tried: tables of 128 prompts, which share nothing, 16 clipped updates of SGD a step, two seeds. The"
            " favourite's probability stayed at .414 while entropy fell from 1.7 to 1.1 nats; without clip it fell. The"
            " clip protects the favourite there, but does not raise it."
        ),
    ),
    picture=Picture("Spurious rewards", "step", "accuracy"),
)
