"""Page 18: a verifier with a leak, a policy that finds it, and the held-out measure that tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import RLOO
from posttrain.toy.answers import ask, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.web.picture import Bars, Curve

WAYS = ("works it out", "works it out, says the phrase", "says the phrase alone")
RIGHT = np.array([0.7, 0.7, 0.1])
PHRASE = np.array([0.0, 1.0, 1.0])
START = np.array([0.55, 0.4, 0.05])
"""Of each way: how often it is right, whether it says the phrase, and how often the policy takes it at first."""
PLAIN, STEPS, SIBLINGS = replace(RLOO, pull=None), 80, 16


def expected(rho: float, price: float) -> np.ndarray:
    """Mean reward of each way: right answers are paid, and of the wrong ones with the phrase a share rho. Where the
    answer is worked out, the price is taken off."""
    return RIGHT + (1 - RIGHT) * PHRASE * rho - price * np.array([1.0, 1.0, 0.0])


def train(k: lab.Values) -> tuple[list[np.ndarray], list[float], list[float]]:
    """(shares of the three ways, mean reward of 16 answers, share of them that is right) by step."""
    generator, rng = torch.Generator().manual_seed(int(k["seed"])), np.random.default_rng(int(k["seed"]))
    policy = TabularPolicy(torch.tensor(START).log()[None, None])
    trainer = ToyTrainer(PLAIN, policy, torch.optim.SGD(policy.parameters(), lr=2.0), SIBLINGS, int(k["seed"]))
    shares, mean_rewards, right_shares = list[np.ndarray](), list[float](), list[float]()
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), SIBLINGS), generator)
        way = answers.tokens_ET[:, 0].numpy()
        is_right = rng.random(SIBLINGS) < RIGHT[way]
        leaked = ~is_right & (PHRASE[way] > 0) & (rng.random(SIBLINGS) < float(k["rho"]))
        rewards = (is_right | leaked) - float(k["price"]) * (way < 2)  # the first two ways work it out
        trainer.step(answers, credit_by_pattern(PLAIN, np.round(rewards, 6)[None]).ravel())
        mean_rewards.append(float(rewards.mean()))
        right_shares.append(float(is_right.mean()))
        shares.append(torch.softmax(policy.table.detach()[0, 0], -1).numpy())
    return shares, mean_rewards, right_shares


def compute(k: lab.Values) -> lab.Readout:
    shares, mean_rewards, right_shares = train(k)
    last, steps = shares[-1], list(range(STEPS + 1))
    mean_pay = expected(float(k["rho"]), float(k["price"]))
    reward, truth = ([float(p @ x) for p in (START, *shares)] for x in (mean_pay, RIGHT))
    messages = lab.by_rules(
        lab.recorded({"rollout/reward": mean_rewards, "rollout/truth": right_shares}),
        Reinforce(name="rl", algorithm=PLAIN),
        "reward_without_truth",
    )
    return lab.Readout(
        pictures=(
            Curve("Mean reward, and share of right answers", steps, {"reward": reward, "right (held out)": truth},
                  low=0, high=1),
            Bars("How the policy answers", WAYS, {"at the start": START.tolist(), "now": last.tolist()}, low=0, high=1),
            Bars("Each way: its mean reward, and how often it is right", WAYS,
                 {"reward": mean_pay.tolist(), "right": RIGHT.tolist()}),
        ),
        sentence=f"Mean reward **{reward[0]:.2f}** at first and **{reward[-1]:.2f}** after training; right answers "
        f"**{truth[0]:.0%}** at first and **{truth[-1]:.0%}** after training.",
        values={"reward": reward[-1], "right": truth[-1], "phrase alone": float(last[2])},
        says=messages,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="18", name="leak", title="Verifiers: a leak, and who tells", part="production", force="signal", minutes=7,
    question="The reward rises: are the answers better?",
    idea="""
        No verifier is perfect. This one has a leak: of the wrong answers that hold a certain phrase it accepts a share
        rho. At the start right answers often hold the phrase too, so it looks harmless. To work the answer out takes
        many tokens, for which a price is taken off the reward. With a large leak and a price the phrase alone gets the
        most reward, so that is what is learned: the reward rises, and fewer answers are right.

        Only something that is measured and is *not* the reward can tell: another verifier, or a judge that was held
        out.
    """,
    formula="reward = right + (1 - right) * phrase * rho - price of working it out",
    knobs=(
        lab.Slider("rho", "rho, the leak", 0.2, 0, 1, 0.05),
        lab.Slider("price", "price of working it out", 0.2, 0, 0.5, 0.05),
        lab.Slider("seed", "seed", 0, 0, 10),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"rho": 1.0, "price": 0.3}, "The reward rises, the share of right answers falls.",
                  "reward_without_truth"),
    ),
    claims=(
        lab.Claim("The phrase alone, rho .5: mean reward", ".1 + .9 * .5", 0.55,
                  lambda: float(expected(0.5, 0.2)[2]), within=0.001),
    ),
    exercises=(
        lab.AskNumber("rho = 0.5, price 0: what is the mean reward of working it out and saying the phrase?", 0.85,
                      why=".7 + .3 * .5."),
        lab.AskKnobs("Make the policy say the phrase alone in nine of ten answers.", "phrase alone", 0.9, None,
                     {"rho": 1.0, "price": 0.5}),
        lab.AskChoice("Which number would have told you?",
                      ("The training reward", "A held-out judge's verdict", "The loss"), 1,
                      why="It is measured and not paid."),
    ),
    code=("posttrain.diagnose.rules.reward_rules.reward_without_truth", "posttrain.environment.check.probe.Probe"),
    docs="help/reward-rises-quality-does-not.md", command="posttrain check arithmetic", grid=("rho", "price"),
)  # fmt: skip
