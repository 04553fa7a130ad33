"""Page 03: what a verifier reads, and how a frozen reference holds the policy back from a hole in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.loss.reference_penalty import estimate
from posttrain.checks.learning.loss_checks import agrees_on_synthetic_batch
from posttrain.config.run import Reinforce
from posttrain.faults.planting import planted
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import ask, logp_of, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.verifier.integers import last_integer
from posttrain.web.picture import Bars, Curve

GOLD = "12"
SAYINGS = ("11#", "let me think... 12#", "12#", "120#", "1 2 3 ... 12#")
"""Answers of a tiny policy. The last one lists numbers until the right one is among them."""
START = torch.tensor([0.35, 0.18, 0.25, 0.2, 0.02], dtype=torch.float64).log()
PAID = np.array([0.0, 0.8, 0.8, 0.0, 1.0])
"""Rewards of a verifier with a hole: it pays the list most, because the number occurs in it. A right answer gets less
than 1, so that the list gets most."""
WORTH = np.array([0.0, 1.0, 1.0, 0.0, 0.0])
"""True worth of the answers."""
STEPS, SIBLINGS = 80, 16


def verdict(answer: str) -> tuple[str, float]:
    """(what the verifier reads, its reward): the last integer before the sign #, against 12."""
    read = last_integer(answer.partition("#")[0])
    return read or "nothing", float(read == GOLD)


def algorithm(beta: float) -> Algorithm:
    """GRPO with a KL of this weight; without one at 0, where a KL of weight 0 would be refused."""
    return replace(GRPO, pull=KL(coef=beta, estimator="k3", placement="loss") if beta else None)


def train(k: lab.Values) -> tuple[list[np.ndarray], list[float], list[float], list[float]]:
    """By step: (the policy's shares of the five answers after it, mean reward of the 16 that were sampled, their mean
    true worth, exact KL to the reference after it, in nats)."""
    a, policy, reference = (
        algorithm(float(k["beta"])), TabularPolicy(START[None, None]), TabularPolicy(START[None, None]),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(int(k["seed"]))
    trainer = ToyTrainer(a, policy, torch.optim.SGD(policy.parameters(), lr=1.0), SIBLINGS, int(k["seed"]))
    shares, paid, worth, kl_by_step = list[np.ndarray](), list[float](), list[float](), list[float]()
    with planted("kl_reversed" if k["reversed"] else None):
        for _ in range(STEPS):
            answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), SIBLINGS), rng)
            rewards = PAID[answers.tokens_ET[:, 0].numpy()]
            # Credit reads no KL that stands in the loss.
            credit = credit_by_pattern(replace(a, pull=None), rewards[None]).reshape(-1, 1)
            trainer.step(answers, credit, logp_of(reference, answers))
            paid.append(float(rewards.mean()))
            worth.append(float(WORTH[answers.tokens_ET[:, 0].numpy()].mean()))
            log_shares = torch.log_softmax(policy.table.detach()[0, 0], -1)
            shares.append(log_shares.exp().numpy())
            kl_by_step.append(float((log_shares.exp() * (log_shares - torch.log_softmax(START, -1))).sum()))
    return shares, paid, worth, kl_by_step


def compute(k: lab.Values) -> lab.Readout:
    read, reward = verdict(str(k["answer"]))
    shares, paid, worth, kl_by_step = train(k)
    final, reward_by_step, worth_by_step = (
        shares[-1].tolist(), [float(x @ PAID) for x in shares], [float(x @ WORTH) for x in shares],
    )  # fmt: skip
    stage = Reinforce(name="rl", algorithm=algorithm(float(k["beta"])))
    said = lab.by_rules(lab.recorded({"rollout/reward": paid, "rollout/truth": worth}), stage, "reward_without_truth")
    if k["reversed"]:
        with planted("kl_reversed"):
            said += lab.refusal(lambda: agrees_on_synthetic_batch(GRPO), "agrees_on_synthetic_batch")
    log_ratios = np.linspace(-2, 2, 41)
    curves = {e: estimate(e, torch.tensor(log_ratios)).tolist() for e in ("k1", "k2", "k3")}
    hacked = final[4] > 0.5
    return lab.Readout(
        pictures=(
            Bars("What the policy answers", SAYINGS,
                 {"at the start": torch.softmax(START, -1).tolist(), "after training": final}, low=0, high=1),
            Curve("Mean reward, and true worth", list(range(1, STEPS + 1)),
                  {"reward": reward_by_step, "true worth": worth_by_step}, low=0, high=1),
            Curve("Distance to the reference", list(range(1, STEPS + 1)), {"KL, nats": kl_by_step}, low=0),
            Curve("Three estimates of the KL from one token", log_ratios.tolist(), curves, x_label="log pi - log ref"),
        ),
        sentence=f"The verifier reads **{read}** in your answer: reward **{reward:.0f}**. After training the policy's "
        f"mean reward is **{reward_by_step[-1]:.2f}** and its answers are truly worth **{worth_by_step[-1]:.2f}**"
        + (": it has learned the list." if hacked else "."),
        values={"your reward": reward, "mean reward": reward_by_step[-1], "true worth": worth_by_step[-1],
                "KL": kl_by_step[-1], "share of the list": final[4]},
        says=said,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="03", name="reward", title="Reward, and a frozen reference", part="the framework", force="signal", minutes=8,
    question="What keeps a policy from finding the hole in its reward?",
    idea="""
        A verifier is a program that reads an answer and gives a reward. The one beside takes the last integer: type an
        answer. Verifiers have holes. In the training below a list that counts up to 12 gets 1.0 and a right answer 0.8,
        although a list is worth nothing. Training finds what gets most reward, however rare it was.

        The reference is a frozen copy of the policy at the start. The KL term pulls the policy back to it with weight
        beta. At 0 nothing holds it; far too high it cannot learn. KL(pi || ref) is not KL(ref || pi): with the
        arguments exchanged the gradient is wrong.

        From one token the KL is estimated in three ways. k1 is right on average and may be negative; k2 never is, and
        is not exact; k3 is both right on average and never negative.
    """,
    formula="""reward - beta * KL(pi || ref)
k1 = x     k2 = x^2 / 2     k3 = exp(-x) - 1 + x          x = log pi(token) - log ref(token)""",
    knobs=(
        lab.TextInput("answer", "your answer to <3+4+5>", "let me think... 12#"),
        lab.Slider("beta", "beta, weight of the KL", 1.0, 0, 3, 0.1),
        lab.Toggle("reversed", "plant a bug: the KL's arguments reversed", False),
        lab.Slider("seed", "seed", 0, 0, 10),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"beta": 0.0},
                  "Nothing holds the policy: it lists numbers. The reward rises, the true worth falls to 0.",
                  "reward_without_truth", "beta 0"),
        lab.Break({"reversed": True}, "With the arguments exchanged the gradient is wrong. Here the curves even look "
              "good: only a check tells.", "agrees_on_synthetic_batch", "KL reversed"),
    ),
    claims=(
        lab.Claim("Reward of 12#", "curriculum 03", 1.0, lambda: verdict("12#")[1]),
        lab.Claim("Reward of 120#", "curriculum 03", 0.0, lambda: verdict("120#")[1]),
    ),
    exercises=(
        lab.AskKnobs("Type an answer that holds 12 and gets reward 0.", "your reward", None, 0,
                     {"answer": "12 or 13#"}),
        lab.AskNumber("x = log pi - log ref = 0.1: what is k3?", 0.00484, why="exp(-0.1) - 1 + 0.1."),
        lab.AskChoice("beta is very large. What happens?",
                      ("It learns faster", "It stays at the reference", "The reward falls below the start"), 1,
                      why="Every move costs more than it brings."),
    ),
    code=("posttrain.algorithm.loss.reference_penalty.estimate", "posttrain.verifier.integers.last_integer"),
    docs="help/reward-rises-quality-does-not.md", command="posttrain run arithmetic algorithm=grpo pull.coef=0.04",
    grid=("beta", "reversed"),
)  # fmt: skip
