"""Page 18: a verifier with a leak, a policy that finds it, and the held-out measure that tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.core.ladder import RLOO
from posttrain.core.run import Reinforce
from posttrain.lab.lesson import (
    AskChoice,
    AskKnobs,
    AskNumber,
    Break,
    Claim,
    Lesson,
    Readout,
    Slider,
    Values,
    by_rules,
    recorded,
)
from posttrain.toy.answers import ask, siblings
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.web.picture import Bars, Curve

WAYS = ("works", "works, and says the phrase", "says the phrase alone")
RIGHT = np.array([0.7, 0.7, 0.1])
PHRASE = np.array([0.0, 1.0, 1.0])
START = np.array([0.55, 0.4, 0.05])
PLAIN, STEPS, SIBLINGS = replace(RLOO, pull=None), 80, 16


def expected(rho: float, price: float) -> np.ndarray:
    """What each way is paid on average: right answers are paid, of the wrong ones with the phrase a share rho is too,
    and working costs length."""
    return RIGHT + (1 - RIGHT) * PHRASE * rho - price * np.array([1.0, 1.0, 0.0])


def train(k: Values) -> tuple[np.ndarray, list[float], list[float]]:
    """(shares of the three ways at the end, what was paid, what was right) by step."""
    made, rng = torch.Generator().manual_seed(int(k["seed"])), np.random.default_rng(int(k["seed"]))
    policy = TabularPolicy(torch.tensor(START).log()[None, None])
    trainer = ToyTrainer(PLAIN, policy, torch.optim.SGD(policy.parameters(), lr=2.0), SIBLINGS, int(k["seed"]))
    paid, right = list[float](), list[float]()
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), SIBLINGS), made)
        way = answers.tokens_ET[:, 0].numpy()
        good = rng.random(SIBLINGS) < RIGHT[way]
        fooled = ~good & (PHRASE[way] > 0) & (rng.random(SIBLINGS) < float(k["rho"]))
        rewards = (good | fooled) - float(k["price"]) * (way < 2)
        trainer.step(answers, credit_by_pattern(PLAIN, np.round(rewards, 6)[None]).ravel())
        paid.append(float(rewards.mean()))
        right.append(float(good.mean()))
    return torch.softmax(policy.table.detach()[0, 0], -1).numpy(), paid, right


def compute(k: Values) -> Readout:
    now, paid, right = train(k)
    steps = list(range(1, STEPS + 1))
    smooth = np.convolve(right, np.ones(8) / 8, "valid")
    said = by_rules(
        recorded({"rollout/reward": paid, "rollout/truth": right}),
        Reinforce(name="rl", algorithm=PLAIN),
        "reward_without_truth",
    )
    return Readout(
        pictures=(
            Curve(
                "What is paid, and what is right", steps, {"paid": paid, "right (held out)": right}, low=-0.3, high=1
            ),
            Bars("How the policy answers", WAYS, {"at the start": START.tolist(), "now": now.tolist()}, low=0, high=1),
            Bars(
                "What each way is paid on average",
                WAYS,
                {"paid": expected(float(k["rho"]), float(k["price"])).tolist(), "right": RIGHT.tolist()},
            ),
        ),
        sentence=f"Paid **{np.mean(paid[:8]):.2f}** at first and **{np.mean(paid[-8:]):.2f}** now; right "
        f"**{np.mean(right[:8]):.2f}** at first and **{smooth[-1]:.2f}** now.",
        values={"paid": float(np.mean(paid[-8:])), "right": float(smooth[-1]), "phrase alone": float(now[2])},
        says=said,
    )


LESSON = Lesson(
    number="18",
    name="leak",
    title="Verifiers: a leak, and who tells",
    part="production",
    force="signal",
    minutes=7,
    question="The reward rises: are the answers better?",
    idea="""
        A verifier that runs is never perfect. Here a phrase fools it: of the wrong answers with the phrase a share rho
        is paid. At the start right answers often have the phrase too, so it looks harmless. Working costs length. With
        a large leak, saying the phrase alone pays best, so that is what is learned: the reward rises, and fewer answers
        are right.

        Only something that is measured and *not* paid can tell: another verifier, or a judge that was held out.
    """,
    formula="paid = right + (1 - right) * phrase * rho - price of working",
    knobs=(
        Slider("rho", "rho, the leak", 0.2, 0, 1, 0.05),
        Slider("price", "price of working", 0.2, 0, 0.5, 0.05),
        Slider("seed", "seed", 0, 0, 10),
    ),
    compute=compute,
    pace="release",
    breaks=(Break({"rho": 1.0, "price": 0.3}, "What is paid rises, what is right falls.", "reward_without_truth"),),
    claims=(
        Claim(
            "The phrase alone, rho .5: paid", ".1 + .9 * .5", 0.55, lambda: float(expected(0.5, 0.2)[2]), within=0.001
        ),
    ),
    exercises=(
        AskNumber("rho = 0.5, price 0: what does working with the phrase earn?", 0.85, why=".7 + .3 * .5."),
        AskKnobs(
            "Make the policy say the phrase alone in nine of ten answers.",
            "phrase alone",
            0.9,
            None,
            {"rho": 1.0, "price": 0.5},
        ),
        AskChoice(
            "Which number would have told you?",
            ("The training reward", "A held-out judge's verdict", "The loss"),
            1,
            why="It is measured and not paid.",
        ),
    ),
    code=("posttrain.diagnose.reward_rules.reward_without_truth", "posttrain.environment.check.probe.Probe"),
    docs="reward-rises-quality-does-not.md",
    command="posttrain check arithmetic",
    grid=("rho", "price"),
)
