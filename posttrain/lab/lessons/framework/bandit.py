"""Page 01: the loop on five actions, with the exact gradient beside the estimate."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.config.run import Optimizer, Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import REINFORCE
from posttrain.toy.answers import ask, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.web.picture import Bars, Curve

REWARDS = torch.tensor([0.1, 0.3, 0.9, 0.4, 0.2], dtype=torch.float64)
ACTIONS = tuple(f"action {i}" for i in range(5))
STEPS = 120


def probabilities(policy: TabularPolicy) -> torch.Tensor:
    return torch.softmax(policy.table.detach()[0, 0], -1)


def exact_gradient(policy: TabularPolicy) -> torch.Tensor:
    """d/d logits of the expected reward, by summing over all five actions."""
    pi = probabilities(policy)
    return pi * (REWARDS - pi @ REWARDS)


def compute(k: lab.Values) -> lab.Readout:
    policy = TabularPolicy(torch.zeros(1, 1, 5))
    rng = torch.Generator().manual_seed(int(k["seed"]))
    # Nothing is compared, so each sample is a group of its own (1 sibling).
    trainer = ToyTrainer(REINFORCE, policy, torch.optim.SGD(policy.parameters(), lr=k["eta"]), 1, int(k["seed"]))
    paid, expected, kl_by_step = list[float](), list[float](), list[float]()
    first_gradient = dict[str, list[float]]()
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), int(k["samples"])), rng)
        rewards = REWARDS[answers.tokens_ET[:, 0]].numpy()
        logits, pi, exact = policy.table.detach().clone(), probabilities(policy), exact_gradient(policy)
        trainer.step(answers, credit_by_pattern(REINFORCE, rewards[:, None])[:, 0])
        # Plain SGD: the step over its size is the gradient that it followed. Only that of the first step is shown.
        first_gradient = first_gradient or {"exact": exact.tolist(), "estimate": (
            (policy.table.detach() - logits)[0, 0] / k["eta"]).tolist()}  # fmt: skip
        paid.append(float(rewards.mean()))
        expected.append(float(probabilities(policy) @ REWARDS))
        kl_by_step.append(float(pi @ (pi.log() - probabilities(policy).log())))
    pi = probabilities(policy)  # after training
    best = int(pi.argmax())
    moving_mean = np.zeros(STEPS)
    for i, r in enumerate(paid):
        moving_mean[i] = r if i == 0 else 0.9 * moving_mean[i - 1] + 0.1 * r
    stage = Reinforce(name="rl", algorithm=REINFORCE, optimizer=Optimizer(lr=float(k["eta"])))
    entropy = float(-(pi * torch.log(pi.clamp_min(1e-12))).sum())
    steps = lab.recorded({"rollout/reward": paid, "policy/kl_step": kl_by_step, "optim/lr": [float(k["eta"])] * STEPS})
    return lab.Readout(
        pictures=(
            Bars("Policy after training", ACTIONS, {"probability": pi.tolist(), "reward": REWARDS.tolist()},
                 low=0, high=1),
            Curve("Expected reward by step", list(range(1, STEPS + 1)),
                  {"expected": expected, "sampled, moving mean": moving_mean.tolist()}, low=0, high=1),
            Bars("Gradient of the first step", ACTIONS, first_gradient),
        ),
        sentence=f"After {STEPS} steps the policy prefers **{ACTIONS[best]}** (probability "
        f"**{float(pi[best]):.2f}**), which pays **{float(REWARDS[best]):.1f}**; the best pays 0.9.",
        values={"expected reward": expected[-1], "probability of the best": float(pi[2]), "entropy": entropy},
        says=lab.by_rules(steps, stage),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="01", name="bandit", title="The loop: sample, score, push", part="the framework", force="estimator",
    minutes=6,
    question="Can a policy get better when nobody tells it which action was right, only how much its own action paid?",
    idea="""
        A policy is the model that is trained. Here it is one softmax over five actions; for a language model an action
        is a token, or a whole answer. The policy samples an action, gets a reward for it, and raises the log-prob of
        what it did in proportion to that reward. On average this is the gradient of the expected reward. A single step
        is a guess: its estimate points somewhere else than the exact gradient, which can be computed here because there
        are only five actions.

        Many small steps average the guesses. One large step believes its guess: the policy becomes certain of what was
        sampled first, and an action with probability near 0 is never tried again.
    """,
    formula="""grad E[r] = E[ r * grad log pi(action) ]        pi(action): its probability under the policy
rewards r of the five actions: .1 .3 .9 .4 .2""",
    knobs=(
        lab.Slider("eta", "step size", 0.5, 0.05, 60.0, log=True),
        lab.Slider("samples", "samples a step", 8, 1, 32),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"eta": 20.0, "samples": 2},
                  "The first samples decide everything: the policy is certain, and not of the best action.",
                  "update_too_large"),
    ),
    claims=(
        lab.Claim("Expected reward of the uniform policy", "rewards .1 .3 .9 .4 .2", 0.38,
                  lambda: float(REWARDS.mean())),
    ),
    exercises=(
        lab.AskNumber("What does a uniform policy get on average?", 0.38, why="The mean of the five rewards."),
        lab.AskKnobs("Find a setting with an expected reward of at least 0.89.", "expected reward", 0.89, None,
                     {"eta": 4.0, "samples": 32}),
        lab.AskChoice("Why does a very large step not recover?",
                      ("The gradient points away", "An action with probability 0 is never sampled again",
                      "The reward changes"), 1, why="What is not sampled has no log-prob to raise."),
    ),
    code=("posttrain.algorithm.credit.step_credit.credit_step", "posttrain.algorithm.loss.losses.PolicyLoss"),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=reinforce", grid=("eta", "samples"),
)  # fmt: skip
