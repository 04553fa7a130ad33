"""SFT, then RL on the same prompts: your own prompts, your own rewards, your own checkpoint."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.example import PROMPTS, REWARDS, TINY


def verifiable() -> Run:
    """Imitate the completions of your prompts, then GRPO with your rewards. `sft=none` leaves the first stage out.

    Set `model=`, `env.prompts=` and `env.rewards=`. The learning rates 2e-3 and 5e-4 are for the tiny model; for
    one that you give they are chosen by its size.
    """
    return Run(
        recipe="verifiable",
        threads=1,
        model=TINY,
        env=Env(
            name="prompts",
            prompts=PROMPTS,
            rewards=(Reward(function=f"{REWARDS}:correct"), Reward(function=f"{REWARDS}:brief", weight=0.1)),
            # The weights sum to 1.1, so that 1 would not count as full marks by itself (`core.measure.right`).
            right=1.0,
            heldout=100,
        ),
        stages=(
            Supervised(name="sft", style="completion", steps=200, batch=64, optimizer=Optimizer(lr=2e-3)),
            Reinforce(
                name="rl",
                algorithm=GRPO,
                sampling=Sampling(max_tokens=16),
                optimizer=Optimizer(lr=5e-4),
                prompts=16,
                siblings=8,
                steps=60,
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
