"""A generative judge: imitation of critiques, half of which are wrong, then RL on pairs whose better side is known."""

from __future__ import annotations

from posttrain.core.env import Env
from posttrain.core.ladder import GRPO
from posttrain.core.run import Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling

JUDGE = Model(arch="qwen3", hidden=128, layers=2, heads=4, kv_heads=4, ffn=384, context=128)
"""About 0.4 M parameters with random weights."""


def judge() -> Run:
    """Learn the form of a judgement from critiques that are wrong as often as right (sft), then learn to judge, by RL
    with the reward rule of J1 (rl, 2505.10320).

    The pairs come from the world `replies`, whose utility is hidden from the policy. Held-out accuracy is the agreement
    with it, over pairs that are in no training step, each in both orders. Other rules: `env.args.format=rm_r1`, `grm`,
    `genrm`. What it trained judges other policies: `env.rewards=judge:PATH`.
    """
    return Run(
        recipe="judge",
        threads=1,
        model=JUDGE,
        env=Env(name="judge", heldout=200),
        stages=(
            Supervised(
                name="sft", style="critique", wrong=0.5, steps=600, batch=64, optimizer=Optimizer(lr=3e-3, warmup=20)
            ),
            Reinforce(
                name="rl",
                algorithm=GRPO,
                sampling=Sampling(max_tokens=48),
                optimizer=Optimizer(lr=5e-4, warmup=5),
                prompts=16,
                siblings=8,
                steps=80,
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=2),
    )
