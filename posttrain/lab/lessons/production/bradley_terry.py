"""Page 15: a reward model from comparisons of four responses, and a policy that goes too far with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.run import Reinforce
from posttrain.core.exchange.scores import Rewards, TokenScores
from posttrain.core.streams import WEIGHT
from posttrain.lab import lesson as lab
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import RLOO
from posttrain.toy.answers import ask, logp_of, siblings
from posttrain.toy.enumerated_policy import PrefixPolicy
from posttrain.toy.pairs import AnswerPair, batch_of_pairs
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_in_full
from posttrain.web.picture import Bars, Curve

NAMES = ("A", "B", "C", "D")
TRUE = np.array([0.0, 1.0, 2.0, 2.5])
START = torch.tensor([0.4, 0.35, 0.2, 0.05], dtype=torch.float64)
STEPS, SIBLINGS = 80, 16
"""`TRUE`: the worth of each response, which people compare by. `START`: how often the policy gives each at first."""


def sigmoid(x: float) -> float:
    return float(torch.sigmoid(torch.tensor(x, dtype=torch.float64)))


def comparisons(count: int, seed: int) -> list[AnswerPair]:
    """Pairs of responses (chosen, rejected) as people with Bradley and Terry's taste judge them."""
    rng = np.random.default_rng(seed)
    pairs = list[AnswerPair]()
    for _ in range(count):
        i, j = rng.choice(4, 2, replace=False).tolist()
        i_preferred = rng.random() < sigmoid(float(TRUE[i] - TRUE[j]))
        pairs.append(((i,), (j,)) if i_preferred else ((j,), (i,)))
    return pairs


def fit(pairs: list[AnswerPair], eta: float) -> tuple[np.ndarray, list[float]]:
    """(the score of each response, the loss before each step) of 60 steps by the library's loss of reward models."""
    score = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    batch = batch_of_pairs(PrefixPolicy(0, vocabulary=4, longest=1), pairs)
    batch = batch.having({WEIGHT: np.full(batch.spoken, 1 / len(pairs))})
    response = torch.as_tensor(batch.target_M, dtype=torch.int64)
    losses = list[float]()
    for _ in range(60):
        scores = score[response]
        terms = RankingLoss().terms(batch, TokenScores(None, None, None, rewards=Rewards(scores, scores[:, None])))
        losses.append(float(terms.loss.detach()))
        with torch.no_grad():
            score.sub_(eta * torch.autograd.grad(terms.loss, score)[0])
    return score.detach().numpy(), losses


def optimise(score: np.ndarray, beta: float, seed: int) -> tuple[list[np.ndarray], list[float], list[float]]:
    """(policy, mean of 16 learned rewards, mean of their true worth) by step, of RLOO on the learned score with this
    KL."""
    # A KL of weight 0 is refused, so beta 0 is no KL.
    a = replace(RLOO, pull=KL(coef=beta, estimator="k1", placement="reward") if beta else None)
    policy, reference = TabularPolicy(START.log()[None, None]), TabularPolicy(START.log()[None, None])
    trainer = ToyTrainer(a, policy, torch.optim.SGD(policy.parameters(), lr=0.3), SIBLINGS, seed)
    generator, learned, worth = torch.Generator().manual_seed(seed), list[float](), list[float]()
    policies = list[np.ndarray]()
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.zeros(1, dtype=torch.int64), SIBLINGS), generator)
        responses, reference_logp = answers.tokens_ET[:, 0].numpy(), logp_of(reference, answers)
        learned.append(float(score[responses].mean()))
        worth.append(float(TRUE[responses].mean()))
        trainer.step(answers, credit_in_full(a, score[responses][None], answers, reference_logp), reference_logp)
        policies.append(torch.softmax(policy.table.detach()[0, 0], -1).numpy())
    return policies, learned, worth


def agreement(score: np.ndarray) -> float:
    """Share of the six pairs that the model orders as the truth does; equal scores are no order."""
    pairs = [(i, j) for i in range(4) for j in range(i)]
    return float(np.mean([(score[i] > score[j]) == (TRUE[i] > TRUE[j]) for i, j in pairs]))


def compute(k: lab.Values) -> lab.Readout:
    pairs = comparisons(int(k["count"]), int(k["seed"]))
    score, losses = fit(pairs, float(k["eta"]))
    policies, learned, worth = optimise(score, float(k["beta"]), int(k["seed"]))
    steps = list(range(1, STEPS + 1))
    messages = lab.by_rules(
        lab.recorded({"rollout/reward": learned, "rollout/truth": worth}),
        Reinforce(name="rl", algorithm=RLOO),
        "reward_without_truth",
    )
    shifted = score - score.mean() + TRUE.mean()  # only differences are learned
    learned_mean, true_mean = ([float(p @ x) for p in policies] for x in (shifted, TRUE))
    return lab.Readout(
        pictures=(
            Bars("Score of each response", NAMES, {"true": TRUE.tolist(), "learned": shifted.tolist()}),
            Curve("Loss of the reward model", list(range(60)), {"loss": losses}, low=0),
            Bars("How often the policy gives each response", NAMES,
                 {"at the start": START.tolist(), "trained": policies[-1].tolist()}, low=0, high=1),
            Curve("The policy's mean score while it trains", steps, {"true": true_mean, "learned": learned_mean}),
        ),
        sentence=f"From **{k['count']}** comparisons the model orders **{agreement(score):.0%}** of the pairs rightly. "
        f"Trained on its scores, the policy is truly worth **{true_mean[-1]:.2f}**; the best response is worth 2.5.",
        values={"agreement": agreement(score), "loss": losses[-1], "true worth": true_mean[-1]},
        says=messages,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="15", name="rlhf", title="RLHF: a reward model, and too much of it", part="production", force="signal",
    minutes=8,
    question="What does a model of people's taste know, and what happens if a policy is trained hard on it?",
    idea="""
        People say which of two responses is better. A reward model learns from that. Bradley and Terry's model gives
        each response a score; the probability that one is preferred is the sigmoid of the difference. Only differences
        are learned, so adding the same number to all scores changes nothing.

        Then a policy is trained with these scores as rewards. After few comparisons they may order responses wrongly. A
        policy that the KL does not hold back (beta near 0) goes where the score is high, whatever it is worth.
    """,
    formula="P(i better than j) = sigmoid(s_i - s_j)          loss = -log sigmoid(s_chosen - s_rejected)",
    knobs=(
        lab.Slider("count", "comparisons", 200, 2, 500, log=True),
        lab.Slider("eta", "step size of the reward model", 1.0, 0.1, 5.0, log=True),
        lab.Slider("beta", "beta, weight of the KL", 0.2, 0, 2, 0.1),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"count": 3, "beta": 0.0, "eta": 5.0, "seed": 1},
                  "Three comparisons: the policy runs to a response that was overrated.", None),
    ),
    claims=(
        lab.Claim("sigmoid(1)", "curriculum 15", 0.73, lambda: sigmoid(1.0), within=0.01),
        lab.Claim("sigmoid(3)", "curriculum 15", 0.95, lambda: sigmoid(3.0), within=0.01),
        lab.Claim("Loss before anything is learned", "log 2", 0.6931, lambda: fit(comparisons(50, 0), 0.3)[1][0],
                  within=0.001),
    ),
    exercises=(
        lab.AskNumber("Scores 2 and 1: how often is the first preferred?", 0.731, why="sigmoid(1)."),
        lab.AskKnobs("With at most three comparisons, bring the true worth below 1.5.", "true worth", None, 1.5,
                     {"count": 3, "beta": 0.0, "eta": 5.0, "seed": 1}),
        lab.AskChoice("All scores rise by 10. What changes?", ("The loss", "Nothing", "The order"), 1,
                      why="Only differences are read."),
    ),
    code=("posttrain.algorithm.preference.reward_model_loss.RankingLoss",
          "posttrain.algorithm.credit.step_credit.credit_step"),
    docs="guides/reward-models.md", command="posttrain run rlhf", grid=("count", "beta"),
)  # fmt: skip
