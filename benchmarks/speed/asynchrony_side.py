"""One side of `benchmarks.speed.asynchrony`: a run with its tools and lengths given, in a process of its own.

A line of JSON on standard input says how; lines of JSON on standard output say how long each step took.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from benchmarks.speed.grpo_work import LR, SYMBOLS, prompt, reward
from benchmarks.speed.placement import kept_seconds, processor_seconds
from benchmarks.speed.whole_answers import whole_answers
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.build.open_model import keep_policy
from posttrain.config.placement import Local, Processes
from posttrain.config.run import Embedded, Evaluation, Model, Optimizer, Reinforce, Run
from posttrain.core.gauge import Step
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.embedded.schedule.engine_counters import EngineCounters
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.environment.single import Generated, SingleTurn
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import LADDER
from posttrain.record.run_folder import RunFolder
from posttrain.role.group_queue import GroupQueue
from posttrain.role.trainer import Trainer
from posttrain.stages import Progress, Stages
from posttrain.stages.interrupt import Stopper
from posttrain.stages.run_parts import RunParts

TURNS = 3
MEAN, CAP = 8.0, 48
"""Tokens of a turn: log-normal with this mean and the same deviation, and its largest."""
FASTEST, SLOWEST = 0.05, 2.0
"""Seconds of a tool call, log-uniform."""


@dataclass(frozen=True)
class SideJob:
    """What one side does."""

    checkpoint: str
    staleness: int
    steps: int
    prompts: int = 32
    siblings: int = 8
    slots: int = 256
    threads: int = 2
    algorithm: str = "decoupled_ppo"
    update: Literal["drain", "inflight", "stale"] = "drain"
    waits: bool = False
    """New weights wait until all answers that were begun have ended, as in a deterministic run."""
    minibatches: int = 1
    seed: int = 0
    turns: int = TURNS
    mean: float = MEAN
    """Tokens of a turn."""
    epochs: int = 1
    apart: bool = False
    """The engine is in a process of its own."""
    computes: float = 0.0
    """Seconds for which the learner's thread sleeps in each step, as if it computed."""
    judge: float = 0.0
    """Seconds of a verifier for one answer; `judges` work at once."""
    judges: int = 1
    slowest: float = SLOWEST
    drawn: bool = False
    """Each answer draws from the tables; else every step goes through them in order."""

    @property
    def cap(self) -> int:
        return round(CAP / MEAN * self.mean)


def quantiles(count: int, of: Any, key: int) -> np.ndarray:
    """The quantiles of a distribution in a fixed random order: a table with the shape of the distribution."""
    drawn = np.array([of((i + 0.5) / count) for i in range(count)])
    return drawn[np.random.Generator(np.random.Philox(key=key)).permutation(count)]


@cache
def lengths(count: int, mean: float = MEAN) -> np.ndarray:
    sigma2 = np.log(2.0)
    drawn = quantiles(count, lambda q: mean * np.exp(-sigma2 / 2 + np.sqrt(sigma2) * NormalDist().inv_cdf(q)), 7)
    return np.clip(np.rint(drawn), 1, round(CAP / MEAN * mean)).astype(np.int64)


@cache
def waits(count: int, slowest: float = SLOWEST) -> np.ndarray:
    return quantiles(count, lambda q: FASTEST * (slowest / FASTEST) ** q, 8)


@dataclass(frozen=True, kw_only=True)
class ToolCalls(SingleTurn):
    """Turns with a tool call after each but the last. Lengths of turns and seconds of tools come from tables, so
    that all sides play the same work whatever they say."""

    episodes: int
    """Of a step."""
    turns: int = TURNS
    mean: float = MEAN
    slowest: float = SLOWEST
    drawn: bool = False
    seconds: float = 0.0
    """Of a verifier for one answer."""
    judges: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    seen: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    played: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def name(self) -> str:
        return "tool_calls"

    @property
    def alphabet(self) -> str:
        return "".join(SYMBOLS)

    @property
    def train(self) -> TaskSource:
        return Generated(lambda index: Task(f"t{index}", prompt(index), info={"index": index}))

    @property
    def heldout(self) -> Sequence[Task]:
        return ()

    def key(self, task: Task) -> Hashable:
        return task.prompt

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(reward(attempt.text))

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        if self.seconds and (key := (attempt.task.id, attempt.text)) not in self.seen:
            self.seen.add(key)  # a check judges some again, which is no part of the loop
            async with self.judges:
                await asyncio.sleep(self.seconds)
        return (Judged("symbols", 1.0, self.verify(attempt)),)

    def gold(self, task: Task) -> tuple[str, ...]:
        return (next(c for c in SYMBOLS if reward(c) == 1),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (next(c for c in SYMBOLS if reward(c) == 0),)

    async def play(self, task: Task, talk: Talk) -> Stop:
        sibling, count = self.played.get(task.id, 0), self.episodes * self.turns
        self.played[task.id] = sibling + 1
        first = (int(task.info["index"]) * 8 + sibling) * self.turns
        talk.see(task.prompt if isinstance(task.prompt, str) else "")
        for turn in range(self.turns):
            at = (first + turn) % count
            if self.drawn:
                at = int(np.random.default_rng((int(task.info["index"]), sibling, turn)).integers(count))
            await talk.say(int(lengths(count, self.mean)[at]))
            if turn < self.turns - 1:
                await asyncio.sleep(float(waits(count, self.slowest)[at]))
                talk.see(SYMBOLS[turn] * 4)
        return Stop.TURNS


class IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that adds up the time in which nothing could be done: no engine step, no update, only waiting."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self.idle = 0.0
        select = selector.select

        def timed(timeout: float | None = None) -> Any:
            begun = time.perf_counter()
            found = select(timeout)
            self.idle += time.perf_counter() - begun
            return found

        selector.select = timed  # type: ignore[method-assign]


@dataclass
class Clock:
    """A tracker: when each step ended, and how much of the time was idle."""

    loop: IdleLoop
    taking: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Seconds in which a step took its groups so far, and those of them in which nothing could be computed."""
    passes: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(answers, seconds) of each pass of an engine in this process."""
    computes: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    engines: tuple[int, ...] = ()
    """Processes of engines."""

    def log(self, step: Step) -> None:
        used = os.times()
        self.rows.append(
            {
                "step": step.index,
                "at": time.perf_counter(),
                "idle": self.loop.idle,
                "taking": list(self.taking),
                "engines": sum(processor_seconds(pid) + kept_seconds(pid) for pid in self.engines),
                "cpu": used.user + used.system,
                "clock": dict(step.clock),
                "gauges": {n: g.mean for n, g in step.gauges.items() if n.startswith(("rollout/", "engine/tokens"))},
            }
        )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """What is taken and what passes take is counted inside."""
        take, step, spent, now = GroupQueue.take, EngineCounters.step, EngineCounters.spent, [0]
        learned = Trainer.step

        async def timed(queue: GroupQueue, *given: Any) -> Any:
            begun, idle = time.perf_counter(), self.loop.idle
            found = await take(queue, *given)
            self.taking[0] += time.perf_counter() - begun
            self.taking[1] += self.loop.idle - idle
            return found

        def counted(counters: EngineCounters, scheduler: Any, spoke: int) -> None:
            now[0] = spoke
            step(counters, scheduler, spoke)

        def timed_pass(counters: EngineCounters, name: str, seconds: float) -> None:
            spent(counters, name, seconds)
            if name == "engine/step":
                self.passes.append((now[0], seconds))

        def slower(trainer: Trainer, *given: Any, **named: Any) -> Any:
            time.sleep(self.computes)
            return learned(trainer, *given, **named)

        Trainer.step = slower  # type: ignore[method-assign]
        GroupQueue.take, EngineCounters.step, EngineCounters.spent = timed, counted, timed_pass  # type: ignore[method-assign]
        try:
            yield
        finally:
            Trainer.step = learned  # type: ignore[method-assign]
            GroupQueue.take, EngineCounters.step, EngineCounters.spent = take, step, spent  # type: ignore[method-assign]

    def say(self, line: str) -> None:
        return

    def close(self, summary: Mapping[str, float]) -> None:
        return


def make_run(job: SideJob) -> Run:
    known = LADDER[job.algorithm]
    stage = Reinforce(
        name="rl",
        algorithm=patch(known, "measured", "-", pull=None) if known.pull else known,
        sampling=Sampling(max_tokens=job.cap, stop_ids=()),
        optimizer=Optimizer(lr=LR, warmup=0),
        prompts=job.prompts,
        siblings=job.siblings,
        minibatches=job.minibatches,
        epochs=job.epochs,
        staleness=job.staleness,
        steps=job.steps,
        eval=False,
        eval_every=0,
        checkpoint_every=0,
        micro_tokens=8192,
    )
    return Run(
        recipe="asynchrony",
        model=Model(path=job.checkpoint),
        engine=Embedded(update=job.update),
        stages=(stage,),
        evaluation=Evaluation(samples=1),
        threads=job.threads,
        slots=job.slots,
        seed=job.seed,
        record_episodes=False,
        placement=Processes() if job.apart else Local(),
    )


async def play(parts: RunParts) -> None:
    for stage in Stages(parts, Progress(), Stopper()).left():
        await stage.run()


def main() -> None:
    job = SideJob(**json.loads(sys.stdin.readline()))
    run, env = (
        make_run(job),
        ToolCalls(
            episodes=job.prompts * job.siblings,
            turns=job.turns,
            mean=job.mean,
            slowest=job.slowest,
            drawn=job.drawn,
            seconds=job.judge,
            judges=asyncio.Semaphore(job.judges),
        ),
    )
    threads = use_threads(run.threads)
    policy = make_policy(run, env)
    loop = IdleLoop()
    clock = Clock(loop, computes=job.computes)
    with (
        tempfile.TemporaryDirectory() as folder,
        RunFolder.create(Path(folder) / "run", run, facts(policy, threads)) as book,
        whole_answers(job.waits),
        clock.attached(),
    ):
        keep_policy(book, policy)
        parts = make_parts(run, policy, env, book, [clock])
        if isinstance(parts.sampler, EnginePool):
            clock.engines = tuple(e.host.pid for e in parts.sampler.engines if e.host.pid)
        asyncio.set_event_loop(loop)
        begun = {"at": time.perf_counter(), "idle": loop.idle}
        loop.run_until_complete(play(parts))
        parts.close()
    print(json.dumps({"job": asdict(job), "begun": begun, "rows": clock.rows, "passes": clock.passes}), flush=True)


if __name__ == "__main__":
    main()
