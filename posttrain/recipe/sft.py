"""Supervised fine-tuning on your own prompts with completions."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Run, Supervised
from posttrain.recipe.example import PROMPTS, TINY


def sft() -> Run:
    """Imitate the completions of your prompts. The reward judges the held-out prompts and trains nothing.

    Set `model=` and `env.prompts=`. The learning rate 2e-3 is for the tiny model; for yours it is chosen by its size.
    Set `env.rewards=` where the data has no column `answer`, or where a right response need not equal it.
    """
    return Run(
        recipe="sft",
        threads=1,
        model=TINY,
        env=Env(name="prompts", prompts=PROMPTS, rewards=(Reward(function="exact"),), heldout=100),
        stages=(Supervised(name="sft", style="completion", steps=200, batch=64, optimizer=Optimizer(lr=2e-3)),),
        evaluation=Evaluation(samples=4),
    )
