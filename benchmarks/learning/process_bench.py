"""ProcessBench's metric (2412.06559) of a process reward model, on chains of sums with planted first errors.

    posttrain run prm rl=none --out runs/prm
    python -m benchmarks.learning.process_bench runs/prm
    posttrain run judge env=verify --out runs/verifier
    python -m benchmarks.learning.process_bench runs/verifier --chains 200

Half of the chains have one wrong step and are consistent after it. The first wrong step is known, because the world
judges every step; the reward model finds it where its score first falls below a threshold. The threshold is chosen on
one half of the chains (as ProcessBench does on GSM8K) and the score is that of the other half. Beside it stand the
scores of finding none, and of calling the last step wrong where the answer is.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.build.build_judges import by_its_form, generative_judge
from posttrain.build.build_reward_models import reward_member, stage_policy
from posttrain.config.env import Reward
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.measure.answer_steps import first_error, step_ends
from posttrain.core.ports import Attempt
from posttrain.core.stop import Stop
from posttrain.core.types import Segment, Task
from posttrain.diagnose.reward_bench import ProcessBenchScore
from posttrain.engine.learner.learner import HFLearner
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.record.run_reader import run_file
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import step_scores
from posttrain.role.learning.demonstrations import demonstration

STYLE = "cot"


@dataclass(frozen=True)
class PlantedChain:
    """A chain of steps, with the index of its first wrong step; -1 where there is none."""

    task: Task
    text: str
    truth: int


def chains_world(run: Run) -> Any:
    """The world of a run, which judges steps; of a verifier the one whose answers it verifies."""
    if run.env.name == "verify":
        verifies: Any = environment(run.env, run.seed)
        return verifies.verified_world
    return environment(
        replace(run.env, args={**run.env.args, "judge_steps": True}, rewards=(), measured=False), run.seed
    )


def planted_chains(run: Run, count: int, seed: int) -> list[PlantedChain]:
    """Chains about held-out tasks, every second one with an error."""
    world = chains_world(run)
    out: list[PlantedChain] = []
    for i in range(count):
        task = world.heldout[i % len(world.heldout)]
        rng = seeds.generator(seed, "process-bench", i)
        _, text = world.abilities.demonstrations.write(task, STYLE, rng, float(i % 2))
        verdicts = asyncio.run(world.judge(Attempt(task, (text,), Stop.SAID, lambda characters: characters)))
        steps = [j.verdict.score for j in sorted((j for j in verdicts if j.end), key=lambda j: j.end or 0)]
        out.append(PlantedChain(task, text, first_error(steps)))
    return out


def scores_of(folder: Path, stage: RewardModel, chains: Sequence[PlantedChain]) -> list[list[float]]:
    """The reward model's score of each step of each chain."""
    policy = stage_policy(folder, stage.name)
    tokenizer: Any = policy.tokenizer
    renderer = Renderer(tokenizer, policy.stop_ids, policy.context)
    ends = TokenEnds(RenderedDialogue(renderer, "").text)
    read: list[Segment] = [demonstration(renderer, c.task, c.task.prompt, c.text, policy.context) for c in chains]
    packed = Packed.of(read)
    score_M = step_scores(HFLearner(policy), packed)
    found: list[list[float]] = []
    for s, chain in enumerate(chains):
        own = packed.segment_M == s
        at = ends.upto(packed.target_M[own], step_ends(chain.text, stage.separator))
        found.append(score_M[own][np.array(at) - 1].tolist())
    return found


def verified_scores(folder: Path, chains: Sequence[PlantedChain], votes: int) -> list[list[float]]:
    """A generative verifier's score of each step of each chain. A step that it cannot judge counts as right."""
    run = run_file(folder).run
    reward = Reward(function=f"judge:{folder}", votes=votes)
    judge = by_its_form(generative_judge(run, reward, 1e-5, reward_member), reward, TokenEnds(lambda ids: ""))
    assert isinstance(judge, GenerativeStepJudge)

    async def scored(chain: PlantedChain) -> list[float]:
        upto = [chain.text[:end] for end in step_ends(chain.text, judge.separator)]
        return [1.0 if x is None else x for x in await judge.of_beginnings(chain.task, upto)]

    async def each() -> list[list[float]]:
        return list(await asyncio.gather(*map(scored, chains)))

    found = asyncio.run(each())
    judge.close()
    return found


def bench(truth: Sequence[int], scores: Sequence[Sequence[float]]) -> tuple[ProcessBenchScore, float]:
    """(the score on every second pair of chains, the threshold that is best on the others)."""
    chosen = [i for i in range(len(truth)) if i // 2 % 2 == 0]
    held = [i for i in range(len(truth)) if i // 2 % 2]

    def at(threshold: float, own: Sequence[int]) -> ProcessBenchScore:
        return ProcessBenchScore.of([truth[i] for i in own], [first_error(scores[i], threshold) for i in own])

    best = max(np.linspace(0.02, 0.98, 49).tolist(), key=lambda t: at(t, chosen).f1)
    return at(best, held), best


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--chains", type=int, default=400)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--votes", type=int, default=1, help="of a verifier that writes")
    o = given.parse_args()
    run = run_file(o.folder).run
    chains = planted_chains(run, o.chains, o.seed)
    if run.env.name == "verify":
        name, scores = "verifier", verified_scores(o.folder, chains, o.votes)
    else:
        stage = next(s for s in run.stages if isinstance(s, RewardModel) and s.judgement == "steps")
        name, scores = stage.name, scores_of(o.folder, stage, chains)
    truth = [c.truth for c in chains]
    found, threshold = bench(truth, scores)
    last = [len(s) - 1 if t >= 0 else -1 for s, t in zip(scores, truth, strict=True)]
    print("chains with an error, found | without one, none found | harmonic mean")
    for what, x in (
        (f"{name}, below {threshold:.2f}", found),
        ("no step is wrong", ProcessBenchScore.of(truth, [-1] * len(truth))),
        ("the last step of a wrong answer", ProcessBenchScore.of(truth, last)),
    ):
        print(f"{what:>32}: {x.erroneous:.3f} ({x.erroneous_count}) | {x.correct:.3f} ({x.correct_count}) | {x.f1:.3f}")


if __name__ == "__main__":
    main()
