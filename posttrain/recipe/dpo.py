"""Direct preference optimisation on your own pairs."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Run, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.ladder.preference_rows import DPO
from posttrain.recipe.example import PAIRS, TINY


def dpo() -> Run:
    """Imitate the completions of your prompts, where there are any, then DPO on their pairs.

    Set `model=` and `env.prompts=` to a file with the columns prompt, chosen and rejected. Any other line of
    `posttrain ladder` for preferences works too: `algorithm=simpo`. The learning rates are for the tiny model; for
    yours they are chosen by its size. The reward judges held-out prompts and trains nothing: it needs a column
    `answer`, and `env.rewards=none` leaves it out.
    """
    return Run(
        recipe="dpo",
        threads=1,
        model=TINY,
        env=Env(name="prompts", prompts=PAIRS, rewards=(Reward(function="exact"),), heldout=100),
        stages=(
            Supervised(name="sft", style="completion", steps=200, batch=64, optimizer=Optimizer(lr=2e-3)),
            Preference(name="dpo", algorithm=DPO, steps=60, batch=64, optimizer=Optimizer(lr=3e-4), eval_every=20),
        ),
        evaluation=Evaluation(samples=4),
    )
