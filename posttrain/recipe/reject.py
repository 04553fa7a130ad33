"""Rejection sampling: sample, keep what is right, imitate it, again."""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.keep_rule import Best
from posttrain.config.stages.rejection import RAFT, Rejection
from posttrain.core.sampling import Sampling
from posttrain.recipe.gallery import arithmetic


def reject() -> Run:
    """The recipe `arithmetic` with rejection sampling in place of RL: four rounds of RAFT, in which the best right
    answer of each prompt is imitated. Other methods: `reject.method=rft`, star, rest, rest_em."""
    base = arithmetic()
    stage = Rejection(
        name="reject",
        method=replace(RAFT, keep=Best(above=0.0)),
        sampling=Sampling(max_tokens=24),
        optimizer=Optimizer(lr=1e-3, warmup=5),
        prompts=256,
        siblings=8,
        batch=64,
        epochs=2,
        rounds=4,
        # `rounds` ends it; the steps are only a bound.
        steps=400,
        eval_every=16,
    )
    return replace(base, recipe="reject", stages=(base.stages[0], stage))
