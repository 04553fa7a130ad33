"""All stages on arithmetic, each with an accuracy that the one before does not reach, and last a control."""

from __future__ import annotations

from posttrain.config.env import Env
from posttrain.config.run import Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import DR_GRPO
from posttrain.ladder.preference_rows import DPO
from posttrain.recipe.example import TINY


def ladder() -> Run:
    """Pretraining, SFT on demonstrations of which 40 % are wrong, chain of thought, preferences between a right and a
    wrong chain (DPO), RL, and a control that only imitates."""
    return Run(
        recipe="ladder",
        threads=1,
        model=TINY,
        env=Env(name="arithmetic", heldout=200),
        stages=(
            Supervised(name="pretrain", style="document", steps=80, batch=128, optimizer=Optimizer(lr=4e-3, warmup=20)),
            Supervised(
                name="sft", style="answer", wrong=0.4, steps=60, batch=128, optimizer=Optimizer(lr=1e-3, warmup=10)
            ),
            Supervised(
                name="cot", style="cot", wrong=0.4, steps=240, batch=128, optimizer=Optimizer(lr=4e-3, warmup=20)
            ),
            Preference(
                name="dpo", algorithm=DPO, steps=40, batch=64, optimizer=Optimizer(lr=3e-5, warmup=5), eval_every=0
            ),
            Reinforce(
                name="rl",
                algorithm=DR_GRPO,
                sampling=Sampling(max_tokens=24),
                optimizer=Optimizer(lr=5e-4, warmup=5),
                prompts=64,
                siblings=8,
                steps=40,
                eval_every=20,
            ),
            Supervised(
                # The control: imitation alone from where DPO began, for as long as RL took. `time_of` ends it, and not
                # its steps.
                name="sft_continued",
                style="cot",
                start="cot",
                time_of="rl",
                hands_on=False,
                wrong=0.4,
                steps=100_000,
                batch=128,
                optimizer=Optimizer(lr=1e-3),
            ),
        ),
    )
