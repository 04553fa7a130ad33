"""Page 09: how far the estimated gradient is from the exact one, by the number of samples."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import REINFORCE, RLOO
from posttrain.toy.answers import ask, said_logp, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import batch_of, credit_by_pattern, loss_of
from posttrain.web.picture import Bars, Curve

REWARDS = np.array([0.1, 0.3, 0.9, 0.4, 0.2])
COUNTS = (2, 4, 8, 16, 32, 64)
RULES = {
    "no baseline (REINFORCE)": REINFORCE,
    "the others' mean (RLOO)": patch(RLOO, "rloo_alone", "2402.14740", pull=None),
}


def estimate(rule: str, k: int, rng: torch.Generator) -> np.ndarray:
    """One estimate of the gradient of the expected reward, [5], from k samples of a uniform policy."""
    a, policy = RULES[rule], TabularPolicy(torch.zeros(1, 1, 5))
    answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), k), rng)
    rewards = REWARDS[answers.tokens_ET[:, 0].numpy()]
    # RLOO compares: the samples are one group of k. Without a baseline they are k groups of one.
    rewards_PG = rewards[None] if rule.startswith("the") else rewards[:, None]
    credit = credit_by_pattern(a, rewards_PG).reshape(-1, 1)
    start = said_logp(policy, answers)[0].detach()
    loss, _ = loss_of(a, batch_of(a, answers, credit, rewards_PG.shape[1], start, start), policy, answers)
    loss.backward()
    assert policy.table.grad is not None
    return -policy.table.grad[0, 0].numpy()  # the loss falls where the expected reward rises


EXACT = (REWARDS - REWARDS.mean()) / 5
"""The gradient for the logits of a uniform policy: pi * (r - mean of r)."""


@cache
def errors(rule: str, k: int, times: int, seed: int) -> np.ndarray:
    """The distance of each of `times` estimates from the exact gradient, over its size."""
    rng = torch.Generator().manual_seed(seed)
    estimates = np.array([estimate(rule, k, rng) for _ in range(times)])
    return np.linalg.norm(estimates - EXACT, axis=1) / np.linalg.norm(EXACT)


def compute(k: lab.Values) -> lab.Readout:
    times, seed, rule, count = int(k["times"]), int(k["seed"]), str(k["baseline"]), int(k["K"])
    single = estimate(rule, count, torch.Generator().manual_seed(seed))
    error_by_k = {name: [float(errors(name, c, times, seed).mean()) for c in COUNTS] for name in RULES}
    # The law, from the chosen rule's error at the smallest K on.
    error_by_k["1 / sqrt(K)"] = [error_by_k[rule][0] * (COUNTS[0] / c) ** 0.5 for c in COUNTS]
    errors_now = errors(rule, count, times, seed)
    worse = float(np.mean(errors_now > 1))
    return lab.Readout(
        pictures=(
            Bars("One estimate beside the exact gradient", [f"action {i}" for i in range(5)],
                 {"exact": EXACT.tolist(), "estimate": single.tolist()}),
            Curve("Error of an estimate, over the size of the gradient", COUNTS, error_by_k, x_label="K samples",
                  log=True, low=0, at=count),
        ),
        sentence=f"With **{count}** samples an estimate is off by **{errors_now.mean():.2f}** times the gradient "
        f"itself; **{worse:.0%}** of {times} estimates are further off than not moving at all.",
        values={"error": float(errors_now.mean()), "worse than nothing": worse},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="09", name="noise", title="REINFORCE: how noisy is a gradient?", part="the algorithms", force="estimator",
    minutes=6,
    question="How many samples make a gradient that points somewhere?",
    idea="""
        The estimate is right on average and wrong every time. Its error falls with the square root of the number of
        samples: four times the samples, half the error. A baseline takes out what all samples share, so it lowers the
        error at no cost, and the average stays right as long as it does not read the sample's own reward.

        With few samples most estimates are further from the gradient than doing nothing. They still help, because
        their errors cancel over many small steps.
    """,
    formula="error of the mean of K samples = error of one / sqrt(K)",
    knobs=(
        lab.Slider("K", "K, samples of one estimate", 8, 2, 64),
        lab.Options("baseline", "baseline", "the others' mean (RLOO)", tuple(RULES)),
        lab.Slider("times", "estimates to average over", 30, 10, 60, 10),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"K": 2, "baseline": "no baseline (REINFORCE)"},
                  "Two samples and no baseline: nearly every estimate is further off than not moving at all.", None),
    ),
    claims=(
        lab.Claim("Error at K = 8 over that at K = 32", "1 / sqrt(K)", 2.0,
                  lambda: float(errors("no baseline (REINFORCE)", 8, 300,
                  1).mean() / errors("no baseline (REINFORCE)", 32, 300, 1).mean()), within=0.1),
    ),
    exercises=(
        lab.AskNumber("By what factor does the error fall from K = 4 to K = 64?", 4.0, why="sqrt(64 / 4) = 4."),
        lab.AskKnobs("Bring the error below 0.5.", "error", None, 0.5, {"K": 64}),
        lab.AskChoice("Why does a baseline not bias the estimate?",
                      ("It is small", "The log-probs' gradient has mean 0", "It is learned"), 1,
                      why="A constant times grad log pi averages to 0."),
    ),
    code=("posttrain.algorithm.credit.baseline_values.centred", "posttrain.algorithm.loss.policy_loss.objective"),
    docs="research/miniatures.md", command="posttrain run arithmetic algorithm=rloo rl.siblings=16",
    grid=("K", "baseline"),
)  # fmt: skip
