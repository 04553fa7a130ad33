"""posttrain's side of `grpo_step.py`: a worker process that runs the real step, one per command.

The parts are built by `posttrain.build.build_run.make_parts` from a `Run` with the shipped defaults; how many tokens a
pass takes, and whether the cache is freed while the learner works, are what `posttrain run model=...` chooses. The one
thing put in between is `ForcedLengths`, which gives each sibling its number of tokens through the Sampler port. All
canaries are on; recording of episodes is off. KL is off, as on the other side.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.speed.grpo_work import LR, SIBLINGS, SYMBOLS, Job, Wire, lengths_PG, memory_mb, prompt, reward
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.build.request.defaults import Choices
from posttrain.build.request.input_measures import model_size
from posttrain.config import overrides as dotted
from posttrain.config.run import Model, Optimizer, Reinforce, Run
from posttrain.core.ports import Attempt, Sampler, TaskSource
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Task
from posttrain.core.verdict import Verdict
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.environment.single import Generated, SingleTurn
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import GRPO
from posttrain.record.run_folder import RunFolder
from posttrain.role.group_queue import MeteredSampler, StepGroups
from posttrain.role.prompt_order import Prompts
from posttrain.role.roles import ReinforceRoles, stream_of
from posttrain.stages.run_parts import RunParts
from posttrain.stages.training_step import ask, learn
from posttrain.system.machine import during_steps

NO_KL = patch(GRPO, "grpo_no_kl", "2402.03300", pull=None)


@dataclass(frozen=True, kw_only=True)
class Symbols(SingleTurn):
    """One turn, and the reward of `grpo_work`; prompts in order, without end."""

    @property
    def name(self) -> str:
        return "symbols"

    @property
    def alphabet(self) -> str:
        return "".join(SYMBOLS)

    @property
    def train(self) -> TaskSource:
        return Generated(lambda index: Task(f"t{index}", prompt(index)))

    @property
    def heldout(self) -> Sequence[Task]:
        return ()

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(reward(attempt.text))

    def key(self, task: Task) -> Hashable:
        return task.prompt

    def gold(self, task: Task) -> tuple[str, ...]:
        return (next(c for c in SYMBOLS if reward(c) == 1),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (next(c for c in SYMBOLS if reward(c) == 0),)


class ForcedLengths(MeteredSampler):
    """A sampler that says exactly `lengths[i]` tokens to the i-th request of a step: groups in order, siblings in
    order."""

    def __init__(self, inner: Sampler) -> None:
        super().__init__(inner)
        self.lengths: list[int] = []
        self.asked = 0
        self._forced: dict[tuple[Sampling, int], Sampling] = {}

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        wanted = self.lengths[self.asked]
        self.asked += 1
        key = (sampling, wanted)
        if key not in self._forced:  # forcing a length is the benchmark's work, so it is done once
            self._forced[key] = replace(sampling, max_tokens=wanted, stop_ids=())
        said = await super().generate(ids, self._forced[key], place)
        if len(said.ids) != wanted:
            raise AssertionError(f"said {len(said.ids)} tokens, wanted {wanted}")
        return said


def make_run(job: Job) -> Run:
    stage = Reinforce(
        name="rl",
        algorithm=NO_KL,
        sampling=Sampling(max_tokens=job.cap, stop_ids=()),  # lengths are forced, so no token ends an answer
        optimizer=Optimizer(lr=LR, warmup=0),
        prompts=job.prompts,
        siblings=SIBLINGS,
        minibatches=1,
        epochs=1,
        eval_every=0,
        checkpoint_every=0,
    )
    run = Run(
        recipe="benchmark",
        model=Model(path=job.checkpoint, share_prefixes=job.share),
        stages=(stage,),
        threads=job.threads,
        record_episodes=False,
    )
    made = Choices(run, frozenset(), size=model_size(job.checkpoint)).made()
    return dotted.apply(
        run, [f"{name}={made[name][0]}" for name in ("rl.micro_tokens", "engine.sleep") if name in made]
    )


def make_roles(parts: RunParts) -> ReinforceRoles:
    """The roles of the run's one stage, as `stages` builds them."""
    stage = parts.run.stages[0]
    assert isinstance(stage, Reinforce)
    prompts = Prompts(parts.environment.train, parts.run.seed)
    return ReinforceRoles(
        run=parts.run,
        stage=stage,
        sampling=parts.sampling(stage),
        rollout=parts.rollout,
        prompts=prompts,
        groups=StepGroups(parts.rollout, prompts, parts.sampling(stage), stream_of(stage), deque(maxlen=1)),
        learner=parts.learner,
        trainer=parts.trainer(stage.optimizer, stage.micro_tokens),
        sync=parts.sync,
        reference=None,
        book=parts.book,
        text=parts.text,
        watch=parts.observe(stage, (), {}),
    )


async def serve(wire: Wire, job: Job, folder: Path) -> None:
    """Build the roles once, then one step per `step` command."""
    run, env = make_run(job), Symbols()
    threads = use_threads(run.threads)
    policy = make_policy(run, env)
    with RunFolder.create(folder, run, facts(policy, threads)) as book:
        parts = make_parts(run, policy, env, book, [])
        lengths = ForcedLengths(parts.sampler)
        parts.rollout.sampler = lengths
        roles = make_roles(parts)
        await parts.publish()
        await roles.watch.begin(roles)
        table = lengths_PG(job.regime, job.prompts).ravel()
        wire.send(ready=True, **memory_mb())
        index = 0
        with during_steps():  # as around the steps of a stage
            while (command := wire.receive())["do"] == "step":
                lengths.lengths, lengths.asked = np.minimum(table, command.get("at_most", 10**9)).tolist(), 0
                begun = time.perf_counter()
                index += 1
                asked = await ask(roles, index)
                parts.sleep()
                step = await learn(roles, asked)
                seconds = time.perf_counter() - begun
                extra = {name: gauge.mean for name, gauge in step.gauges.items()}
                spoken = sum(lengths.lengths)
                wire.send(seconds=seconds, roles=dict(step.clock), spoken=spoken, extra=extra, **memory_mb())


def main(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Wire(), job, Path(folder) / "run"))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
