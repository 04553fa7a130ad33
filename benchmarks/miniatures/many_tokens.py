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

PROMPTS, G, LENGTH, VOCAB, STEPS, LR, RIGHT = 8, 16, 16, 8, 60, 0.05, 0.9
GLOBAL, LOCAL = replace(REINFORCE_PP, pull=None), replace(GRPO, pull=None)
NONE, TIS, REGION = "RF++, no correction", "RF++, token TIS, cap 2", "RF++, DPPO's region"
SEQUENCE_TIS, SEQUENCE_MIS, CONTROL = "RF++, sequence TIS, cap 5", "RF++, sequence MIS, cap 5", "GRPO, no correction"
ARMS: dict[str, tuple[Algorithm, tuple[float, ...]]] = {
    NONE: (GLOBAL, (0.0, 0.5, 1.0)),
    TIS: (replace(GLOBAL, correction=(Truncate(cap=2.0),)), (0.0, 0.5, 1.0)),
    REGION: (replace(DPPO, baseline=ToGo(), whiten="token", aggregate="token_mean"), (0.0, 0.5, 1.0)),
    SEQUENCE_TIS: (replace(GLOBAL, correction=(Truncate(cap=5.0, level="sequence"),)), (1.0,)),
    SEQUENCE_MIS: (replace(GLOBAL, correction=(Mask(low=0.0, high=5.0, level="sequence"),)), (1.0,)),
    CONTROL: (LOCAL, (0.0, 1.0)),
}
"""Each with the noises it is played at. Without noise every correction is silent."""


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


def play(seed: int) -> Played:
    figures: dict[str, dict[str, float]] = {}
    curves: dict[str, Curve] = {}
    for arm, (a, noises) in ARMS.items():
        figures[arm] = {}
        for s in noises:
            seen, gap = train(a, s, seed)
            figures[arm][END.format(s)] = seen[-1]
            if s == 1:
                figures[arm] |= {FIRST: float(np.mean(gap[:10])), LAST: float(np.mean(gap[-10:]))}
                curves[arm] = Curve(range(STEPS + 1), seen)
    return Played(figures, curves)


END, FIRST, LAST = "right at the end, s = {:g}", "mismatch KL, first 10 steps", "mismatch KL, last 10"


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    clean, some, loud = (END.format(s) for s in (0.0, 0.5, 1.0))

    def lost(arm: str, at: str) -> list[float]:
        return [f[arm][clean] - f[arm][at] for f in each]

    fall = interval(lost(NONE, loud))
    help_ = interval(gains(each, loud, TIS, NONE))
    return [
        Statement("no correction, s = 1: ends below its start of .9, on every seed", all(f[NONE][loud] < RIGHT for f in each)),
        Statement(f"no correction loses at s = 1 (interval {fall[0]:+.3f} to {fall[1]:+.3f})", fall[0] > 0),
        Statement(f"token TIS ends above it (interval of the difference {help_[0]:+.3f} to {help_[1]:+.3f})", help_[0] > 0),
        Statement("token TIS stays within .05 of its run without noise, at s = .5 and 1, on every seed", max(abs(x) for at in (some, loud) for x in lost(TIS, at)) < 0.05),
        Statement("so does DPPO's region at s = .5, on every seed", max(abs(x) for x in lost(REGION, some)) < 0.05),
        Statement("DPPO's region at s = 1: above no correction and below token TIS, on every seed", all(f[NONE][loud] < f[REGION][loud] < f[TIS][loud] for f in each)),
        Statement("sequence TIS and MIS, s = 1: not below the start by more than .02, on every seed", all(f[q][loud] > RIGHT - 0.02 for f in each for q in (SEQUENCE_TIS, SEQUENCE_MIS))),
        Statement("GRPO needs no correction here: within .05 of its run without noise, on every seed", max(abs(x) for x in lost(CONTROL, loud)) < 0.05),
        Statement("the mismatch KL grows without correction and falls under token TIS, in the mean", mean[NONE][FIRST] < mean[NONE][LAST] and mean[TIS][LAST] < mean[TIS][FIRST]),
    ]  # fmt: skip
