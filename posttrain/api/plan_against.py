"""Compares a run with its plan, and says what to make faster first. No torch is imported.

`plan_against` is `posttrain plan --against RUN`, `faster` is `--budget RUN`, `factors_of` is `--calibrate RUN`.
`watch_plan` prints a prediction in the first lines of a run, and later a note if the run takes more time or memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posttrain.api.planned import (
    HERE,
    PlanOptions,
    assumed_of,
    here,
    lengths_of,
    machine_word,
    model_shape,
    stage_of,
    throughput_of,
)
from posttrain.config.engines import Embedded
from posttrain.config.placement import Local
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Gauges, Step, merge
from posttrain.plan.budget import OPTIMISATIONS
from posttrain.plan.machines import Hardware, machine
from posttrain.plan.memory import Place, places
from posttrain.plan.of_run import against
from posttrain.plan.shapes import ModelShape, read_shape
from posttrain.plan.throughput import Throughput, Times
from posttrain.plan.work import Work, work_of
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError

Source = Literal["this run", "counted", "measured here", "quoted"]
"""Whence the saved seconds: this run's measurements, its sizes, measurements of other runs, published figures."""
ROLES = ("rollout", "score", "learn", "sync", "book", "evaluate", "checkpoint")
"""Roles of the record whose seconds make up a step. Those of `evaluate` and `checkpoint` are divided by all steps."""
WITHOUT_RECOMPUTING = {"selective": 1 / 1.22, "full": 1 / 1.42}
"""By the kind of gradient checkpointing: the learner's time without it, as a share of its time with it
(docs/help/slow.md, on a CPU)."""
WORKERS = 4
"""Processes of a reward function in the proposed change."""
LEAST = 0.01
"""Smallest share of a step that is worth a line."""


@dataclass(frozen=True)
class RunChange:
    """One change of a run."""

    words: str
    """Overrides to paste."""
    saves: float
    """Seconds of a step that it saves."""
    price: str
    """What it costs, in words."""
    source: Source


def by_saving(
    run: Run, stage: Stage, work: Work, seconds: Mapping[str, float], gauges: Gauges, clock: Mapping[str, float]
) -> list[RunChange]:
    """The changes that this run does not have, largest saving first. How much a change shortens the measured seconds of
    a role is computed from the run's own sizes, where possible, else from measurements of other runs or published
    figures.

    Args:
        work: the sizes of the stage, with the lengths of the run (`plan.of_run.against.recorded_work`).
        seconds: mean seconds of a step, by role.
        gauges: the gauges of all steps together.
        clock: the mean of every clock entry of a step.
    """
    whole = sum(seconds.values())
    changes = [*_of_any(run, stage, seconds)]
    if isinstance(stage, Reinforce):
        changes += [*_of_sampling(run, stage, work, seconds, gauges, clock), *_of_learning(run, stage, work, seconds)]
    return sorted((c for c in changes if c.saves > LEAST * whole), key=lambda c: -c.saves)


def _of_any(run: Run, stage: Stage, seconds: Mapping[str, float]) -> Iterator[RunChange]:
    for role, every in (("evaluate", "eval_every"), ("checkpoint", "checkpoint_every")):
        if n := getattr(stage, every):
            yield RunChange(f"{stage.name}.{every}={2 * n}", seconds.get(role, 0) / 2, "half as often", "this run")
    if run.record_episodes:
        price = "posttrain show has no episodes to show"
        yield RunChange("record_episodes=false", seconds.get("book", 0), price, "this run")
    if run.model.checkpointing != "none":
        saved = seconds.get("learn", 0) * (1 - WITHOUT_RECOMPUTING[run.model.checkpointing])
        yield RunChange("model.gradient_checkpointing=none", saved, "more memory: plan it first", "measured here")
    if run.model.device != "cpu" and run.model.dtype == "float32":
        # Numbers of half the bytes take half the time to move.
        saved = (seconds.get("learn", 0) + seconds.get("rollout", 0)) / 2
        yield RunChange("model.dtype=bfloat16", saved, "rounded where it is computed", "quoted")


def _of_sampling(
    run: Run, stage: Reinforce, work: Work, seconds: Mapping[str, float], gauges: Gauges, clock: Mapping[str, float]
) -> Iterator[RunChange]:
    name, rollout = stage.name, seconds.get("rollout", 0.0)
    if not stage.staleness:
        # The recorded times in the form of a plan. So the plan's own rule computes the step in which roles overlap.
        times = Times(rollout, 0, seconds.get("score", 0), seconds.get("learn", 0), seconds.get("sync", 0))
        where = "placement=processes " if isinstance(run.placement, Local) else ""
        saved = times.total - times.step("asynchronous")
        price = "samples are a step older; engine and learner need cores or devices of their own"
        yield RunChange(f"{where}{name}.staleness=1", saved, price, "counted")
    if isinstance(run.engine, Embedded):
        # The part of a rollout without passes of the engine: it waits for rewards, tools and tasks.
        waits = rollout - clock.get("engine/step", rollout)
        workers = [i for i, r in enumerate(run.env.rewards) if getattr(r, "workers", 1) == 0]
        if workers:
            # This counts all of the wait as rewards. The record does not tell whether it is, so `price` says it.
            saved = waits * (1 - 1 / WORKERS)
            price = "more processes; brings this where the reward is what the engine waits for"
            yield RunChange(f"env.rewards.{workers[0]}.workers={WORKERS}", saved, price, "counted")
        if not run.engine.lookup and run.engine.draft is None:
            saved = (rollout - max(0.0, waits)) * (1 - OPTIMISATIONS["speculation"].factor)
            yield RunChange("engine.lookup=4", saved, "only where text repeats itself; tokens stay the same", "quoted")
    if not stage.oversample and work.lengths.cv:
        # A group then waits for the k-th of n answers. The k-th shortest length is near their quantile k / (n + 1).
        more = stage.siblings + max(1, stage.siblings // 4)
        first = work.lengths.quantile(stage.siblings / (more + 1)) / work.lengths.longest(work.sequences)
        # The slots' time that is empty, mostly while the last long answers of a step are sampled.
        full = gauges.get("engine/occupancy")
        tail = 1 - full.mean if full is not None and full.count else 0.0
        saved = rollout * max(0.0, 1 - first) * tail
        yield RunChange(f"{name}.oversample={more}", saved, "prefers short answers", "counted")
    if stage.sync_every is None:
        every = 5 * stage.optimizer_steps
        saved = seconds.get("sync", 0) * (1 - OPTIMISATIONS["every 5"].factor)
        yield RunChange(f"{name}.sync_every={every}", saved, "samples are up to 4 steps old", "counted")


def _of_learning(run: Run, stage: Reinforce, work: Work, seconds: Mapping[str, float]) -> Iterator[RunChange]:
    reads = stage.algorithm.reads
    if "reference" in reads and not stage.algorithm.own_teacher:
        price = "no distance to the start is paid for: another algorithm"
        yield RunChange(f"{stage.name}.algorithm.pull=none", seconds.get("score", 0), price, "this run")
    if not run.model.share_prefixes and stage.siblings > 1:
        # The work of a token with and without shared beginnings, as a plan counts it.
        saved = seconds.get("learn", 0) * (1 - replace(work, share=True).unit / replace(work, share=False).unit)
        yield RunChange("model.share_prefixes=true", saved, "results change by rounding", "counted")
    if run.model.lora is None and run.model.path is not None:
        price = "an adapter trains, not all weights"
        # Of a training pass's three matrix products the one for the weight's gradient is left out.
        yield RunChange("model.lora.rank=16", seconds.get("learn", 0) / 3, price, "counted")


FIRST = 5
"""Number of first steps by which a plan is calibrated."""
OVER, SLOWER, STEPS = 1.1, 2.0, 10
"""A note is given if memory is above `OVER` times its prediction, or if the median of `STEPS` steps takes more than
`SLOWER` times its predicted time."""
SHORT = 1.0
"""In a step of fewer seconds Python's own time matters, which no plan counts. A stage with a shorter predicted step is
compared with its own first steps, and there is no note about a step that takes less time than this."""
SHAPES = 1 << 30
"""Bytes that libraries and the heap of a CPU run may keep for the many tensor sizes of a long run. Measured: 650 MiB
after 200 steps, all of different sizes."""


@dataclass(frozen=True)
class PlanAgainst:
    """A stage of a run beside its plan."""

    run: Run
    stage: Stage
    machine: Hardware
    steps: int
    held: float
    """Bytes that the process had before its model was loaded; 0 on an accelerator."""
    memory: tuple[against.Compared, ...]
    """Empty where the run recorded no peaks."""
    place: Place
    time: tuple[against.Compared, ...]
    """Empty where nothing is known of the machine's speed."""
    own: Mapping[str, float]
    """Median seconds of the parts of a step that no plan counts, by the role of the record."""

    @property
    def factors(self) -> dict[str, float]:
        return against.time_factors(self.time)


def stage_work(run: Run, stage: Stage, shape: ModelShape, context: int) -> Work:
    """The sizes of a stage with the lengths that a plan assumes."""
    return work_of(run, stage, shape, lengths_of(stage, context, PlanOptions())[0])


def timed_stage(run: Run, stage: Stage, work: Work, where: Hardware) -> Throughput:
    """A stage on a machine."""
    return throughput_of(run, work, where, assumed_of(run, stage, work, PlanOptions()))


def plan_against(
    folder: str, words: Sequence[str] = (), options: PlanOptions = PlanOptions(), first: int | None = None
) -> PlanAgainst:
    """A run folder beside its plan. `words`: `machine=`, if any. `first`: read only this number of its first steps."""
    file = run_reader.run_file(folder)
    run, stage = file.run, stage_of(file.run, options.stage)
    asked, strange = machine_word(words)
    if strange:
        raise ConfigError(f"{strange[0]}: a run has its settings; only machine= and options go with its folder")
    steps = _steps_of(folder, stage, "--against")[:first]
    where, timed = here() if asked == HERE else (machine(asked), True)
    shape, context = run_shape(run, folder)
    base = stage_work(run, stage, shape, run.model.context or context)
    base = replace(base, ranks=options.nproc or 1, replicas=options.replicas, parallel=options.parallel)
    # On a CPU the process also has libraries and data in memory. The plan counts only what comes on top of these bytes.
    machine_facts: Any = file.facts.get("machine")
    held = float(machine_facts.get("held", 0)) if isinstance(machine_facts, dict) and not base.accelerator else 0.0
    # Memory is compared with the largest step, since a peak is of one step. Time is compared with all steps.
    place = places(against.recorded_work(base, against.largest_step(steps) or steps))[0]
    memory = against.memory_terms(place, steps, held) if held or base.accelerator else []
    work = against.recorded_work(base, steps)
    rows = against.time_terms(timed_stage(run, stage, work, where), steps) if timed else []
    unplanned = {r: statistics.median(x) for r in against.OWN if (x := [s.clock[r] for s in steps if r in s.clock])}
    return PlanAgainst(run, stage, where, len(steps), held, tuple(memory), place, tuple(rows), unplanned)


def _steps_of(folder: str, stage: Stage, option: str) -> list[Step]:
    steps = [s for s in run_reader.steps(folder) if s.stage == stage.name]
    if not steps:
        raise ConfigError(f"{option} {folder}: stage {stage.name} took no step; name another with --stage")
    return steps


def factors_of(folder: str, stage: str | None) -> dict[str, float]:
    """Measured / predicted by role of a run's first steps, for plans of this machine, which must have been probed."""
    factors = plan_against(folder, (), PlanOptions(stage=stage), FIRST + 1).factors
    if not factors:
        raise ConfigError(
            f"--calibrate {folder}: nothing is known of this machine's speed; measure it with posttrain plan --probe"
        )
    return factors


def faster(folder: str, options: PlanOptions) -> tuple[Stage, dict[str, float], list[RunChange]]:
    """The stage, the measured seconds of a step by role, and the changes that would make it shorter."""
    file = run_reader.run_file(folder)
    run, stage = file.run, stage_of(file.run, options.stage)
    steps = _steps_of(folder, stage, "--budget")
    warm = steps[1:] or steps  # without the first step, which also makes checks that are made only once
    clocks = {name for s in warm for name in s.clock}
    mean = {name: sum(s.clock.get(name, 0.0) for s in warm) / len(warm) for name in clocks}
    seconds = {role: mean[role] for role in ROLES if role in mean}
    shape, context = run_shape(run, folder)
    work = against.recorded_work(stage_work(run, stage, shape, run.model.context or context), steps)
    return stage, seconds, by_saving(run, stage, work, seconds, merge(*(s.gauges for s in warm)), mean)


def run_shape(run: Run, folder: str) -> tuple[ModelShape, int]:
    """The shape of a run's model, and its positions, 0 where they are not said."""
    model_folder = Path(folder) / "model"
    return (read_shape(model_folder), 0) if (model_folder / "config.json").is_file() else model_shape(run.model)


@dataclass
class Prediction:
    """The prediction of one stage, and what its steps showed so far."""

    stage: Stage
    work: Work
    place: Place
    timed: Callable[[Work], Throughput]
    steps: list[Step] = field(default_factory=list[Step])
    seen: int = 0
    """Steps of this process: a resumed run begins with a later index."""
    factor: float = 1.0
    """Measured / predicted of the first steps, where the stage is compared with them."""
    said: set[str] = field(default_factory=set[str])


@dataclass
class PlanWatch:
    """A tracker that compares each step with its prediction, and gives one note a stage on memory and one on time. It
    stops nothing. Its notes depend on clocks and memory, so they are printed and not recorded."""

    stages: Mapping[str, Prediction]
    held: float
    tell: Callable[[str], None]

    def log(self, step: Step) -> None:
        p = self.stages.get(step.stage)
        if p is None:
            return
        p.steps.append(step)
        p.seen += 1
        # As many as the two comparisons below read.
        del p.steps[: -(STEPS + FIRST)]
        for what, compare in (("memory", self._memory), ("time", self._time)):
            if what not in p.said and (said := compare(p, step)):
                p.said.add(what)
                self.tell(said)

    def say(self, line: str) -> None:
        """Does nothing: lines of text are only printed in the terminal."""

    def close(self, summary: Mapping[str, float]) -> None:
        """Does nothing: no file is open here."""

    def _memory(self, p: Prediction, step: Step) -> str:
        # Evaluation and checkpoints are no part of the plan of a step.
        peak = max(((x, r) for r, x in step.memory.items() if r not in ("evaluate", "checkpoint")), default=None)
        if peak is None:
            return ""
        most = p.place.most + self.held
        if peak[0] <= OVER * most + (0 if p.work.accelerator else SHAPES):
            return ""
        return (
            f"note: {step.stage} step {step.index} took {peak[0] / 2**30:.1f} GiB in {peak[1]}, more than the plan of"
            f" {most / 2**30:.1f} GiB by over a tenth: posttrain plan --against shows which role it is"
        )

    def _time(self, p: Prediction, step: Step) -> str:
        # Of a step below `SHORT` the first steps, but the very first, say how much longer than planned it takes.
        if p.seen == FIRST + 1:
            predicted = p.timed(against.recorded_work(p.work, p.steps[1:])).step
            p.factor = against.step_seconds(p.steps[1:]) / predicted if predicted < SHORT else 1.0
        # Compared are full windows of `STEPS` steps, which do not overlap and have none of the first steps.
        if p.seen < FIRST + 1 + STEPS or step.index % STEPS:
            return ""
        last = p.steps[-STEPS:]
        predicted, measured = p.factor * p.timed(against.recorded_work(p.work, last)).step, against.step_seconds(last)
        if measured <= max(SLOWER * predicted, SHORT):
            return ""
        like = "its first steps and its lengths tell" if p.factor != 1 else "was planned"
        return (
            f"note: the last {STEPS} steps of {step.stage} took {measured:.3g} s in the middle,"
            f" {measured / predicted:.1f} times what {like} ({predicted:.3g} s): is something else using this"
            " machine? posttrain plan --against shows which role it is"
        )


def watch_plan(run: Run, folder: Path, held: int | None, tell: Callable[[str], None]) -> PlanWatch:
    """Prints the prediction of each stage; returns the tracker that compares the run with it. Nothing is predicted if
    this machine was never probed (`posttrain plan --probe`). A run does not probe it."""
    where, timed = here()
    stages: dict[str, Prediction] = {}
    watch = PlanWatch(stages, float(held or 0), tell)
    # No prediction either if the probed device is a CPU and the run's is not, or the other way round.
    if not timed or held is None or where.device.accelerator != (run.model.device != "cpu"):
        return watch
    try:
        shape = read_shape(folder / "model")
    except ConfigError as error:
        tell(f"plan: none ({error})")
        return watch
    for stage in run.stages:
        try:
            work = stage_work(run, stage, shape, run.model.context or 0)
        except ConfigError:
            continue  # a kind of stage that is not planned
        prediction = Prediction(stage, work, places(work)[0], partial(timed_stage, run, stage, where=where))
        stages[stage.name] = prediction
        tell(
            f"plan: {stage.name} takes at most {prediction.place.most / 2**20:,.0f} MiB above what the process holds,"
            f" and about {prediction.timed(work).step:.2g} s a step with answers of {work.lengths.answer:,.0f} tokens"
        )
    return watch
