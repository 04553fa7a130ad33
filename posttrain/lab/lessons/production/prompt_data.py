"""Page 18a: which prompts are worth a rollout."""

from __future__ import annotations

import numpy as np

from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.training import credit_by_pattern, mixed
from posttrain.web.picture import Bars, Curve

PROMPTS, TRIED = 1000, 8  # TRIED: tries of each prompt that measure its pass rate
STAGES = ("source", "legal", "checks", "unique", "rate", "mix", "filter", "reuse")
HEALTHY = (1.0, 0.98, 0.95, 0.9)
"""Shares that the first four stages keep in a healthy pipeline (our choice: they do not depend on the knobs)."""


def shares(strength: float) -> np.ndarray:
    """The policy's share of right answers for each prompt. Difficulties are spread by two logits, 12 points of strength
    are one logit, and a policy of strength 50 solves a prompt of mean difficulty half of the time."""
    difficulty = np.random.default_rng(7).normal(0, 2, PROMPTS)  # fixed, as 3 and 11 below: `seed` draws the steps
    return 1 / (1 + np.exp(difficulty - (strength - 50) / 12))


def kept(p: np.ndarray, curation: float) -> np.ndarray:
    """Whether each prompt stays, bool [P]. All stay of which some of eight tries are right and some are wrong. Of the
    others `curation` percent are thrown away."""
    rng = np.random.default_rng(3)
    tries = rng.binomial(TRIED, p)
    useful = (tries > 0) & (tries < TRIED)
    return useful | (rng.random(PROMPTS) >= curation / 100)


def wasted(strength: float, curation: float, k: int) -> tuple[float, int, float]:
    """(share of rollouts in groups without spread, prompts kept, mean |credit| of a rollout)."""
    p = shares(strength)
    p = p[kept(p, curation)]
    rewards = (np.random.default_rng(11).random((len(p), k)) < p[:, None]).astype(float)
    credit = credit_by_pattern(GRPO, rewards)
    return float(1 - mixed(rewards).mean()), len(p), float(np.abs(credit).mean())


def compute(k: lab.Values) -> lab.Readout:
    strength, curation, siblings = float(k["strength"]), float(k["curation"]), int(k["K"])
    waste, remaining, signal = wasted(strength, curation, siblings)
    p = shares(strength)
    stays = kept(p, curation)
    edges = np.linspace(0, 1, 11)
    before, after = (np.histogram(x, edges)[0].astype(float).tolist() for x in (p, p[stays]))
    flow = [PROMPTS * float(np.prod(HEALTHY[: i + 1])) for i in range(4)]
    share = remaining / PROMPTS
    # The pass rate (`rate`) leaves a share and the mix all of it; then the filter leaves groups with spread.
    flow += [flow[-1] * share] * 2 + [flow[-1] * share * (1 - waste)] * 2
    # What a run of eight steps with 32 of the kept prompts each would record.
    rng = np.random.default_rng(int(k["seed"]))
    steps: dict[str, list[float]] = {
        n: [] for n in ("rollout/solved", "rollout/reward", "rollout/mixed", "credit/silent")
    }
    for _ in range(8):
        drawn = rng.choice(p[stays], 32)
        rewards = (rng.random((32, siblings)) < drawn[:, None]).astype(float)
        with_spread = float(mixed(rewards).mean())
        for name, x in zip(steps, (rewards.mean(), rewards.mean(), with_spread, 1 - with_spread), strict=True):
            steps[name].append(float(x))
    messages = lab.by_rules(
        lab.recorded({**steps, "rollout/truncated": [0.0] * 8}),
        Reinforce(name="rl", algorithm=GRPO, siblings=siblings),
        "too_hard",
        "too_easy",
    )
    return lab.Readout(
        pictures=(
            Bars("Prompts by the policy's share of right answers", [f"{x:.1f}" for x in edges[:-1]],
                 {"all": before, "kept": after}),
            Curve("Wasted rollouts, by the strength of the policy", list(range(0, 101, 10)),
                  {"no curation": [wasted(s, 0, siblings)[0] for s in range(0, 101, 10)], "as set": [wasted(s, curation,
                  siblings)[0] for s in range(0, 101, 10)]}, x_label="strength", low=0, high=1, at=strength),
            Bars("What is left after each of eight stages", STAGES, {"prompts": flow}),
        ),
        sentence=f"By pass rate **{remaining}** of {PROMPTS} prompts stay. **{waste:.0%}** of the rollouts are in "
        "groups without spread: they were asked for nothing.",
        values={"kept": float(remaining), "wasted": waste, "credit a rollout": signal},
        says=messages,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="18a", name="data", title="Prompts: which are worth a rollout?", part="production", force="signal",
    minutes=7,
    question="How many rollouts are wasted on prompts that teach nothing?",
    idea="""
        Prompts pass eight stages before they are trained on: a source, legal questions, checks that a verifier works on
        them, only unique ones (no duplicates, no test questions), the pass rate, mixing, a filter while training, and
        reuse. The pass rate decides most: a prompt that is always or never solved has groups without spread. Eight
        tries with the policy itself show it. As the policy grows stronger, other prompts become the useful ones, so
        this is measured again.
    """,
    formula="signal of a prompt ~ p (1 - p)        keep those with 0 < right of 8 tries < 8",
    knobs=(
        lab.Slider("strength", "strength of the policy", 50, 0, 100, 5),
        lab.Slider("curation", "curation: useless prompts thrown away, %", 50, 0, 100, 5),
        lab.Slider("K", "K, siblings", 8, 2, 32),
        lab.Slider("seed", "seed", 0, 0, 10),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"strength": 0, "curation": 0, "K": 2},
                  "A weak policy on all prompts: nearly every rollout is wasted.", None, "weak policy"),
        lab.Break({"strength": 100, "curation": 0}, "A strong policy on all prompts: nearly all are solved.",
                  "too_easy", "strong policy"),
    ),
    claims=(
        lab.Claim("Unsourced: waste at strength 0, curation 20", "curriculum 18a", 0.4, lambda: wasted(0, 20, 8)[0],
                  within=0.2, why="It depends on how difficulties are spread; here two logits."),
        lab.Claim("Unsourced: waste at strength 80, curation 80 below .15", "curriculum 18a", 0.15,
              lambda: wasted(80, 80, 8)[0], within=1.0, why="Solved prompts that slip through eight tries remain."),
    ),
    exercises=(
        lab.AskNumber("Which p has the largest p (1 - p)?", 0.5, why="Its derivative 1 - 2p is 0 there."),
        lab.AskKnobs("Bring wasted rollouts below 10 %.", "wasted", None, 0.1, {"curation": 100, "K": 32}),
        lab.AskChoice("The policy doubles its pass rate. What has to be done with the data?",
                      ("Nothing", "Measure pass rates again", "Add easy prompts"), 1,
                      why="Other prompts are useful now."),
    ),
    code=("posttrain.algorithm.credit.step_credit.credit_step", "posttrain.diagnose.rules.reward_rules.too_easy"),
    docs="guides/batch-sizes.md", command="posttrain run arithmetic algorithm=dapo filter=mixed",
    grid=("strength", "curation"),
)  # fmt: skip
