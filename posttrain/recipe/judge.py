"""A generative judge: imitation of judgements, two in five of them wrong, then RL on pairs whose better side is
known."""

from __future__ import annotations

from posttrain.config.env import Env
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.example import TINY


def judge() -> Run:
    """Learn to write judgements, two in five of which end in the verdict that does not follow (sft), then learn which
    verdict is right, by RL with the reward rule of J1 (rl, 2505.10320).

    The pairs come from the world `replies`, whose utility is hidden from the policy. Held-out accuracy is the agreement
    with it, over pairs that are in no training step, each in both orders. Other rules: `env.args.format=rm_r1`, `grm`,
    `genrm`. What it trained judges other policies: `env.rewards=judge:PATH`.
    """
    return Run(
        recipe="judge",
        threads=1,
        model=TINY,
        env=Env(name="judge", heldout=200),
        stages=(
            Supervised(
                name="sft",
                style="critique",
                wrong=0.4,
                steps=500,
                batch=64,
                optimizer=Optimizer(lr=4e-3, warmup=20, schedule="cosine", horizon=500),
            ),
            Reinforce(
                name="rl",
                algorithm=GRPO,
                sampling=Sampling(max_tokens=48),
                optimizer=Optimizer(lr=7e-4, warmup=5),
                prompts=32,
                siblings=8,
                steps=50,
                eval_every=25,
            ),
        ),
        evaluation=Evaluation(samples=2),
    )
