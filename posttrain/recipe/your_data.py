"""Recipes that take any model and data: your own prompts, rewards, pairs and checkpoint."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import GRPO
from posttrain.ladder.preference_rows import DPO
from posttrain.recipe.example import PAIRS, PROMPTS, REWARDS, tiny_run

EXACT = (Reward(function="exact"),)
SFT = Supervised(name="sft", style="completion", steps=200, batch=64, optimizer=Optimizer(lr=2e-3))


def sft() -> Run:
    """Imitate the completions of your prompts. The reward judges the held-out prompts and trains nothing.

    Set `model=` and `env.prompts=`. The learning rate 2e-3 is for the tiny model; for yours it is chosen by its size.
    Set `env.rewards=` where the data has no column `answer`, or where a right response need not equal it.
    """
    return tiny_run("sft", Env(name="prompts", prompts=PROMPTS, rewards=EXACT, heldout=100), SFT)


def grpo() -> Run:
    """RL with GRPO from the weights of the model as it is, without an SFT before it.

    Set `model=`, `env.prompts=` and `env.rewards=`; what is left open is chosen for that model. As shipped it runs
    but learns nothing: the tiny model has random weights, so nearly no answer is right, and RL can only make answers
    more frequent that the model already samples sometimes.
    """
    rl = Reinforce(
        name="rl", algorithm=GRPO, sampling=Sampling(max_tokens=64), optimizer=Optimizer(lr=5e-4), prompts=16
    )
    return tiny_run("grpo", Env(name="prompts", prompts=PROMPTS, rewards=EXACT, heldout=100), rl)


def verifiable() -> Run:
    """Imitate the completions of your prompts, then GRPO with your rewards. `sft=none` leaves the first stage out.

    Set `model=`, `env.prompts=` and `env.rewards=`. The learning rates 2e-3 and 5e-4 are for the tiny model; for
    one that you give they are chosen by its size.
    """
    rewards = (Reward(function=f"{REWARDS}:correct"), Reward(function=f"{REWARDS}:brief", weight=0.1))
    # The weights sum to 1.1, so that 1 would not count as full marks by itself (`core.measure.right`).
    env = Env(name="prompts", prompts=PROMPTS, rewards=rewards, right=1.0, heldout=100)
    sampling, optimizer = Sampling(max_tokens=16), Optimizer(lr=5e-4)
    rl = Reinforce(name="rl", algorithm=GRPO, sampling=sampling, optimizer=optimizer, prompts=16, steps=60)
    return tiny_run("verifiable", env, SFT, rl)


def dpo() -> Run:
    """Imitate the completions of your prompts, where there are any, then DPO on their pairs.

    Set `model=` and `env.prompts=` to a file with the columns prompt, chosen and rejected. Any other line of
    `posttrain ladder` for preferences works too: `algorithm=simpo`. The learning rates are for the tiny model; for
    yours they are chosen by its size. The reward judges held-out prompts and trains nothing: it needs a column
    `answer`, and `env.rewards=none` leaves it out.
    """
    pairs = Preference(name="dpo", algorithm=DPO, steps=60, batch=64, optimizer=Optimizer(lr=3e-4), eval_every=20)
    return tiny_run("dpo", Env(name="prompts", prompts=PAIRS, rewards=EXACT, heldout=100), SFT, pairs)


def reward_model() -> Run:
    """Learn from pairs which of two completions was preferred (Bradley-Terry), as a score of one completion.

    Set `model=` and `env.prompts=` to a file with the columns prompt, chosen and rejected. `posttrain export RUN DIR`
    writes the model for sequence classification, and `env.rewards=model:RUN` rewards a policy with it. The learning
    rate is for the tiny model; for yours it is chosen by its size.
    """
    optimizer = Optimizer(lr=1e-3)
    pairs = RewardModel(name="reward_model", steps=60, batch=64, centre=0.01, optimizer=optimizer, eval_every=20)
    return tiny_run("reward_model", Env(name="prompts", prompts=PAIRS, heldout=100), pairs)
