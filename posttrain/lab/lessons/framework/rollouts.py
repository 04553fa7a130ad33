"""Page 02: siblings, temperature, and when the log-prob of a token must be written down."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import Answers, ask, logp_of, siblings
from posttrain.toy.one_sum import sum_policy, text
from posttrain.toy.training import batch_of, credit_by_pattern, loss_of
from posttrain.verifier.integers import last_integer
from posttrain.web.picture import Curve, TextTile, Tiles

STEPS, UPDATES = 6, 4
PROMPT = torch.zeros(1, dtype=torch.int64)


def sample(k: lab.Values, rng: torch.Generator, skill: float) -> Answers:
    """K answers to <3+4+5>, drawn at this temperature."""
    policy = sum_policy(12, skill)
    return ask(policy, siblings(PROMPT, int(k["K"])), rng, lambda logits: logits / float(k["temperature"]))


def reward(answers: Answers) -> np.ndarray:
    """1 where the last integer of an answer is 12."""
    return np.array([float(last_integer(text(t).partition("#")[0]) == last_integer("12")) for t in answers.tokens_ET])


def drift(recompute: bool, seed: int) -> tuple[list[float], tuple[lab.Speech, ...]]:
    """(KL to the old log-probs before each update of the last step that had credit, in nats a token; what a run says)
    of six steps with four updates. With `recompute` the old log-probs are those of the policy of now."""
    policy, rng = sum_policy(12, 0.4), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    kl_by_step, shown, credit_sizes = list[float](), list[float](), list[float]()
    for _ in range(STEPS):
        answers = ask(policy, siblings(PROMPT, 8), rng)
        credit = credit_by_pattern(GRPO, reward(answers)[None]).ravel()
        start, kl_by_update = logp_of(policy, answers), list[float]()
        for _ in range(UPDATES):
            old = logp_of(policy, answers) if recompute else start
            # The policy at the start of the step stands for the reference of GRPO's KL too.
            loss, gauges = loss_of(GRPO, batch_of(GRPO, answers, credit, 8, old, start), policy, answers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kl_by_update.append(gauges["policy/kl_start"].mean)
        kl_by_step.append(float(np.mean(kl_by_update)))
        shown = kl_by_update if credit.any() or not shown else shown  # a silent group moves nothing
        credit_sizes.append(float(np.abs(credit).mean()))
    steps = {"policy/kl_start": kl_by_step, "optim/steps": [float(UPDATES)] * STEPS,
             "credit/advantage_abs": credit_sizes}  # fmt: skip
    stage = Reinforce(name="rl", algorithm=GRPO, epochs=UPDATES)
    return shown, lab.by_rules(lab.recorded(steps), stage, "old_policy_is_the_new_one")


def said_of(groups: list[np.ndarray]) -> tuple[lab.Speech, ...]:
    """Returns the messages of a run on the rewards of eight steps with 25 of these groups each."""
    reward_by_step = np.array([g.mean() for g in groups]).reshape(8, -1).mean(1)
    mixed_by_step = np.array([g.max() > g.min() for g in groups]).reshape(8, -1).mean(1)
    steps = {"rollout/reward": reward_by_step, "rollout/solved": reward_by_step,  # equal, as rewards are 0 or 1
             "rollout/mixed": mixed_by_step, "credit/silent": 1 - mixed_by_step}  # fmt: skip
    stage = Reinforce(name="rl", algorithm=GRPO, siblings=len(groups[0]))
    history = lab.recorded({name: x.tolist() for name, x in steps.items()} | {"rollout/truncated": [0.0] * 8})
    return lab.by_rules(history, stage, "reward_is_constant", "too_easy", "too_hard")


def compute(k: lab.Values) -> lab.Readout:
    rng = torch.Generator().manual_seed(int(k["seed"]))
    answers = sample(k, rng, float(k["skill"]))
    rewards = reward(answers)
    rows = {
        f"sibling {i + 1}, reward {r:.0f}": [
            TextTile(text(t[None]), "good" if r else "bad", round(float(p), 3), note="log-prob when it was said")
            for t, p in zip(answers.tokens_ET[i], answers.mu_ET[i], strict=True)
        ]
        for i, r in enumerate(rewards[:8])  # of up to 16
    }
    groups = [reward(sample(k, rng, float(k["skill"]))) for _ in range(200)]
    silent = float(np.mean([g.max() == g.min() for g in groups]))
    kl_by_update, said = drift(bool(k["recompute"]), int(k["seed"]))
    return lab.Readout(
        pictures=(
            Tiles("Answers to <3+4+5>; below each token its log-prob", rows, {"good": "right", "bad": "wrong"}),
            Curve("How far the loss sees the policy move from the one that sampled", list(range(1, UPDATES + 1)),
                  {"KL, nats": kl_by_update}, x_label="update on the same rollouts", low=0),
        ),
        sentence=f"**{rewards.mean():.0%}** of these siblings are right (std **{rewards.std():.2f}**). Of 200 such "
        f"groups **{silent:.0%}** are silent: one reward for all.",
        values={"mean": float(rewards.mean()), "silent groups": silent, "moved at the last update": kl_by_update[-1]},
        says=(*said, *said_of(groups)),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="02", name="rollout", title="Rollout: write the log-prob down", part="the framework", force="cost",
    minutes=7,
    question="What must be kept of an answer at the moment it is sampled?",
    idea="""
        A rollout is an answer that the policy sampled. Several optimizer steps (updates) learn from the same rollouts,
        so the policy moves away from the one that sampled them. The loss must know how far: it compares each token's
        log-prob of now with the one *at the moment when the token was drawn*, at the same temperature. Their ratio
        starts at 1. If the old log-prob is computed again after each update, both are the same, the ratio stays 1, and
        nothing stops a token that has gone too far.

        Several answers to one prompt are siblings, a group. They are compared with one another (page 04): if all have
        one reward, the group is silent and teaches nothing. At a low temperature with few siblings nearly all groups
        are silent.
    """,
    formula="""ratio_t = exp( log pi_now(token) - log pi_then(token) )
the prompt <3+4+5> asks for a sum; an answer ends with #; right is 12#""",
    knobs=(
        lab.Slider("K", "K, siblings", 4, 2, 16),
        lab.Slider("temperature", "temperature", 1.0, 0.1, 2.0, 0.1),
        lab.Slider("skill", "how sure the policy is of each digit", 0.7, 0.1, 0.95, 0.05),
        lab.Toggle("recompute", "compute the old log-probs again after each update", False),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"recompute": True}, "The policy is compared with itself: the distance is 0 and the ratio 1 at every "
              "update, although the policy moves.", "old_policy_is_the_new_one", "old log-probs computed again"),
        lab.Break({"temperature": 0.1, "K": 2}, "All groups have one reward: nothing is learned from them.",
                  "reward_is_constant", "temperature 0.1, two siblings"),
    ),
    claims=(
        lab.Claim("Silent groups of 4 siblings, each right with probability .9", "curriculum 13", 0.656,
                  lambda: 0.9**4 + 0.1**4, within=0.005),
    ),
    exercises=(
        lab.AskNumber("Two siblings, each right with probability 1/2: which share of the groups is silent?", 0.5,
                      why="Both right or both wrong: 1/4 + 1/4."),
        lab.AskKnobs("Bring the share of silent groups below 5 %.", "silent groups", None, 0.05, {"K": 16}),
        lab.AskChoice("Which log-prob is `pi_then` in the ratio?",
                      ("The one at sampling", "The one after the update", "That of the most probable token"), 0,
                      why="It says under which policy the token was drawn."),
    ),
    code=("posttrain.role.rollout.Rollout.episode", "posttrain.core.transcript.Transcript.say"),
    docs="guides/sampling.md", command="posttrain run arithmetic rl.siblings=8 rl.sampling.temperature=1.0",
    grid=("K", "temperature"),
)  # fmt: skip
