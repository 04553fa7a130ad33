"""Page L6: is a task right for GRPO? Fifty rollouts tell."""

from __future__ import annotations

import numpy as np

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.episodes import rewarded
from posttrain.toy.training import credit_by_pattern, mixed
from posttrain.web.picture import Bars, Curve

SHARES = np.round(np.linspace(0.01, 0.99, 50), 3)  # of right answers: the places at which the curves are drawn


def dead(p: float, k: int) -> float:
    """Share of groups of k siblings that all have one reward."""
    return p**k + (1 - p) ** k


def verdict(p: float) -> str:
    return (
        "too hard: below 5 %"
        if p < 0.05
        else "too easy: above 95 %"
        if p > 0.95
        else ("productive: 10 to 80 %" if 0.1 <= p <= 0.8 else "at the edge")
    )


def compute(k: lab.Values) -> lab.Readout:
    p, count, rng = float(k["p"]), int(k["K"]), np.random.default_rng(int(k["seed"]))
    fifty = (rng.random(50) < p).astype(float)
    group = (rng.random(count) < p).astype(float)
    credit = credit_step(GRPO, rewarded(group.tolist()), max_tokens=1, ema=0.0).groups[0]
    advantages = [float(e.advantage[0][0]) for e in credit.episodes]
    # What a run of eight steps with 16 prompts each would record, drawn at this share of right answers.
    steps: dict[str, list[float]] = {
        n: [] for n in ("rollout/reward", "rollout/solved", "rollout/mixed", "credit/silent")
    }
    credit_size = list[float]()
    for _ in range(8):
        rewards = (rng.random((16, count)) < p).astype(float)
        with_spread = float(mixed(rewards).mean())
        for name, x in zip(steps, (rewards.mean(), rewards.mean(), with_spread, 1 - with_spread), strict=True):
            steps[name].append(float(x))
        credit_size.append(float(np.abs(credit_by_pattern(GRPO, rewards)).mean()))
    gauges = {**steps, "rollout/truncated": [0.0] * 8, "credit/advantage_abs": credit_size}
    messages = lab.by_rules(lab.recorded(gauges), Reinforce(name="rl", algorithm=GRPO, siblings=count))
    return lab.Readout(
        pictures=(
            Bars("Credit of one group", [f"{i + 1}: {r:.0f}" for i, r in enumerate(group)], {"advantage": advantages}),
            Curve("Dead groups, and what a group teaches", SHARES.tolist(),
                  {"dead groups": [dead(float(x), count) for x in SHARES],
                   "p (1 - p), times 4": [4 * float(x) * (1 - float(x)) for x in SHARES]},
                  x_label="share of right answers", low=0, high=1, at=p),
        ),
        sentence=f"**{int(fifty.sum())} of 50** rollouts are right: {verdict(float(fifty.mean()))}. Of groups of "
        f"{count} **{dead(p, count):.0%}** are dead.",
        values={"right of 50": float(fifty.sum()), "dead groups": dead(p, count), "signal": 4 * p * (1 - p)},
        says=messages,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="L6", name="fifty", title="GRPO: the test of fifty rollouts", part="the ladder", force="signal", minutes=5,
    question="Before RL is started: is this task neither too hard nor too easy?",
    idea="""
        GRPO learns from differences between siblings. If the policy is nearly never right, or nearly always, the
        siblings of a prompt mostly have one reward: their group is dead (silent). Sample fifty answers first and count:
        between 10 and 80 percent right is productive, below 5 percent little will be learned, above 95 percent little
        is left to learn. Where the policy is right at times, more siblings make fewer dead groups.
    """,
    formula="dead = p^K + (1 - p)^K            signal of a prompt ~ p (1 - p)",
    knobs=(
        lab.Slider("p", "share of right answers", 0.3, 0.0, 1.0, 0.01),
        lab.Slider("K", "K, siblings", 8, 2, 32),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute,
    breaks=(
        lab.Break({"p": 0.0}, "Nothing is right: every group is dead.", "too_hard", "nothing right"),
        lab.Break({"p": 1.0}, "Everything is right: every group is dead.", "reward_is_constant", "all right"),
    ),
    claims=(
        lab.Claim("Dead groups at p = .05, K = 8", "p^K + (1-p)^K", 0.663, lambda: float(
            1 - mixed((np.random.default_rng(0).random((20_000, 8)) < 0.05).astype(float)).mean())),
        lab.Claim("Dead groups at p = .9, K = 4", "curriculum 13", 0.656, lambda: dead(0.9, 4), within=0.005),
    ),
    exercises=(
        lab.AskNumber("p = .5, K = 2: how many groups are dead?", 0.5, why=".25 + .25."),
        lab.AskKnobs("With at least one right answer in ten, bring dead groups below 5 %.", "dead groups", None,
                     0.05, {"p": 0.3, "K": 16}),
        lab.AskChoice("2 of 50 are right. What is done first?", ("More steps", "SFT, or easier tasks", "A larger step"),
                  1, why="Where nearly nothing is right, most groups have nothing to compare."),
    ),
    code=("posttrain.algorithm.credit.step_credit.credit_step", "posttrain.diagnose.rules.reward_rules.too_hard"),
    docs="help/reward-is-flat.md", command="posttrain eval runs/mine", grid=("p", "K"),
)  # fmt: skip
