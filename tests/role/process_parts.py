"""Small worlds of chains for the tests of process rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config.engines import Embedded
from posttrain.config.env import Env, Reward
from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.rejection import RFT, Regenerate, Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.sampling import Sampling
from posttrain.core.types import Group, SampledTurn
from posttrain.ladder.policy_rows import GRPO_PROCESS
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.judges.regenerate import RegeneratedAnswer, Regenerator
from posttrain.role.judges.step_completion import LabelledAnswer, StepLabeler, TokenEnds
from posttrain.role.prompt_order import Prompts
from posttrain.stages.run_parts import RunParts
from tests.tiny import tiny_parts, tiny_run

ENV = Env(name="arithmetic", args={"min_terms": 3, "max_terms": 3, "max_operand": 4}, heldout=6)
SAMPLING = Sampling(max_tokens=24)


def process_run(*, reward: Reward | None = None, sft: int = 60, **label: Any) -> Run:
    """A little imitation, labels of steps, a process reward model, and RL with it."""
    imitation, rl = tiny_run(algorithm=GRPO_PROCESS, steps=2, sampling=SAMPLING).stages
    imitation = replace(imitation, style="cot", steps=sft, batch=16, optimizer=Optimizer(lr=1e-2, warmup=2))
    sizes: dict[str, Any] = {"completions": 4, "prompts": 6, "siblings": 3, "steps": 2, "sampling": SAMPLING}
    labeling = StepLabeling(name="label", separator=";", **(sizes | label))
    model = RewardModel(
        name="rm",
        judgement="steps",
        pool="token",
        separator=";",
        labels_of="label",
        soft=True,
        steps=3,
        batch=8,
        hands_on=False,
        optimizer=Optimizer(lr=3e-3, warmup=1),
        checkpoint_every=0,
    )
    rewards = (reward or Reward(function="model:stage:rm"),)
    return replace(tiny_run(), env=replace(ENV, rewards=rewards), stages=(imitation, labeling, model, rl))


@dataclass
class Counting:
    """A sampler that keeps what it was asked and what it said."""

    inner: Any
    calls: list[tuple[np.ndarray, SampledTurn]] = field(default_factory=list[tuple[np.ndarray, SampledTurn]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = await self.inner.generate(ids, sampling, place)
        self.calls.append((ids, said))
        return said


def needed(calls: Sequence[tuple[np.ndarray, SampledTurn]]) -> int:
    """Positions that must be computed: each token said but the last of its turn, and each different beginning of a
    prompt that was not said before."""
    fed: set[bytes] = set()
    asked: set[bytes] = set()
    for ids, said in calls:
        asked |= {ids[: n + 1].tobytes() for n in range(len(ids))}
        whole = np.concatenate([ids, said.ids]).astype(np.int32)
        fed |= {whole[: n + 1].tobytes() for n in range(len(ids), len(whole) - 1)}
    return sum(len(said.ids) - 1 for _, said in calls) + len(asked - fed)


def labelled(
    parts: RunParts, stage: StepLabeling, count: int = 4, seed: int = 0
) -> tuple[list[Group], tuple[LabelledAnswer, ...]]:
    """The first groups of a run's world, played and labelled."""
    sampling = stage.sampling.resolve(parts.stop_ids, parts.spell)
    labeler = StepLabeler(parts.rollout, stage, sampling, TokenEnds(parts.rollout.dialogue("").text), "train/label")
    request = RolloutRequest(groups=count, siblings=stage.siblings)

    async def go() -> tuple[list[Group], tuple[LabelledAnswer, ...]]:
        groups, _ = await parts.rollout.until(Prompts(parts.environment.train, seed), request, sampling, "train/label")
        return list(groups), await labeler.label(groups)

    return asyncio.run(go())


def parts_of(folder: Path, run: Run) -> RunParts:
    """The parts of a run without rewards that are models, with a cache that keeps all of its answers."""
    return tiny_parts(folder, replace(run, env=replace(run.env, rewards=()), slots=64, engine=Embedded(retain=16384)))


def regenerate_run(how: Regenerate, *, rounds: int = 2, judge_steps: bool = False, **given: Any) -> Run:
    """A little imitation of chains, and rounds that say wrong answers anew from their first wrong step."""
    run = process_run()
    stage = Rejection(
        **{
            "name": "reject",
            "method": replace(RFT, weights="last", regenerate=how),
            "sampling": SAMPLING,
            "optimizer": Optimizer(lr=1e-3, warmup=1),
            "prompts": 12,
            "siblings": 3,
            "batch": 8,
            "epochs": 1,
            "rounds": rounds,
            "steps": 30,
            "eval_every": 0,
            "checkpoint_every": 1,
        }
        | given
    )
    env = replace(ENV, args={**ENV.args, "judge_steps": judge_steps})
    return replace(run, env=env, stages=(run.stages[0], stage))


def regenerated(
    parts: RunParts, how: Regenerate, count: int = 4, siblings: int = 3, sampling: Sampling = SAMPLING
) -> tuple[list[Group], tuple[RegeneratedAnswer, ...]]:
    """The first groups of a run's world, and their wrong answers said anew."""
    resolved = sampling.resolve(parts.stop_ids, parts.spell)
    asks = StepLabeling(name="reject", separator=how.separator, completions=how.completions)
    ends = TokenEnds(parts.rollout.dialogue("").text)
    regenerator = Regenerator(StepLabeler(parts.rollout, asks, resolved, ends, "train/reject"), how)
    request = RolloutRequest(groups=count, siblings=siblings)

    async def go() -> tuple[list[Group], tuple[RegeneratedAnswer, ...]]:
        groups, _ = await parts.rollout.until(Prompts(parts.environment.train, 0), request, resolved, "train/reject")
        return list(groups), await regenerator.regenerate(groups)

    return asyncio.run(go())
