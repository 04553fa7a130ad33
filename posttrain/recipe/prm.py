"""A process reward model: imitation, labels of steps by completion, and a model that scores steps."""

from __future__ import annotations

from posttrain.core.env import Env
from posttrain.core.reward_model import RewardModel
from posttrain.core.run import Evaluation, Optimizer, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.step_labels import StepLabeling
from posttrain.recipe.example import TINY


def prm() -> Run:
    """Imitate chains of sums, a part of which are wrong (sft), complete the policy's own chains from the end of each
    step (label), and learn from these labels how good each step is (prm), as in Math-Shepherd (2312.08935).

    Nobody labels a step by hand: the world judges only the last number. A longer chain world:
    `env.args.min_terms=6 env.args.max_terms=8`. `env.rewards=model:RUN` pays a policy of another run by its scores.
    """
    return Run(
        recipe="prm",
        threads=1,
        model=TINY,
        env=Env(name="arithmetic", args={"min_terms": 3, "max_terms": 4}, heldout=200),
        stages=(
            Supervised(
                name="sft", style="cot", wrong=0.3, steps=200, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20)
            ),
            StepLabeling(
                name="label",
                separator=";",
                completions=4,
                prompts=128,
                siblings=2,
                steps=12,
                sampling=Sampling(max_tokens=48),
            ),
            RewardModel(
                name="prm",
                judgement="steps",
                pool="token",
                separator=";",
                labels_of="label",
                soft=True,
                steps=200,
                batch=64,
                optimizer=Optimizer(lr=2e-3),
            ),
        ),
        evaluation=Evaluation(samples=4),
    )
