"""Entropy under four ways to hold a token back: clip .2, clip-higher, Clip-Cov, KL-Cov."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.token_choice import ClipCov, KlCov
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import CLIP_COV, GRPO, KL_COV
from posttrain.toy.answers import ask, said_logp, siblings
from posttrain.toy.sums import Sums
from posttrain.toy.training import ToyTrainer, credit_by_pattern

GROUPS, G, STEPS, INNER, LR, HIDDEN = 24, 8, 60, 4, 2e-3, 64
WORLD = Sums(free=1, skew=1.5)
PLAIN = replace(GRPO, pull=None, aggregate="token_mean")
ARMS: dict[str, Algorithm] = {
    "clip .2": PLAIN,
    "clip .2/.28": replace(PLAIN, clip=Clip(low=0.2, high=0.28)),
    "Clip-Cov": replace(CLIP_COV, tokens=ClipCov(share=0.02)),
    "KL-Cov": replace(KL_COV, tokens=KlCov(share=0.05)),
}


def train(a: Algorithm, seed: int) -> np.ndarray:
    """(accuracy, mean entropy a token) of every step's samples, [STEPS, 2]."""
    policy = WORLD.taught(seed, hidden=HIDDEN, steps=300, right=0.3)
    made = torch.Generator().manual_seed(seed)
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=LR), G, seed, epochs=INNER)
    out: list[tuple[float, float]] = []
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.randint(WORLD.prompts, (GROUPS,), generator=made), G), made)
        rewards = WORLD.rewards(answers, G)
        with torch.no_grad():
            out.append((float(rewards.mean()), float(said_logp(policy, answers)[1].mean())))
        trainer.step(answers, credit_by_pattern(a, rewards).ravel())
    return np.array(out)


def entropy_at(x: np.ndarray, accuracy: float) -> float:
    """Entropy when the accuracy, averaged over five steps, first reaches this."""
    smooth = np.stack([np.convolve(x[:, k], np.ones(5) / 5, "valid") for k in (0, 1)], 1)
    return float(smooth[np.argmax(smooth[:, 0] >= accuracy), 1])


def play(seed: int) -> Played:
    runs = {arm: train(a, seed) for arm, a in ARMS.items()}
    figures = {
        arm: {
            "entropy at first": float(x[0, 1]),
            "entropy, last 10 steps": float(x[-10:, 1].mean()),
            "entropy at accuracy .4": entropy_at(x, 0.4),
            "entropy at accuracy .5": entropy_at(x, 0.5),
            "accuracy, last 10 steps": float(x[-10:, 0].mean()),
        }
        for arm, x in runs.items()
    }
    return Played(figures, {arm: Curve(range(STEPS), runs[arm][:, 1].tolist()) for arm in ARMS})


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    end = {arm: row["entropy, last 10 steps"] for arm, row in mean.items()}
    half = {arm: row["entropy at accuracy .5"] for arm, row in mean.items()}
    clips, covs = ("clip .2", "clip .2/.28"), ("Clip-Cov", "KL-Cov")
    return [
        Statement(
            "final entropy, mean of seeds: KL-Cov > Clip-Cov > both clips",
            end["KL-Cov"] > end["Clip-Cov"] > max(end[c] for c in clips),
        ),
        Statement(
            "the same at equal accuracy (.5): Clip-Cov and KL-Cov above both clips",
            min(half[c] for c in covs) > max(half[c] for c in clips),
        ),
        Statement(
            "KL-Cov ends above clip .2 on every seed",
            all(f["KL-Cov"]["entropy, last 10 steps"] > f["clip .2"]["entropy, last 10 steps"] for f in each),
        ),
        Statement(
            "clip .2 and clip .2/.28 end within .15 nats of each other", abs(end["clip .2"] - end["clip .2/.28"]) < 0.15
        ),
    ]


MINIATURE = Miniature(
    name="entropy",
    item="F.2 item 5",
    claim=(
        "Reinforcement uses up entropy; clip-higher spends less of it than a symmetric clip, and holding back the few"
        " tokens whose probability and credit rise together (Clip-Cov, KL-Cov) much less."
    ),
    source="DAPO 2503.14476, Entropy Mechanism 2505.22617",
    setup=(
        "a + b mod 11 after one token that does not matter. A network of 64 hidden units imitated lopsided answers:"
        " the k-th choice weighs k^-1.5, the sum is the least common, 30 % of them were put right. 24 groups of 8, 4"
        " inner updates, Adam 2e-3, 60 steps. With 384 tokens a step the published shares (2e-4, .002) choose no"
        " token and one, so Clip-Cov takes 2 % and KL-Cov 5 %."
    ),
    predicted="Final entropy: clip .2 < clip .2/.28 < Clip-Cov, and KL-Cov highest.",
    verdict=(
        "Holds for Clip-Cov and KL-Cov, at equal accuracy too. Clip-higher against clip .2 is within the noise"
        " between seeds. The mean has the published sign here, but single seeds and other priors had either, so it is"
        " not asserted in this world. Where it holds is shown in [Clip-higher and rare"
        " tokens](#clip-higher-and-rare-tokens)."
    ),
    play=play,
    judge=judge,
    notes=(
        (
            "Tried before: a uniform prior, with no, one and three free tokens, and steps of 1e-3 to 6e-3. With no free"
            " token all forms ended within about .1 nats of each other; clip-higher was above clip .2 in some settings"
            " and below in others. With one free token KL-Cov with the published share of .002 could not be told from"
            " no clip at all; with three, a share of .1 hardly learned."
        ),
    ),
    picture=Picture("Entropy and trust regions", "step", "entropy a token (nats)"),
)
