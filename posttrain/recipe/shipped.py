"""The shipped recipes: each a function that returns a complete, frozen `Run`.

They run on one thread: at these widths a second one costs more in waiting than it brings (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from posttrain.core.env import Reward
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.ladder import DR_GRPO, GRPO
from posttrain.core.run import Env, Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling

_TINY = Model(arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=4, ffn=192, context=128)
_ARITHMETIC = Env(name="arithmetic", heldout=200)


def ladder() -> Run:
    """Pretrain, SFT on demonstrations of which 40 % are wrong, chain of thought, RLVR: each does what the one before
    cannot."""
    return Run(
        recipe="ladder",
        threads=1,
        model=_TINY,
        env=_ARITHMETIC,
        stages=(
            Supervised(name="pretrain", style="document", steps=80, batch=128, optimizer=Optimizer(lr=4e-3, warmup=20)),
            Supervised(
                name="sft", style="answer", wrong=0.4, steps=60, batch=128, optimizer=Optimizer(lr=1e-3, warmup=10)
            ),
            Supervised(
                name="cot", style="cot", wrong=0.4, steps=240, batch=128, optimizer=Optimizer(lr=4e-3, warmup=20)
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


def arithmetic() -> Run:
    """RL alone after a short SFT: the smallest run that shows an algorithm learning."""
    full = ladder()
    cot, rl = full.stage("cot"), full.stage("rl")
    assert isinstance(rl, Reinforce)
    return replace(
        full, recipe="arithmetic", stages=(replace(cot, name="sft"), replace(rl, algorithm=GRPO, prompts=32))
    )


def verifiable() -> Run:
    """Your own prompts, your own reward, your own checkpoint: a small JSONL of the repository and
    `path.py:function`."""
    here = Path(__file__).parent / "data"
    return Run(
        recipe="verifiable",
        threads=1,
        model=_TINY,
        env=Env(
            name="prompts",
            prompts=str(here / "verifiable.jsonl"),
            rewards=(
                Reward(function=f"{here / 'rewards.py'}:correct"),
                Reward(function=f"{here / 'rewards.py'}:brief", weight=0.1),
            ),
            heldout=40,
        ),
        stages=(
            Supervised(name="sft", style="completion", steps=200, batch=64, optimizer=Optimizer(lr=2e-3)),
            Reinforce(
                name="rl",
                algorithm=GRPO,
                sampling=Sampling(max_tokens=16),
                optimizer=Optimizer(lr=5e-4),
                prompts=16,
                siblings=8,
                steps=30,
                eval_every=10,
            ),
        ),
        evaluation=Evaluation(samples=4),
    )


def calculator() -> Run:
    """A tool in two turns: ask the calculator, read its tape and its result, answer. What it shows is masked."""
    sft = Supervised(name="sft", style="tool", wrong=0.87, steps=800, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20))
    run = _mostly_wrong("calculator", sft, max_tokens=12, steps=100)
    return replace(run, env=replace(run.env, args={"tape": 5, "max_operand": 49}))


def shop() -> Run:
    """Four tools, three turns, several calls in each: the reward is what the cart and the calendar are like in the
    end."""
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
    """A gallery task: demonstrations of which most are wrong are imitated, then the reward says which."""
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
        model=replace(_TINY, context=context),
        env=Env(name=task, heldout=200),
        stages=(sft, rl),
        evaluation=Evaluation(samples=4),
    )


RECIPES: dict[str, Callable[[], Run]] = {
    "ladder": ladder,
    "arithmetic": arithmetic,
    "verifiable": verifiable,
    "calculator": calculator,
    "shop": shop,
    "programs": programs,
}


def recipe(name: str) -> Run:
    """The shipped recipe of that name."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe is called {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]()
