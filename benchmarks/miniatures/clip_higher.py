"""Clip-higher and entropy: what a symmetric clip does to tokens that the reward does not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement, gains, interval
from benchmarks.miniatures.world import Answers, Table, Trainer, ask, credit_by_pattern, said_logp, siblings
from posttrain.core.algorithm import Algorithm
from posttrain.core.ladder import GRPO
from posttrain.core.pieces.trust import Clip

PROMPTS, G, FREE, VOCAB, SKEW, RIGHT, STEPS, PUSH = 16, 8, 3, 16, 1.5, 0.1, 60, 0.05
PLAIN = replace(GRPO, pull=None, aggregate="token_mean")
CLIPS: dict[str, Algorithm] = {"clip .2": PLAIN, "clip .2/.28": replace(PLAIN, clip=Clip(low=0.2, high=0.28))}
UPDATES = (1, 4, 16)


def start() -> Table:
    """Free tokens by the law k^-1.5; of the last one, token 0 is right, one time in ten."""
    logits = torch.zeros(PROMPTS, FREE + 1, VOCAB, dtype=torch.float64)
    logits[:, :FREE] = -SKEW * torch.log(1.0 + torch.arange(VOCAB, dtype=torch.float64))
    logits[:, FREE, 0] = np.log(RIGHT * (VOCAB - 1) / (1 - RIGHT))
    return Table(logits)


def rewards(answers: Answers) -> np.ndarray:
    """1 where the last token is right, whatever came before, [P, G]."""
    return (answers.tokens_ET[:, -1] == 0).double().numpy().reshape(-1, G)


@torch.no_grad()
def seen(policy: Table) -> tuple[float, float]:
    """(entropy a free token, probability of the right last one), exactly."""
    logp: Tensor = torch.log_softmax(policy.table, -1)
    return float(-(logp.exp() * logp)[:, :FREE].sum(-1).mean()), float(logp[:, FREE, 0].exp().mean())


def train(a: Algorithm, updates: int, seed: int) -> np.ndarray:
    """`seen` before every step and after the last, and the share of tokens clipped in the step's last update, [STEPS + 1, 3]."""
    policy, made = start(), torch.Generator().manual_seed(seed)
    step = PUSH * PROMPTS * G * (FREE + 1)
    trainer = Trainer(a, policy, torch.optim.SGD(policy.parameters(), lr=step), G, seed, epochs=updates)
    out = [(*seen(policy), 0.0)]
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.arange(PROMPTS), G), made)
        gauges = trainer.step(answers, credit_by_pattern(a, rewards(answers)).ravel())
        out.append((*seen(policy), gauges["policy/clip_low"].mean + gauges["policy/clip_high"].mean if gauges else 0.0))
    return np.array(out)


def figures_of(x: np.ndarray) -> dict[str, float]:
    """Of one run: entropy a free token at first, at the end, and when the accuracy first reached one half."""
    half = int(np.argmax(x[:, 1] >= 0.5))
    return {
        "entropy at first": float(x[0, 0]),
        "entropy at the end": float(x[-1, 0]),
        "entropy at accuracy .5": float(x[half, 0]),
        "accuracy at the end": float(x[-1, 1]),
        "share clipped": float(x[1 : half + 1, 2].mean()),
    }


def play(seed: int) -> Played:
    runs = {f"{clip}, {n} updates": train(a, n, seed) for n in UPDATES for clip, a in CLIPS.items()}
    return Played({arm: figures_of(x) for arm, x in runs.items()}, {arm: Curve(range(STEPS + 1), x[:, 0].tolist()) for arm, x in runs.items()})
