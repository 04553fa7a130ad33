"""A reward model of your own pairs."""

from __future__ import annotations

from posttrain.config.env import Env
from posttrain.config.run import Evaluation, Optimizer, Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.recipe.example import PAIRS, TINY


def reward_model() -> Run:
    """Learn from pairs which of two completions was preferred (Bradley-Terry), as a score of one completion.

    Set `model=` and `env.prompts=` to a file with the columns prompt, chosen and rejected. `posttrain export RUN DIR`
    writes the model for sequence classification, and `env.rewards=model:RUN` rewards a policy with it. The learning
    rate is for the tiny model; for yours it is chosen by its size.
    """
    return Run(
        recipe="reward_model",
        threads=1,
        model=TINY,
        env=Env(name="prompts", prompts=PAIRS, heldout=100),
        stages=(
            RewardModel(
                name="reward_model",
                steps=60,
                batch=64,
                centre=0.01,
                optimizer=Optimizer(lr=1e-3),
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
