"""Page 22c: sampling runs ahead of learning. What that saves in time, and what old samples cost in learning."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch

from posttrain.config.stages.reinforce import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import DECOUPLED, GRPO
from posttrain.plan.throughput import Times
from posttrain.toy.answers import ask, logp_of, siblings
from posttrain.toy.sums import Sums
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.web.picture import Bars, Curve

WORLD, GROUPS, G, STEPS = Sums(), 8, 8, 80
SAMPLER, WEIGHED, NOTHING = "clip against the sampler", "weigh by the ratio", "nothing: old samples count as new"
RULES = {SAMPLER: replace(GRPO, pull=None, anchor="behaviour"), WEIGHED: DECOUPLED, NOTHING: replace(GRPO, pull=None)}
TURNS, AT_ONCE, MEANWHILE = "in turn", "at once", "at once, weights sent meanwhile"
LR = 0.01


@dataclass
class Trained:
    """By step: accuracy of the newest weights, reward of the samples, |log ratio| to their sampler, clipped share."""

    accuracy: list[float] = field(default_factory=list[float])
    reward: list[float] = field(default_factory=list[float])
    gap: list[float] = field(default_factory=list[float])
    clipped: list[float] = field(default_factory=list[float])


@cache
def train(rule: str, ahead: int, lr: float = LR, seed: int = 0) -> Trained:
    """Each step learns from answers of the weights of `ahead` steps before; the first ones of the first weights."""
    a, out, rng = RULES[rule], Trained(), torch.Generator().manual_seed(seed)
    policy = WORLD.taught(seed, hidden=64, steps=300, right=0.3)
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=lr), G, seed)
    past = deque([deepcopy(policy)], maxlen=ahead + 1)  # the last `ahead` + 1 policies: the first of them samples
    for _ in range(STEPS):
        answers = ask(past[0], siblings(torch.randint(WORLD.prompts, (GROUPS,), generator=rng), G), rng)
        rewards = WORLD.rewards(answers, G)
        out.gap.append(float((logp_of(policy, answers) - answers.mu_ET).abs().mean()))
        out.reward.append(float(rewards.mean()))
        gauges = trainer.step(answers, credit_by_pattern(a, rewards).ravel())
        past.append(deepcopy(policy))
        out.accuracy.append(WORLD.accuracy(policy))
        out.clipped.append(gauges["policy/clip_low"].mean + gauges["policy/clip_high"].mean if gauges else 0.0)
    return out


def wall() -> int:
    """The smallest K of some at which 80 steps end .05 below those with fresh samples; 32 where none of them does."""
    fresh = train(SAMPLER, 0).accuracy[-1]
    return next((k for k in (1, 2, 4, 8, 16) if train(SAMPLER, k).accuracy[-1] < fresh - 0.05), 32)


def seconds(k: lab.Values, way: str) -> float:
    """Seconds of a step with this placement; judging and the reference take none here."""
    times = Times(float(k["rollout"]), 0, 0, float(k["learn"]), float(k["sync"]))
    return times.step("colocated" if way == TURNS else "asynchronous", hidden_sync=way == MEANWHILE)


def compute(k: lab.Values) -> lab.Readout:
    way = str(k["way"])
    ahead = 0 if way == TURNS else int(k["ahead"])
    trained, fresh = (train(str(k["rule"]), n, float(k["lr"]), int(k["seed"])) for n in (ahead, 0))
    step_seconds, in_turn = seconds(k, way), seconds(k, TURNS)
    moments, step_numbers = np.linspace(step_seconds, STEPS * step_seconds, 40), np.arange(1, STEPS + 1)
    accuracy = {TURNS: np.interp(moments, step_numbers * in_turn, fresh.accuracy).tolist()}
    accuracy |= {} if way == TURNS else {
        f"{way}, K = {ahead}": np.interp(moments, step_numbers * step_seconds, trained.accuracy).tolist()}  # fmt: skip
    busy = {"engines": float(k["rollout"]) / step_seconds, "learner": float(k["learn"]) / step_seconds}
    gap, clipped = float(np.mean(trained.gap)), float(np.mean(trained.clipped))
    ways = (TURNS, AT_ONCE, MEANWHILE)
    series = {"rollout/reward": trained.reward, "rollout/solved": trained.reward}
    return lab.Readout(
        pictures=(
            Curve("Accuracy by time", (moments / 60).round(2).tolist(), accuracy, x_label="minutes", low=0, high=1),
            Curve("How old samples differ from the newest weights", step_numbers[::2].tolist(),
                  {"mean |log ratio|": trained.gap[::2], "clipped share": trained.clipped[::2]}, low=0),
            Bars("Seconds of a step", ways, {"seconds": [seconds(k, w) for w in ways]}, low=0),
        ),
        sentence=f"A step takes **{step_seconds:.0f} s** (in turn {in_turn:.0f}): engines work "
        f"**{busy['engines']:.0%}** of it, the learner **{busy['learner']:.0%}**. Samples are up to **{ahead}** "
        f"steps old, their mean |log ratio| is **{gap:.2f}** nats and **{clipped:.0%}** of the tokens are clipped. "
        f"After {STEPS} steps accuracy is **{trained.accuracy[-1]:.2f}**, with fresh samples "
        f"**{fresh.accuracy[-1]:.2f}**.",
        values={"seconds": step_seconds, "accuracy": trained.accuracy[-1], "log ratio": gap, "clipped": clipped,
                "learner waits": 1 - busy["learner"]},
        says=lab.by_rules(lab.recorded(series), Reinforce(name="rl"), "collapse"),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="22c", name="ahead", title="Asynchrony: how far may it run ahead?", part="the engineer", force="cost",
    minutes=7,
    question="Engines that do not wait for the learner are faster: what do their old samples cost?",
    idea="""
        In turn, engines wait while the learner works, and it waits for them. At once both work side by side and the
        longer counts, but a sample is then from weights of K steps ago (its *staleness*).

        The policy has moved since. The ratio of its probability now to the sampler's says by how much. Three ways to
        treat that: *clip* against the sampler, so that tokens that moved far push no more; *weigh* each token by the
        ratio; or nothing, which learns from answers as if they were its own and breaks first.

        How old is too old depends on how fast the policy moves. With .4 of the learning rate 8 steps cost nothing
        here.
    """,
    formula="in turn: R + T + S      at once: max(R, T) + S      weights sent meanwhile: max(R, T)",
    knobs=(
        lab.Options("way", "placement", AT_ONCE, (TURNS, AT_ONCE, MEANWHILE)),
        lab.Slider("ahead", "K: steps ahead", 2, 1, 32, log=True),
        lab.Options("rule", "old samples", SAMPLER, tuple(RULES)),
        lab.Slider("lr", "learning rate", LR, 0.002, 0.02, log=True),
        lab.Slider("rollout", "R: sampling, s", 20, 1, 60, 1),
        lab.Slider("learn", "T: learning, s", 8, 1, 60, 1),
        lab.Slider("sync", "S: sending weights, s", 3, 0, 20, 1),
        lab.Slider("seed", "seed", 0, 0, 5),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"ahead": 16, "rule": NOTHING, "lr": 0.02},
                  "It learns from answers of weights that are long gone, as if they were its own: it ends by guessing.",
                  "collapse", "old samples count as new"),
        lab.Break({"ahead": 32},
                  "The clip holds it, and half of the tokens push no more: it learns less from each step.", None,
                  "too far ahead"),
    ),
    claims=(
        lab.Claim("Unsourced: samples are too old from so many steps on", "curriculum 22c", 6, wall, within=0.4,
                  why="At this learning rate; at .004 it is beyond 16. The distance counts, not the number of steps."),
        lab.Claim("Unsourced: mean |log ratio| of healthy training, below", "curriculum 22c", 0.05,
                  lambda: float(np.mean(train(SAMPLER, 2).gap)),
                  why="Two steps ahead it learns as from fresh samples, and the distance is more than twice that."),
        lab.Claim("Unsourced: clipped share that is too much", "curriculum 22c", 0.25,
              lambda: float(np.mean(train(SAMPLER, wall()).clipped)), why="Ours where it begins to cost accuracy."),
    ),
    exercises=(
        lab.AskNumber("R = 20 s, T = 8 s, S = 3 s, at once, weights sent meanwhile: how many seconds?", 20,
                      why="The longer of 20 and 8; the 3 s are hidden."),
        lab.AskKnobs("Run ahead and clip less than 5 % of the tokens.", "clipped", None, 0.05,
                     {"ahead": 1, "lr": 0.004}),
        lab.AskChoice("What makes samples of 8 steps ago harmless?",
                      ("A larger batch", "A policy that moves slowly", "More engines"), 1,
                      why="What counts is how far the policy has moved since."),
    ),
    code=("posttrain.plan.throughput.Times", "posttrain.plan.staleness.capacity"),
    docs="guides/staleness.md", command="posttrain run arithmetic rl.staleness=2", grid=("ahead", "rule"),
)  # fmt: skip
