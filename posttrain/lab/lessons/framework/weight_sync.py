"""Page 06: what happens when new weights reach the sampler only every n steps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch

from posttrain.checks.sampling.sampler_checks import said_by_these_weights
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import ask, logp_of, siblings
from posttrain.toy.episodes import PlainEpisode, scored_group
from posttrain.toy.sums import Sums
from posttrain.toy.training import ToyTrainer, credit_by_pattern
from posttrain.web.picture import Curve, Gantt, Tone

WORLD, GROUPS, G, STEPS = Sums(), 16, 8, 40
PLAIN = replace(GRPO, pull=None)
ANCHORS = {
    "the sampler's log-probs": replace(PLAIN, anchor="behaviour"),
    "nothing: old samples count as new": PLAIN,
}
HEALTHY = {"every": 8, "anchor": "the sampler's log-probs", "lr": 0.004, "seed": 0}
"""The setting whose clipped share the claim is compared with."""


def train(k: lab.Values) -> dict[str, list[float]]:
    """By step: accuracy of the newest weights, mean |log ratio| against the sampler, clipped share, age of samples."""
    a, every = ANCHORS[str(k["anchor"])], int(k["every"])
    policy = WORLD.taught(int(k["seed"]), hidden=64, steps=300, right=0.3)
    rng = torch.Generator().manual_seed(int(k["seed"]))
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=float(k["lr"])), G, int(k["seed"]))
    by_step: dict[str, list[float]] = {"accuracy": [], "gap": [], "clipped": [], "age": []}
    sampler = deepcopy(policy)
    for step in range(STEPS):
        if step % every == 0:
            sampler = deepcopy(policy)
        answers = ask(sampler, siblings(torch.randint(WORLD.prompts, (GROUPS,), generator=rng), G), rng)
        by_step["gap"].append(float((logp_of(policy, answers) - answers.mu_ET).abs().mean()))
        gauges = trainer.step(answers, credit_by_pattern(a, WORLD.rewards(answers, G)).ravel())
        by_step["accuracy"].append(WORLD.accuracy(policy))
        clipped = gauges["policy/clip_low"].mean + gauges["policy/clip_high"].mean if gauges else 0.0
        by_step["clipped"].append(clipped)
        by_step["age"].append(float(step % every))
    return by_step


def checked(every: int) -> None:
    """The check of a run that promised fresh samples, at the step before the next sync. The tokens there carry version
    0, and the learner holds version `every - 1`. Raises InvariantError where these differ."""
    step = every - 1
    token = PlainEpisode(1.0, [[1]], np.full(1, -1.0), version=np.zeros(1, np.int32))
    said_by_these_weights([scored_group("a", [token, token]).group], (step,))


def compute(k: lab.Values) -> lab.Readout:
    by_step, every = train(k), int(k["every"])
    steps = list(range(1, STEPS + 1))
    tones: tuple[Tone, Tone] = ("two", "one")
    syncs = list[tuple[float, float, str, Tone]]()
    for i in range(0, 12, every):  # the chart shows 12 steps, the spans between syncs in two colours by turns
        syncs.append((float(i), float(min(i + every, 12)), f"version {i}", tones[i // every % 2]))
    return lab.Readout(
        pictures=(
            Curve("Accuracy of the newest weights", steps, {"accuracy": by_step["accuracy"]}, low=0, high=1),
            Curve("Distance between sampler and learner", steps,
                  {"mean |log ratio|": by_step["gap"], "clipped share": by_step["clipped"]}, low=0),
            Gantt("Weights in the first 12 steps", {
                "learner": [(float(i), i + 1.0, f"{i}", "three") for i in range(12)], "sampler": syncs}, unit="step"),
        ),
        sentence=f"Samples are up to **{every - 1}** steps old. The mean |log ratio| is "
        f"**{np.mean(by_step['gap']):.3f}** nats, "
        f"**{np.mean(by_step['clipped']):.0%}** of the tokens are clipped, and accuracy ends at "
        f"**{by_step['accuracy'][-1]:.2f}**.",
        values={"accuracy": by_step["accuracy"][-1], "log ratio": float(np.mean(by_step["gap"])),
                "clipped": float(np.mean(by_step["clipped"]))},
        says=lab.refusal(lambda: checked(every), "said_by_these_weights"),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="06", name="sync", title="Weight sync: how old may a sample be?", part="the framework", force="cost",
    minutes=6,
    question="What if the sampler gets new weights only every few steps?",
    idea="""
        The trainer changes the weights; the sampler needs them. Sending them takes time, so it is tempting to do it
        less often. Then answers come from an older policy. The ratio of the two grows. A token that credit has pushed
        out of [0.8, 1.2] is pushed no further (the clip), and what is left learns more slowly. If nobody compares with
        the sampler, old samples count as new, and training can break.

        So weights have versions, every token carries the version that said it, and each step checks that the versions
        are those that were promised.
    """,
    formula="|log rho| = | log pi_learner - log pi_sampler |      clipped: rho > 1.2 with A > 0, rho < 0.8 with A < 0",
    knobs=(
        lab.Slider("every", "send weights every n steps", 1, 1, 16),
        lab.Options("anchor", "the ratio compares with", "the sampler's log-probs", tuple(ANCHORS)),
        lab.Slider("lr", "learning rate", 0.004, 0.001, 0.02, log=True),
        lab.Slider("seed", "seed", 0, 0, 5),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"every": 16, "lr": 0.01}, "The sampler is up to 15 steps behind: many tokens are clipped.",
                  "said_by_these_weights"),
    ),
    claims=(
        lab.Claim("Unsourced: clipped share of healthy training, 10 to 26 %", "curriculum 06", 0.18,
                  lambda: float(np.mean(train(HEALTHY)["clipped"])), within=0.45),
    ),
    exercises=(
        lab.AskNumber("Weights are sent every 5 steps. How many steps old is the oldest sample?", 4,
                      why="The step before the next sync uses weights of 4 steps ago."),
        lab.AskKnobs("Clip more than 20 % of the tokens.", "clipped", 0.2, None, {"every": 16, "lr": 0.01}),
        lab.AskChoice("Where is the version kept?", ("In the trainer", "With every token", "In the file name"), 1,
                      why="So a sample says itself how old it is."),
    ),
    code=("posttrain.role.sync.Sync", "posttrain.checks.sampling.sampler_checks.said_by_these_weights"),
    docs="design/weight-sync.md", command="posttrain run arithmetic rl.staleness=1", grid=("every", "anchor"),
)  # fmt: skip
