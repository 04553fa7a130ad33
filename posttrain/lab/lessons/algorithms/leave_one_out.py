"""Page 12: RLOO beside centred credit, that of GRPO without its division by the standard deviation."""

from __future__ import annotations

import numpy as np

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import DR_GRPO, RLOO
from posttrain.toy.episodes import rewarded
from posttrain.web.picture import Bars, Curve

SIBLINGS = tuple(range(2, 17))


def credit(a: Algorithm, rewards: list[float]) -> list[float]:
    """Credit of each sibling: that of its one token."""
    step_credit = credit_step(a, rewarded(rewards), max_tokens=20, ema=0.0)
    return [float(e.advantage[0][0]) for e in step_credit.groups[0].episodes]


def ratio(k: int) -> float:
    """RLOO's credit over the centred one, of one right answer among k >= 2. Dr.GRPO's credit is the centred one."""
    rewards = [1.0, *[0.0] * (k - 1)]
    return credit(RLOO, rewards)[0] / credit(DR_GRPO, rewards)[0]


def compute(k: lab.Values) -> lab.Readout:
    # There are never more right answers than siblings, whatever the other knob says.
    count, right = int(k["K"]), min(int(k["right"]), int(k["K"]))
    rewards = [1.0] * right + [0.0] * (count - right)
    rloo, centred = credit(RLOO, rewards), credit(DR_GRPO, rewards)
    names = [f"{i + 1}" for i in range(count)]
    factor = count / (count - 1) if count > 1 else 1.0  # 1: a group of one has no factor
    refused = lab.refusal(lambda: Reinforce(name="rl", algorithm=RLOO, siblings=count))
    return lab.Readout(
        pictures=(
            Bars("Credit of each sibling", names,
                 {"minus the others' mean (RLOO)": rloo, "minus the mean (centred)": centred}),
            Curve("RLOO over centred, by siblings", SIBLINGS, {"ratio": [ratio(n) for n in SIBLINGS]}, x_label="K",
                  low=1, at=count),
        ),
        sentence=f"**{right} of {count}** right. RLOO's credit is **{factor:.3g}** times the centred one: the "
        "direction is the same, as if only the learning rate differed."
        if count > 1
        else "A group of **1**: there is nothing to compare with, and credit is 0.",
        values={"ratio": factor, "credit of the first": rloo[0], "largest": float(np.max(np.abs(rloo)))},
        says=refused,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="12", name="rloo", title="RLOO: compare with the others alone", part="the algorithms", force="estimator",
    minutes=4,
    question="Should an answer count in the mean that it is compared with?",
    idea="""
        If the mean holds the answer's own reward (centred credit), an answer is partly compared with itself, and its
        credit comes out too small. RLOO leaves it out: the baseline is the mean of the other siblings, which makes the
        estimate of the gradient unbiased. In one group the two differ by a factor alone, K / (K - 1): 2 at two
        siblings, 8/7 at eight. GRPO's division by the standard deviation is another matter: it differs from prompt to
        prompt, so it changes which prompts count.
    """,
    formula="A_i = r_i - mean of the others = K / (K - 1) * (r_i - mean of all)",
    knobs=(lab.Slider("K", "K, siblings", 4, 1, 16), lab.Slider("right", "right answers", 1, 0, 16)),
    compute=compute,
    breaks=(
        lab.Break({"K": 1}, "A group of one has no others: its credit is exactly 0, whatever it earned.",
                  "ConfigError"),
    ),
    claims=tuple(
        lab.Claim(f"K / (K - 1) at K = {n}", "curriculum 12", c, lambda n=n: ratio(n))
        for n, c in ((2, 2.0), (4, 4 / 3), (8, 8 / 7))
    ),
    exercises=(
        lab.AskNumber("Eight siblings, one is right: what is RLOO's credit of a wrong one?", -1 / 7, why="0 - 1/7."),
        lab.AskKnobs("Find the ratio 1.25.", "ratio", 1.24, 1.26, {"K": 5}),
        lab.AskChoice("Which of these differs from RLOO by more than the learning rate?",
                      ("centred credit", "GRPO", "twice RLOO's credit"), 1,
                      why="GRPO divides each prompt by its own standard deviation."),
    ),
    code=("posttrain.algorithm.credit.baseline_values.centred",),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=rloo rl.siblings=8",
    grid=("K", "right"),
)  # fmt: skip
