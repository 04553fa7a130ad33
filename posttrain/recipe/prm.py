"""A process reward model: imitation, labels of steps by completion, a model that scores steps, and RL that it pays."""

from __future__ import annotations

from posttrain.config.engines import Embedded
from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.sampling import Sampling
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.example import TINY

SAMPLING = Sampling(max_tokens=80)
"""Sampling of answers, completions and RL: room for chains of six terms."""

RETAIN = 200_000
"""Tokens of answers that stay in the engine's cache until their steps are completed, so that no beginning is computed
again: 2,048 answers of 80 tokens, and their prompts."""


def prm() -> Run:
    """Imitate chains of sums, a part of which are wrong (sft), complete the policy's own chains from the end of each
    step (label), learn from these labels how good each step is (prm), as in Math-Shepherd (2312.08935), and learn with
    GRPO what the least of an answer's scores pays, with a KL to the imitation (rl).

    Nobody labels a step by hand: the world judges only the last number, and RL does not read that
    (`env.measured=true`). One completion a step leaves room for more answers than four do, and a model of this size
    needs them. Longer chains: `env.args.max_terms=6 sft.steps=300`. The model alone: `rl=none`; then
    `env.rewards=model:RUN` pays a policy of another run.
    """
    return Run(
        recipe="prm",
        threads=1,
        model=TINY,
        engine=Embedded(retain=RETAIN),
        env=Env(
            name="arithmetic",
            args={"min_terms": 3, "max_terms": 4},
            heldout=200,
            rewards=(Reward(function="model:stage:prm", steps="outcome"),),
            measured=True,
        ),
        stages=(
            Supervised(
                name="sft", style="cot", wrong=0.3, steps=200, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20)
            ),
            StepLabeling(
                name="label",
                separator=";",
                completions=1,
                prompts=2048,
                siblings=1,
                steps=12,
                sampling=SAMPLING,
            ),
            RewardModel(
                name="prm",
                judgement="steps",
                pool="token",
                separator=";",
                labels_of="label",
                soft=True,
                steps=1200,
                batch=64,
                optimizer=Optimizer(lr=2e-3),
            ),
            Reinforce(
                name="rl",
                # The stages in between label answers and train a reward model: the policy is that of the imitation.
                start="sft",
                algorithm=patch(GRPO, "grpo", "2402.03300", pull=KL(coef=0.5)),
                sampling=SAMPLING,
                optimizer=Optimizer(lr=3e-4, warmup=5),
                prompts=32,
                siblings=8,
                steps=40,
                eval_every=20,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
