"""Page 11: the credit of a group of siblings under GRPO."""

from __future__ import annotations

import numpy as np

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.episodes import rewarded
from posttrain.web.picture import Bars

NAMES = ("a", "b", "c", "d")


def credit(*rewards: float) -> tuple[np.ndarray, bool]:
    """(GRPO's credit of each sibling, whether the group is silent)."""
    group = credit_step(GRPO, rewarded(rewards), max_tokens=20, ema=0.0).groups[0]
    return np.array([e.advantage[0][0] for e in group.episodes]), group.silent


def said_of(rewards: list[float], silent: bool) -> tuple[lab.Speech, ...]:
    """Returns the messages of a run whose groups all look like this one."""
    mean, solved = float(np.mean(rewards)), float(np.mean([r == 1 for r in rewards]))
    # A share of groups is 0 or 1, as all are this one. Eight steps are more than the rules look back.
    steps = {"rollout/reward": mean, "rollout/mixed": 0.0 if silent else 1.0, "rollout/solved": solved}
    steps |= {"credit/silent": float(silent), "rollout/truncated": 0.0, "policy/kl_step": 0.0}
    history = lab.recorded({name: [x] * 8 for name, x in steps.items()})
    return lab.by_rules(history, Reinforce(name="rl", algorithm=GRPO, siblings=4))


def compute(k: lab.Values) -> lab.Readout:
    rewards = [float(k[n]) for n in NAMES]
    credits, silent = credit(*rewards)
    mean, std = float(np.mean(rewards)), float(np.std(rewards, ddof=1))
    over_k = credits * std / np.std(rewards) if not silent else credits
    best = NAMES[int(np.argmax(credits))]
    sentence = (
        f"All rewards are equal, so the group is **silent**: credit is 0, and pushes no token. Mean **{mean:.3g}**."
        if silent
        else f"Mean **{mean:.3g}**, std **{std:.3g}**: the largest push up, of {best}, is "
        f"**{credits.max():+.3g}** a token."
    )
    return lab.Readout(
        pictures=(
            Bars("Reward of each sibling", NAMES, {"reward": rewards}, marks={"mean": mean}),
            Bars("Credit of each sibling", NAMES, {"std over K - 1 (ours)": list(credits), "std over K": list(over_k)},
                 low=-2, high=2),
        ),
        sentence=sentence,
        values={"mean": mean, "std over K - 1": std, "std over K": float(np.std(rewards)),
                "largest": float(credits.max())},
        says=said_of(rewards, silent),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="11", name="grpo", title="GRPO: a group is its own baseline", part="the algorithms", force="estimator",
    minutes=6,
    question="Four answers to one prompt: which of them is pushed up, and how hard?",
    idea="""
        Nobody knows how hard a prompt is. GRPO asks it K times, and the mean reward of the siblings is the baseline:
        what was to be expected. What is left is divided by their standard deviation, so that hard and easy prompts push
        equally hard.

        Two things follow. If all siblings have one reward, there is nothing to learn: the group is silent. And one
        lucky answer among many wrong ones gets a very large push.

        The standard deviation divides by K - 1 (ddof 1, as here) or by K (ddof 0, as in some papers). That changes all
        credit by one factor.
    """,
    formula="A = (r - mean(r)) / std(r)          exactly 0 where all rewards are equal",
    knobs=tuple(
        lab.Slider(n, f"reward of {n}", of, 0, 1, 0.05) for n, of in zip(NAMES, (1.0, 0.0, 0.0, 0.0), strict=True)
    ),
    compute=compute,
    breaks=(
        lab.Break(dict.fromkeys(NAMES, 1.0), "All answers are right, and the push is gone.", "reward_is_constant",
                  "all right"),
        lab.Break(dict.fromkeys(NAMES, 0.0), "No answer is right, and the push is gone.", "too_hard", "all wrong"),
    ),
    claims=(
        lab.Claim("[1, 0, 1, 0]: credit of a right one, ddof 0", "curriculum 14", 1.0, lambda: _ddof0(1, 0, 1, 0)[0]),
        lab.Claim("[1, 1, 1, 0]: credit of a right one, ddof 0", "curriculum 14", 0.58, lambda: _ddof0(1, 1, 1, 0)[0]),
        lab.Claim("[1, 1, 1, 0]: credit of the wrong one, ddof 0", "curriculum 14", -1.74,
                  lambda: _ddof0(1, 1, 1, 0)[3]),
    ),
    exercises=(
        lab.AskNumber("Rewards 1, 0, 0, 0: what is the credit of the right one?", 1.5, why="(1 - 1/4) / 0.5 = 1.5."),
        lab.AskChoice("All four rewards are 1. What does the group teach?",
                      ("To say more of the same", "Nothing", "To say less of it"), 1,
                      why="Without spread credit is exactly 0."),
        lab.AskKnobs("Move the knobs until the largest credit is below 0.9.", "largest", None, 0.9, {"b": 1.0}),
    ),
    code=("posttrain.algorithm.credit.step_credit.credit_step", "posttrain.algorithm.credit.baseline_values.centred"),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=grpo rl.siblings=4", grid=("a", "b"),
)  # fmt: skip


def _ddof0(*rewards: float) -> np.ndarray:
    ours, _ = credit(*rewards)
    return ours * np.std(rewards, ddof=1) / np.std(rewards)
