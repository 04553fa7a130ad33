"""Recipes for tasks of the gallery: an SFT after which most answers are still wrong, then RL."""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.env import Env
from posttrain.config.run import Evaluation, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.ladder.policy_rows import DR_GRPO, GRPO
from posttrain.recipe.example import TINY
from posttrain.recipe.ladder import ladder


def arithmetic() -> Run:
    """RL after a short SFT: the smallest run in which an algorithm visibly learns."""
    base = ladder()
    cot, rl = base.stage("cot"), base.stage("rl")
    assert isinstance(rl, Reinforce)
    return replace(
        base, recipe="arithmetic", stages=(replace(cot, name="sft"), replace(rl, algorithm=GRPO, prompts=32))
    )


def calculator() -> Run:
    """A tool in two turns: call the calculator, read its tape and its result, answer. Its output is masked."""
    sft = Supervised(name="sft", style="tool", wrong=0.87, steps=800, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20))
    run = _mostly_wrong("calculator", sft, max_tokens=12, steps=100)
    return replace(run, env=replace(run.env, args={"tape": 5, "max_operand": 49}))


def shop() -> Run:
    """Four tools, three turns, several calls in each. The reward depends on the final cart and calendar."""
    sft = Supervised(
        name="sft", style="tools", wrong=0.85, steps=250, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20)
    )
    return _mostly_wrong("shop", sft, max_tokens=64, steps=40, context=256)


def programs() -> Run:
    """A short program for each task, judged by a hidden test in the sandbox."""
    sft = Supervised(
        name="sft", style="answer", wrong=0.85, steps=160, batch=128, optimizer=Optimizer(lr=4e-3, warmup=20)
    )
    return _mostly_wrong("programs", sft, max_tokens=16, steps=40)


def _mostly_wrong(task: str, sft: Supervised, *, max_tokens: int, steps: int, context: int = 128) -> Run:
    """A gallery task: SFT on demonstrations of which most are wrong, then RL."""
    rl = Reinforce(
        name="rl",
        algorithm=DR_GRPO,
        sampling=Sampling(max_tokens=max_tokens),
        optimizer=Optimizer(lr=5e-4, warmup=5),
        prompts=32,
        siblings=8,
        steps=steps,
        eval_every=20,
    )
    return Run(
        recipe=task,
        threads=1,
        model=replace(TINY, context=context),
        env=Env(name=task, heldout=200),
        stages=(sft, rl),
        evaluation=Evaluation(samples=4),
    )
