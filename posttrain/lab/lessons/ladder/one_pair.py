"""Page L5: DPO on one pair of a small policy, and what it does to pairs that it never saw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from posttrain.lab import lesson as lab
from posttrain.ladder.preference_rows import DPO
from posttrain.toy.pairs import AnswerPair, TiedPolicy
from posttrain.toy.preference_steps import descend, gap
from posttrain.web.picture import Bars, Curve

SHARES = [0.2, 0.3, 0.3, 0.2]
"""Probabilities of the end, of two words, and of a filler word."""
TAUGHT: AnswerPair = ((1, 2, 0), (1, 3, 2, 0))
"""The same answer without and with a filler: the shorter one is preferred."""
UNSEEN: tuple[AnswerPair, ...] = (
    ((1, 0), (1, 3, 0)), ((2, 0), (3, 2, 0)), ((2, 1, 0), (2, 3, 1, 0)), ((1, 1, 0), (1, 3, 1, 3, 0)),
    ((2, 2, 0), (2, 2, 3, 0)), ((1, 2, 1, 0), (3, 1, 2, 1, 0)),
)  # fmt: skip


def train(k: lab.Values) -> tuple[TiedPolicy, TiedPolicy, list[float]]:
    """(policy, reference, gap of the taught pair before each step and at the end)."""
    policy, reference = TiedPolicy(SHARES), TiedPolicy(SHARES)
    if not k["beta"]:  # refused, as the page says: nothing is trained
        return policy, reference, [0.0] * (int(k["steps"]) + 1)
    a = replace(DPO, beta=float(k["beta"]))
    return policy, reference, descend(a, policy, reference, [TAUGHT], steps=int(k["steps"]), lr=float(k["eta"]))


def compute(k: lab.Values) -> lab.Readout:
    policy, reference, path = train(k)
    gaps = [gap(policy, reference, pair) for pair in UNSEEN]
    right = float(np.mean([x > 0 for x in gaps]))
    margin = float(k["beta"]) * path[-1]
    names = [f"pair {i + 1}" for i in range(len(UNSEEN))]
    return lab.Readout(
        pictures=(
            Curve("Margin of the pair that is taught (beta * gap)", list(range(len(path))),
                  {"margin": [float(k["beta"]) * x for x in path]}),
            Bars("Probability of each token", ("end", "word a", "word b", "filler"),
                 {"before": SHARES, "after": policy.shares().tolist()}, low=0, high=1),
            Bars("Gap of six pairs that were never shown", names, {"gap, nats": gaps}),
        ),
        sentence=f"With {k['steps']} steps the margin is **{margin:.2f}**, and **{right:.0%}** of the unseen pairs "
        f"are ordered rightly. The filler went from **{SHARES[3]:.2f}** to **{policy.shares()[3]:.2f}**.",
        values={"margin": margin, "unseen pairs right": right, "filler": float(policy.shares()[3])},
        says=lab.refusal(lambda: replace(DPO, beta=float(k["beta"]))),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="L5", name="pair", title="DPO: one pair, and those it never saw", part="the ladder", force="signal",
    minutes=5,
    question="How far does one comparison reach?",
    idea="""
        In the ladder the policy can already answer. One comparison says which of two answers is better: here the same
        one without a filler word. DPO raises the gap of that pair. Because the weights are shared, pairs that were
        never shown move too: the policy says fewer fillers everywhere. That is why few comparisons can teach a style,
        and why a wrong one spoils more than itself.

        A small beta lets the policy go far from the reference before the loss is content.
    """,
    formula="-log sigmoid( beta * gap )        margin = beta * gap",
    knobs=(
        lab.Slider("beta", "beta", 0.1, 0.0, 2.0, 0.05),
        lab.Slider("eta", "step size", 1.0, 0.05, 20.0, log=True),
        lab.Slider("steps", "steps", 60, 1, 200),
    ),
    compute=compute,
    breaks=(lab.Break({"beta": 0.0}, "With beta 0 the loss does not read the policy.", "ConfigError"),),
    claims=(
        lab.Claim("Loss of a pair at the start", "2305.18290", 0.6931, lambda: float(np.log(2)), within=0.001),
    ),
    exercises=(
        lab.AskNumber("The gap is 4 nats and beta 0.25: what is the margin?", 1.0, why="0.25 * 4."),
        lab.AskKnobs("Bring the filler below 0.002.", "filler", None, 0.002, {"eta": 20.0}),
        lab.AskChoice("Why do unseen pairs move?", ("They are in the batch", "They share its weights", "By chance"),
                      1, why="The same weights make their tokens."),
    ),
    code=("posttrain.algorithm.preference.preference_loss.PreferenceLoss",
          "posttrain.ladder.preference_algorithm.PreferenceAlgorithm"),
    docs="reference/preferences.md", command="posttrain run dpo dpo.algorithm.beta=0.1", grid=("beta", "eta"),
)  # fmt: skip
