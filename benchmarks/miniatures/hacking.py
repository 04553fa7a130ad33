"""Over-optimisation of a learned reward: a Bradley-Terry model of 500 noisy pairs, and what its maximum does to the
gold reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import RLOO
from posttrain.toy.answers import ask, logp_of
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_in_full

LENGTH, VOCAB, PAIRS, FLIPPED, GROUPS, G, STEPS, LR = 12, 6, 500, 0.25, 8, 8, 120, 0.05
ARMS: dict[str, Algorithm] = {
    "no KL": replace(RLOO, pull=None),
    "KL .05": replace(RLOO, pull=KL(coef=0.05, estimator="k1", placement="reward")),
    "KL .2": replace(RLOO, pull=KL(coef=0.2, estimator="k1", placement="reward")),
}
DRAWS = (1, 4, 16, 64, 256, 1024)


def counts(tokens_ET: Tensor) -> Tensor:
    """How often each token was said, [E, V]."""
    return nn.functional.one_hot(tokens_ET, VOCAB).sum(1).double()


class Gold:
    """Tokens have values, and repeating one pays less each time: sum_k value_k * n_k - .12 * sum_k n_k^2, mean 0 and
    std 1 at the start."""

    def __init__(self, seed: int, sample_ET: Tensor) -> None:
        self.value_V = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)[
            torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
        ]
        self.mean, self.std = 0.0, 1.0
        raw = self(sample_ET)
        self.mean, self.std = float(raw.mean()), float(raw.std())

    def __call__(self, tokens_ET: Tensor) -> Tensor:
        n = counts(tokens_ET)
        return (n @ self.value_V - 0.12 * n.square().sum(1) - self.mean) / self.std


def learned(gold: Gold, policy: TabularPolicy, made: torch.Generator) -> nn.Module:
    """A linear reward model on token counts, by maximum likelihood of 500 comparisons, a quarter of them turned
    round."""
    prompt_E = torch.zeros(PAIRS, dtype=torch.int64)
    a, b = (ask(policy, prompt_E, made).tokens_ET for _ in range(2))
    wins = (gold(a) > gold(b)) ^ (torch.rand(PAIRS, generator=made) < FLIPPED)
    better, worse = torch.where(wins[:, None], a, b), torch.where(wins[:, None], b, a)
    model = nn.Linear(VOCAB, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        loss = -nn.functional.logsigmoid(model(counts(better)) - model(counts(worse))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def train(
    a: Algorithm, gold: Gold, proxy: nn.Module, scale: tuple[float, float], start: TabularPolicy, seed: int
) -> np.ndarray:
    """(proxy, gold, KL to the start in nats an answer) of every step's samples."""
    policy, made = TabularPolicy(start.table.detach()), torch.Generator().manual_seed(seed)
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=LR), G, seed)
    out: list[tuple[float, ...]] = []
    for _ in range(STEPS):
        answers = ask(policy, torch.zeros(GROUPS * G, dtype=torch.int64), made)
        with torch.no_grad():
            reward = (proxy(counts(answers.tokens_ET))[:, 0] - scale[0]) / scale[1]
        base = logp_of(start, answers)
        out.append(
            (float(reward.mean()), float(gold(answers.tokens_ET).mean()), float((answers.mu_ET - base).sum(1).mean()))
        )
        trainer.step(answers, credit_in_full(a, reward.numpy().reshape(GROUPS, G), answers, base), base)
    return np.array(out)


def best_of(proxy_E: np.ndarray, gold_E: np.ndarray, n: int) -> tuple[float, float]:
    """Expected (proxy, gold) of the proxy's favourite among n, exactly over the sample: the i-th of m is best with C(i,
    n-1) / C(m, n)."""
    order = np.argsort(proxy_E)
    m = len(order)
    below = np.arange(m) / m
    weight = ((np.arange(m) + 1) / m) ** n - below**n
    return float(weight @ proxy_E[order]), float(weight @ gold_E[order])


def play(seed: int) -> Played:
    made = torch.Generator().manual_seed(seed)
    start = TabularPolicy(torch.zeros(1, LENGTH, VOCAB))
    sample = ask(start, torch.zeros(8192, dtype=torch.int64), made).tokens_ET
    gold = Gold(seed, sample)
    proxy = learned(gold, start, made)
    with torch.no_grad():
        raw = proxy(counts(sample))[:, 0]
    scale = (float(raw.mean()), float(raw.std()))
    figures: dict[str, dict[str, float]] = {}
    curves: dict[str, Curve] = {}
    smooth = np.ones(5) / 5
    for arm, a in ARMS.items():
        x = train(a, gold, proxy, scale, start, seed)
        g = np.convolve(x[:, 1], smooth, "valid")
        figures[arm] = {
            "gold, best": float(g.max()),
            "at step": float(g.argmax()),
            "gold, last 10": float(x[-10:, 1].mean()),
            "proxy at gold's best": float(np.convolve(x[:, 0], smooth, "valid")[g.argmax()]),
            "proxy, last 10": float(x[-10:, 0].mean()),
            "KL at gold's best": float(x[g.argmax(), 2]),
            "KL, last 10": float(x[-10:, 2].mean()),
        }
        curves |= {
            f"{arm}: gold": Curve(range(STEPS), x[:, 1].tolist()),
            f"{arm}: proxy": Curve(range(STEPS), x[:, 0].tolist()),
        }
    chosen = {n: best_of(((raw - scale[0]) / scale[1]).numpy(), gold(sample).numpy(), n) for n in DRAWS}
    figures["best of n"] = {f"gold, n = {n}": g for n, (_, g) in chosen.items()} | {"proxy, n = 1024": chosen[1024][0]}
    return Played(figures, curves)


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    free, weak, strong = ARMS
    best, last, chosen = "gold, best", "gold, last 10", [mean["best of n"][f"gold, n = {n}"] for n in DRAWS]
    rises = all(f[free]["proxy, last 10"] > f[free]["proxy at gold's best"] + 1 for f in each)
    gains = np.diff(chosen)
    return [
        Statement(
            "no KL, on every seed: gold peaks, then falls by more than 1.5 (in stds of the start)",
            all(f[free][best] > f[free][last] + 1.5 for f in each),
        ),
        Statement("meanwhile the proxy rises by more than 1 further, on every seed", rises),
        Statement(
            "KL .05 ends with more gold than none, on every seed", all(f[weak][last] > f[free][last] for f in each)
        ),
        Statement(
            "KL .2 ends within .3 of its best gold, on every seed",
            all(f[strong][last] > f[strong][best] - 0.3 for f in each),
        ),
        Statement(
            "best of n: each fourfold n adds less gold than the one before; no fall up to n = 1024",
            bool((np.diff(gains) < 0).all() and gains[-1] > 0),
        ),
    ]


MINIATURE = Miniature(
    name="hacking",
    item="F.2 item 18",
    claim=(
        "The maximum of a learned reward is not the maximum of what it was learned from: gold reward peaks and falls"
        " while the proxy rises; a KL penalty delays it. Choosing the best of n over-optimises too."
    ),
    source="reward model over-optimisation 2210.10760",
    setup=(
        "Twelve tokens of six kinds; gold pays each kind's value and less for every repetition. A linear reward model"
        " on token counts is fitted to 500 comparisons of the start's own answers, a quarter turned round: right about"
        " values, blind to repetition. RLOO on the proxy, 8 x 8 answers a step, Adam .05, 120 steps; KL as k1 in the"
        " reward. Rewards in standard deviations of the start."
    ),
    predicted="Gold peaks, then falls while the proxy rises; KL delays it; best of n peaks in n.",
    verdict=(
        "Holds for reinforcement, not for best of n. Without KL gold falls back to where it began; KL .05 makes the"
        " fall a little smaller and KL .2 stops it. Best of n flattens but does not fall: n = 1024 is log n - 1 + 1/n ="
        " 5.9 nats from the start, about where reinforcement has its best."
    ),
    play=play,
    judge=judge,
    picture=Picture("Reward hacking", "step", "reward (stds of the start)"),
)
