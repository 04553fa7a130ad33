"""Page 04: the credit of three rewards under five algorithms."""

from __future__ import annotations

import numpy as np

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import GroupMean
from posttrain.ladder.policy_rows import DR_GRPO, GRPO, REINFORCE, RLOO
from posttrain.toy.episodes import rewarded
from posttrain.web.picture import Bars

CENTRED = patch(REINFORCE, "centred", "Williams 1992", baseline=GroupMean())
ALGORITHMS = {"REINFORCE": REINFORCE, "centred": CENTRED, "RLOO": RLOO, "Dr.GRPO": DR_GRPO, "GRPO": GRPO}
NAMES = ("first", "second", "third")


def credit(a: Algorithm, *rewards: float) -> list[float]:
    """Credit of each sibling: that of its one token."""
    step_credit = credit_step(a, rewarded(rewards), max_tokens=20, ema=0.0)
    return [float(e.advantage[0][0]) for e in step_credit.groups[0].episodes]


def compute(k: lab.Values) -> lab.Readout:
    rewards = [float(k[n]) for n in NAMES]
    credits = {name: credit(a, *rewards) for name, a in ALGORITHMS.items()}
    silent = not any(credits["GRPO"])
    mean = float(np.mean(rewards))
    gauges = {
        "rollout/reward": mean, "rollout/mixed": float(not silent), "rollout/solved": float(np.mean(rewards) == 1),
        "credit/silent": float(silent), "rollout/truncated": 0.0, "policy/kl_step": 0.0,
    }  # fmt: skip
    # Equal steps, more of them than the rules of rewards look back.
    steps = lab.recorded({name: [x] * 8 for name, x in gauges.items()})
    pushed_up = " and ".join(n for n, x in zip(NAMES, credits["GRPO"], strict=True) if x > 0)
    return lab.Readout(
        pictures=(
            Bars("Reward", NAMES, {"reward": rewards}, low=0, high=1, marks={"mean": mean}),
            # Without Dr.GRPO: it has no scale, so its bars would be those of "centred".
            Bars("Credit of each answer, by algorithm", NAMES,
                 {n: credits[n] for n in ("REINFORCE", "centred", "RLOO", "GRPO")}),
            Bars("Sum of the credit", tuple(credits), {"sum over the three": [sum(x) for x in credits.values()]}),
        ),
        sentence="All three are equal: whoever compares siblings says **nothing**. "
        f"REINFORCE's credit of each is **{mean:.2f}**."
        if silent
        else f"The mean is **{mean:.2f}**. Whoever compares siblings pushes up what lies above it "
        f"(**{pushed_up}**) and down what lies below; REINFORCE pushes up everything that was paid.",
        values={"mean": mean, "GRPO, first": credits["GRPO"][0], "RLOO, first": credits["RLOO"][0]},
        says=lab.by_rules(steps, Reinforce(name="rl", algorithm=GRPO, siblings=3)),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="04", name="credit", title="Credit: compared with what?", part="the framework", force="estimator", minutes=5,
    question="An answer was paid 0.5: is that a reason to say more of it?",
    idea="""
        An algorithm is two functions: credit, and a loss. Credit makes one number A of each answer's reward (papers say
        advantage). The gradient of the answer's log-prob is multiplied by A: above 0 the answer is pushed up, below 0
        down. REINFORCE takes the reward itself, so every answer with a reward is pushed up. All others subtract what
        was to be expected, the baseline: the mean of the siblings (centred, GRPO, Dr.GRPO), or the mean of the *other*
        siblings (RLOO). GRPO also divides by the standard deviation.

        Where siblings are compared, credit sums to 0: what one gains the others lose. If all rewards are equal, it is
        exactly 0, whatever they are.
    """,
    formula="A = (r - baseline) / scale          r: reward of the answer",
    knobs=tuple(
        lab.Slider(n, f"reward of the {n}", d, 0, 1, 0.05) for n, d in zip(NAMES, (1.0, 0.5, 0.0), strict=True)
    ),
    compute=compute,
    breaks=(
        lab.Break(dict.fromkeys(NAMES, 1.0), "1, 1, 1: every comparison gives 0.", "reward_is_constant", "1, 1, 1"),
        lab.Break(dict.fromkeys(NAMES, 0.0), "0, 0, 0: REINFORCE is silent too.", "too_hard", "0, 0, 0"),
    ),
    claims=(
        lab.Claim("RLOO over centred at three siblings: 3/2", "RLOO 2402.14740", 1.5,
                  lambda: credit(RLOO, 1, 0, 0)[0] / credit(CENTRED, 1, 0, 0)[0]),
        lab.Claim("Rewards 1, .5, 0: GRPO's credit of the first", "0.5 / std 0.5", 1.0,
                  lambda: credit(GRPO, 1, 0.5, 0)[0]),
    ),
    exercises=(
        lab.AskNumber("Rewards 1, 0, 0: RLOO's credit of the first?", 1.0, why="1 minus the mean of the others, 0."),
        lab.AskChoice("Rewards .5, .5, .5: who pushes?", ("GRPO", "RLOO", "REINFORCE", "nobody"), 2,
                      why="It compares with nothing."),
        lab.AskKnobs("Make GRPO push the first answer down by at least 0.5.", "GRPO, first", None, -0.5,
                     {"first": 0.0}),
    ),
    code=("posttrain.algorithm.credit.step_credit.credit_step", "posttrain.algorithm.credit.baseline_values.centred"),
    docs="reference/algorithms.md", command="posttrain ladder --diff reinforce rloo", grid=("first", "second"),
)  # fmt: skip
