"""The smallest real run: a two-layer model, real engine, real learner, seconds on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.build.open_model import keep_policy
from posttrain.config.run import Env, Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.ladder.policy_rows import GRPO
from posttrain.record.run_folder import RunFolder
from posttrain.stages import Progress, StageResult, Stages
from posttrain.stages.interrupt import Stopper
from posttrain.stages.run_parts import RunParts

MODEL = Model(hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, context=64)


def tiny_run(**rl: Any) -> Run:
    """SFT for a few steps, then a few RL steps."""
    stage = Reinforce(
        name="rl",
        **{
            "algorithm": GRPO,
            "sampling": Sampling(max_tokens=6),
            "optimizer": Optimizer(lr=1e-3, warmup=2),
            "prompts": 4,
            "siblings": 4,
            "steps": 3,
            "eval_every": 0,
            "checkpoint_every": 1,
        }
        | rl,
    )
    sft = Supervised(
        name="sft",
        style="answer",
        steps=6,
        batch=8,
        optimizer=Optimizer(lr=3e-3, warmup=2),
        checkpoint_every=2,
        eval=False,
    )
    return Run(
        recipe="tiny",
        model=MODEL,
        env=Env(name="arithmetic", args={"max_terms": 2, "max_operand": 4}, heldout=6),
        stages=(sft, stage),
        evaluation=Evaluation(samples=2),
        slots=16,
        threads=1,
    )


def tiny_parts(folder: Path, run: Run | None = None) -> RunParts:
    """All parts of a tiny run, ready to be tampered with before it starts."""
    run = run or tiny_run()
    use_threads(run.threads)
    environment = make_environment(run)
    policy = make_policy(run, environment)
    book = RunFolder.create(folder, run, facts(policy, run.threads))
    keep_policy(book, policy)
    return make_parts(run, policy, environment, book, [])


async def play(parts: RunParts) -> list[StageResult]:
    """Run all stages of the parts."""
    try:
        progress = Progress()
        for stage in Stages(parts, progress, Stopper()).left():
            await stage.run()
        return list(progress.results)
    finally:
        parts.book.close()


def only_rl(run: Run) -> Run:
    return replace(run, stages=run.stages[-1:])
