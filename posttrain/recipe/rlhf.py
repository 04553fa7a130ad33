"""Reinforcement learning from human feedback: imitation, a reward model, and RL against it."""

from __future__ import annotations

from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.sampling import Sampling
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.example import TINY


def rlhf() -> Run:
    """Imitate replies, most of which are bad (sft), learn from pairs which reply judges prefer (reward_model), and
    learn with GRPO to be preferred, with a KL to the imitation (rl), as in 2203.02155.

    The judges' taste is known to the world `replies`, and no stage reads it: `env.measured=true` reports it beside the
    reward model's score. So over-optimisation shows: the score rises and the taste does not. PPO with the KL in the
    reward, as in that paper: `rl.algorithm=ppo rl.pull=kl rl.pull.estimator=k1 rl.pull.placement=reward`.
    """
    return Run(
        recipe="rlhf",
        threads=1,
        model=TINY,
        env=Env(
            name="replies",
            args={"max_number": 9},
            heldout=200,
            rewards=(Reward(function="model:stage:reward_model"),),
            measured=True,
        ),
        stages=(
            Supervised(
                name="sft", style="reply", wrong=0.8, steps=200, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20)
            ),
            RewardModel(
                name="reward_model",
                # RL goes on with the policy that imitated, not with the reward model's weights.
                hands_on=False,
                steps=250,
                batch=64,
                centre=0.01,
                optimizer=Optimizer(lr=2e-3),
                eval_every=50,
            ),
            Reinforce(
                name="rl",
                algorithm=patch(GRPO, "grpo", "2402.03300", pull=KL(coef=0.5)),
                sampling=Sampling(max_tokens=32),
                optimizer=Optimizer(lr=5e-4, warmup=5),
                prompts=32,
                siblings=8,
                steps=60,
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
