"""GRPO alone, on a model that you give."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.example import PROMPTS, TINY


def grpo() -> Run:
    """RL with GRPO from the weights of the model as it is, without an SFT before it.

    Set `model=`, `env.prompts=` and `env.rewards=`; what is left open is chosen for that model. As shipped it runs
    but learns nothing: the tiny model has random weights, so nearly no answer is right, and RL can only make answers
    more frequent that the model already samples sometimes.
    """
    return Run(
        recipe="grpo",
        threads=1,
        model=TINY,
        env=Env(name="prompts", prompts=PROMPTS, rewards=(Reward(function="exact"),), heldout=100),
        stages=(
            Reinforce(
                name="rl",
                algorithm=GRPO,
                sampling=Sampling(max_tokens=64),
                optimizer=Optimizer(lr=5e-4),
                prompts=16,
                siblings=8,
                steps=100,
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
