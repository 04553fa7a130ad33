"""Mismatch in small doses: a little noise on each of many tokens, under credit that does not compare siblings, and under credit that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement, gains, interval
from benchmarks.miniatures.mismatch import noise
from benchmarks.miniatures.world import Answers, Table, Trainer, ask, credit_by_pattern, siblings
from posttrain.algorithm.credit import whitened
from posttrain.core.algorithm import Algorithm
from posttrain.core.ladder import DPPO, GRPO, REINFORCE_PP
from posttrain.core.pieces.baseline import ToGo
from posttrain.core.pieces.correction import Mask, Truncate

PROMPTS, G, LENGTH, VOCAB, STEPS, LR, RIGHT = 16, 16, 16, 8, 60, 0.05, 0.9
NOISES = (0.0, 0.5, 1.0)
GLOBAL, LOCAL = replace(REINFORCE_PP, pull=None), replace(GRPO, pull=None)
ARMS: dict[str, Algorithm] = {
    "RF++, no correction": GLOBAL,
    "RF++, token TIS, cap 2": replace(GLOBAL, correction=(Truncate(cap=2.0),)),
    "RF++, sequence TIS, cap 5": replace(GLOBAL, correction=(Truncate(cap=5.0, level="sequence"),)),
    "RF++, sequence MIS, cap 5": replace(GLOBAL, correction=(Mask(low=0.0, high=5.0, level="sequence"),)),
    "RF++ with DPPO's region": replace(DPPO, baseline=ToGo(), whiten="token", aggregate="token_mean"),
    "GRPO, no correction": LOCAL,
}


def start() -> Table:
    """Token 0 is right everywhere, nine times in ten."""
    logits = torch.zeros(PROMPTS, LENGTH, VOCAB, dtype=torch.float64)
    logits[..., 0] = np.log(RIGHT * (VOCAB - 1) / (1 - RIGHT))
    return Table(logits)


def worth(seed: int) -> np.ndarray:
    """What a prompt pays for any answer at all, N(0, 1) [P]: prompts differ more than the answers to one of them."""
    return np.random.default_rng([seed, 11]).normal(size=PROMPTS)


def credit(a: Algorithm, rewards_PG: np.ndarray) -> np.ndarray:
    """[E]. Whitening is over the step; without a baseline before it there is nothing to ask of `credit_step` but that."""
    if isinstance(a.baseline, ToGo):
        flat = [np.array([x]) for x in rewards_PG.ravel()]
        return np.concatenate(whitened("token", flat, [""] * len(flat)))
    return credit_by_pattern(a, rewards_PG).ravel()


@torch.no_grad()
def value(policy: Table) -> float:
    """Share of right tokens the undisturbed policy says, exactly."""
    return float(torch.softmax(policy.table, -1)[..., 0].mean())


def train(a: Algorithm, s: float, seed: int) -> tuple[list[float], list[float]]:
    """Share of right tokens before every step and after the last, and the mismatch KL of every step."""
    policy, made, worth_P = start(), torch.Generator().manual_seed(seed), worth(seed)
    trainer = Trainer(a, policy, torch.optim.Adam(policy.parameters(), lr=LR), G, seed)
    seen, gap = [value(policy)], []
    for _ in range(STEPS):
        answers: Answers = ask(policy, siblings(torch.arange(PROMPTS), G), made, noise(s, made) if s else None)
        rewards_PG = worth_P[:, None] + (answers.tokens_ET == 0).double().mean(1).numpy().reshape(-1, G)
        gap.append(trainer.step(answers, credit(a, rewards_PG))["mismatch/kl"].mean)
        seen.append(value(policy))
    return seen, gap
