"""Recipes to run as they are and to change: a tiny model with random weights learns a task of the gallery."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.config.engines import Embedded
from posttrain.config.env import Env, Reward
from posttrain.config.run import Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.keep_rule import Best
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.rejection import RAFT, Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.sampling import Sampling
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import DR_GRPO, GRPO
from posttrain.ladder.preference_rows import DPO
from posttrain.recipe.example import TINY, tiny_run

KL_GRPO = patch(GRPO, "grpo", "2402.03300", pull=KL(coef=0.5))
RETAIN = 200_000
"""Tokens of answers that stay in the engine's cache until their steps are completed, so that no beginning is computed
again: 2,048 answers of 80 tokens, and their prompts."""


def _sft(style: str, name: str = "sft", lr: float = 4e-3, warmup: int = 20, **more: Any) -> Supervised:
    return Supervised(name=name, style=style, optimizer=Optimizer(lr=lr, warmup=warmup), **more)


def _rl(max_tokens: int, steps: int, lr: float = 5e-4, **more: Any) -> Reinforce:
    """The stage `rl`, with 32 prompts of 8 siblings."""
    optimizer = Optimizer(lr=lr, warmup=5)
    return Reinforce(name="rl", sampling=Sampling(max_tokens=max_tokens), optimizer=optimizer, steps=steps, **more)


def ladder() -> Run:
    """Pretraining, SFT on demonstrations of which 40 % are wrong, chain of thought, preferences between a right and a
    wrong chain (DPO), RL, and a control that only imitates: each stage has an accuracy that the one before does not
    reach."""
    dpo = Preference(
        name="dpo", algorithm=DPO, steps=40, batch=64, optimizer=Optimizer(lr=3e-5, warmup=5), eval_every=0
    )
    # The control: imitation alone from where DPO began, for as long as RL took. `time_of` ends it, and not its steps.
    alone: Any = {"start": "cot", "time_of": "rl", "hands_on": False, "steps": 100_000}
    return tiny_run(
        "ladder",
        Env(name="arithmetic", heldout=200),
        _sft("document", "pretrain", steps=80, batch=128),
        _sft("answer", lr=1e-3, warmup=10, wrong=0.4, steps=60, batch=128),
        _sft("cot", "cot", wrong=0.4, steps=240, batch=128),
        dpo,
        _rl(24, 40, algorithm=DR_GRPO, prompts=64),
        _sft("cot", "sft_continued", lr=1e-3, warmup=10, wrong=0.4, batch=128, **alone),
        samples=8,
    )


def arithmetic() -> Run:
    """RL after a short SFT: the smallest run in which an algorithm visibly learns."""
    sft = _sft("cot", wrong=0.4, steps=240, batch=128)
    return tiny_run("arithmetic", Env(name="arithmetic", heldout=200), sft, _rl(24, 40, algorithm=GRPO), samples=8)


def reject() -> Run:
    """The recipe `arithmetic` with rejection sampling in place of RL: four rounds of RAFT, in which the best right
    answer of each prompt is imitated. Other methods: `reject.method=rft`, star, rest, rest_em."""
    base = arithmetic()
    stage = Rejection(
        name="reject",
        method=replace(RAFT, keep=Best(above=0.0)),
        sampling=Sampling(max_tokens=24),
        optimizer=Optimizer(lr=1e-3, warmup=5),
        rounds=4,
        # `rounds` ends it; the steps are only a bound.
        steps=400,
        eval_every=16,
    )
    return replace(base, recipe="reject", stages=(base.stages[0], stage))


def calculator() -> Run:
    """A tool in two turns: call the calculator, read its tape and its result, answer. Its output is masked."""
    sft, env = _sft("tool", wrong=0.87, steps=800), Env(name="calculator", args={"tape": 5, "max_operand": 49})
    return tiny_run("calculator", env, sft, _rl(12, 100, algorithm=DR_GRPO))


def shop() -> Run:
    """Four tools, three turns, several calls in each. The reward depends on the final cart and calendar."""
    sft, model = _sft("tools", wrong=0.85, steps=250), replace(TINY, context=256)
    return tiny_run("shop", Env(name="shop"), sft, _rl(64, 40, algorithm=DR_GRPO), model=model)


def programs() -> Run:
    """A short program for each task, judged by a hidden test in the sandbox."""
    sft = _sft("answer", wrong=0.85, steps=160, batch=128)
    return tiny_run("programs", Env(name="programs"), sft, _rl(16, 40, algorithm=DR_GRPO))


def rlhf() -> Run:
    """Imitate replies, most of which are bad (sft), learn from pairs which reply judges prefer (reward_model), and
    learn with GRPO to be preferred, with a KL to the imitation (rl), as in 2203.02155.

    The judges' taste is known to the world `replies`, and no stage reads it: `env.measured=true` reports it beside the
    reward model's score. So over-optimisation shows: the score rises and the taste does not. PPO with the KL in the
    reward, as in that paper: `rl.algorithm=ppo rl.pull=kl rl.pull.estimator=k1 rl.pull.placement=reward`.
    """
    rewards = (Reward(function="model:stage:reward_model"),)
    env = Env(name="replies", args={"max_number": 9}, rewards=rewards, measured=True)
    # `hands_on=False`: RL goes on with the policy that imitated, not with the reward model's weights.
    settings: Any = {"hands_on": False, "steps": 250, "batch": 64, "centre": 0.01, "eval_every": 50}
    pairs = RewardModel(name="reward_model", optimizer=Optimizer(lr=2e-3), **settings)
    return tiny_run("rlhf", env, _sft("reply", wrong=0.8, steps=200), pairs, _rl(32, 60, algorithm=KL_GRPO))


def judge() -> Run:
    """Learn to write judgements, two in five of which end in the verdict that does not follow (sft), then learn which
    verdict is right, by RL with the reward rule of J1 (rl, 2505.10320).

    The pairs come from the world `replies`, whose utility is hidden from the policy. Held-out accuracy is the agreement
    with it, over pairs that are in no training step, each in both orders. Other rules: `env.args.format=rm_r1`, `grm`,
    `genrm`. What it trained judges other policies: `env.rewards=judge:PATH`.
    """
    optimizer = Optimizer(lr=4e-3, warmup=20, schedule="cosine", horizon=500)
    sft = Supervised(name="sft", style="critique", wrong=0.4, steps=500, optimizer=optimizer)
    return tiny_run("judge", Env(name="judge"), sft, _rl(48, 50, 7e-4, algorithm=GRPO, eval_every=25), samples=2)


def prm() -> Run:
    """Imitate chains of sums, a part of which are wrong (sft), complete the policy's own chains from the end of each
    step (label), learn from these labels how good each step is (prm), as in Math-Shepherd (2312.08935), and learn with
    GRPO what the least of an answer's scores pays, with a KL to the imitation (rl).

    Nobody labels a step by hand: the world judges only the last number, and RL does not read that
    (`env.measured=true`). One completion a step leaves room for more answers than four do, and a model of this size
    needs them. Longer chains: `env.args.max_terms=6 sft.steps=300`. The model alone: `rl=none`; then
    `env.rewards=model:RUN` pays a policy of another run.
    """
    rewards = (Reward(function="model:stage:prm", steps="outcome"),)
    env = Env(name="arithmetic", args={"min_terms": 3, "max_terms": 4}, rewards=rewards, measured=True)
    counts: Any = {"completions": 1, "prompts": 2048, "siblings": 1, "steps": 12}
    # 80 tokens: room for chains of six terms.
    label = StepLabeling(name="label", separator=";", sampling=Sampling(max_tokens=80), **counts)
    of_steps: Any = {"judgement": "steps", "pool": "token", "separator": ";", "labels_of": "label", "soft": True}
    model = RewardModel(name="prm", steps=1200, batch=64, optimizer=Optimizer(lr=2e-3), **of_steps)
    # The stages in between label answers and train a reward model: the policy of `rl` is that of the imitation.
    rl = _rl(80, 40, 3e-4, algorithm=KL_GRPO, start="sft")
    return tiny_run("prm", env, _sft("cot", wrong=0.3, steps=200), label, model, rl, engine=Embedded(retain=RETAIN))
