"""posttrain's side of `preference.py`: a worker process whose stage takes one step per command.

The run is built from the shipped defaults, with as many tokens a pass as `posttrain run model=...` chooses, and driven
by the stage's own driver: reading and rendering the rows, the reference, every check, the update, the record. Between
two steps it waits for a command.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.speed.grpo_work import StepMemory, Wire, memory_mb
from benchmarks.speed.preference_work import BETA, LR, PairJob
from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.build.open_model import keep_policy
from posttrain.build.request.defaults import Choices
from posttrain.build.request.input_measures import model_size
from posttrain.config import overrides as dotted
from posttrain.config.env import Env
from posttrain.config.run import Model, Optimizer, Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.ladder.preference_rows import DPO
from posttrain.record.run_folder import RunFolder
from posttrain.stages import Progress, Stages
from posttrain.stages.interrupt import Stopper

STEPS = 400
"""More than are ever asked for."""


class Finished(Exception):
    """No further step is asked for."""


def make_run(job: PairJob) -> Run:
    how: dict[str, Any] = {
        "optimizer": Optimizer(lr=LR, warmup=0),
        "batch": job.pairs,
        "steps": STEPS,
        "eval": False,
        "eval_every": 0,
        "checkpoint_every": 0,
    }
    stage: Stage
    if job.what == "reward":
        stage = RewardModel(name="reward", **how)
    else:
        stage = Preference(name="dpo", algorithm=DPO, ahead=job.what == "dpo_ahead", **how)
        assert stage.algorithm.beta == BETA
    run = Run(
        recipe="benchmark",
        model=Model(path=job.checkpoint),
        env=Env(name="prompts", prompts=job.data, heldout=0),
        stages=(stage,),
        threads=job.threads,
        record_episodes=False,
    )
    field = f"{stage.name}.micro_tokens"
    tokens, _ = Choices(run, frozenset(), size=model_size(job.checkpoint)).made()[field]
    return dotted.apply(run, [f"{field}={tokens}"])


class Commanded:
    """The `ask` and `learn` of a driver, with a clock from each command to the time when the step is done."""

    def __init__(
        self, wire: Wire, ask: Callable[[int], Awaitable[Any]], learn: Callable[[Any], Awaitable[Step]]
    ) -> None:
        self._wire, self._ask, self._learn = wire, ask, learn
        self._begun, self._memory = 0.0, StepMemory()
        self._line: Step | None = None

    async def ask(self, index: int) -> Any:
        """Tells what the step before took, and waits for the command of this one."""
        if self._line is not None:
            seconds, gauges = time.perf_counter() - self._begun, self._line.gauges
            self._wire.send(
                seconds=seconds,
                roles=dict(self._line.clock),
                norm=gauges["optim/grad_norm"].mean,
                shared=gauges["learner/shared"].mean,
                **self._memory.told(),
            )
        if self._wire.receive()["do"] != "step":
            raise Finished
        self._memory.begin()
        self._begun = time.perf_counter()
        return await self._ask(index)

    async def learn(self, asked: Any) -> Step:
        self._line = await self._learn(asked)
        return self._line


async def serve(wire: Wire, job: PairJob, folder: Path) -> None:
    """Build the run, then one step per `step` command."""
    run = make_run(job)
    threads = use_threads(run.threads)
    environment = make_environment(run)
    policy = make_policy(run, environment)
    with RunFolder.create(folder, run, facts(policy, threads)) as book:
        keep_policy(book, policy)
        parts = make_parts(run, policy, environment, book, [])
        (driver,) = Stages(parts, Progress(), Stopper()).left()
        opened = driver.open

        async def commanded(checkpoint: Path | None) -> Any:
            begun = time.perf_counter()
            both = Commanded(wire, *(await opened(checkpoint)))
            wire.send(ready=True, open_seconds=time.perf_counter() - begun, **memory_mb())
            return both.ask, both.learn

        driver.open = commanded
        with suppress(Finished):
            await driver.run()


def main(job: PairJob) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Wire(), job, Path(folder) / "run"))


if __name__ == "__main__":
    main(PairJob(**json.loads(sys.argv[1])))
