"""Compares a run with its plan. No torch is imported.

`plan_against` is `posttrain plan --against RUN`, `faster` is `--budget RUN`, `factors_of` is `--calibrate RUN`.
`watch_plan` prints a prediction in the first lines of a run, and later a note if the run takes more time or memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.api.faster_run import ROLES, RunChange, by_saving
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
from posttrain.config.run import Run
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step, merge
from posttrain.plan.machines import Hardware, machine
from posttrain.plan.memory import Place, places
from posttrain.plan.of_run.against import (
    OWN,
    Compared,
    largest_step,
    memory_terms,
    recorded_work,
    step_seconds,
    time_factors,
    time_terms,
)
from posttrain.plan.shapes import ModelShape, read_shape
from posttrain.plan.throughput import Throughput
from posttrain.plan.work import Work, work_of
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError

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
    memory: tuple[Compared, ...]
    """Empty where the run recorded no peaks."""
    place: Place
    time: tuple[Compared, ...]
    """Empty where nothing is known of the machine's speed."""
    own: Mapping[str, float]
    """Median seconds of the parts of a step that no plan counts, by the role of the record."""

    @property
    def factors(self) -> dict[str, float]:
        return time_factors(self.time)


def stage_work(run: Run, stage: Stage, shape: ModelShape, context: int) -> Work:
    """The sizes of a stage with the lengths that a plan assumes."""
    return work_of(run, stage, shape, lengths_of(stage, context, PlanOptions())[0])


def timed_stage(run: Run, stage: Stage, work: Work, where: Hardware) -> Throughput:
    """A stage on a machine."""
    return throughput_of(run, work, where, assumed_of(run, stage, work, PlanOptions()))


def plan_against(
    folder: str, words: Sequence[str] = (), options: PlanOptions = PlanOptions(), first: int | None = None
) -> PlanAgainst:
    """A run folder beside its plan.

    Args:
        words: `machine=`, if any.
        options: the stage, and the ranks that trained.
        first: read only this number of its first steps.

    Raises:
        ConfigError: the stage took no step, or its kind is not planned.
    """
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
    place = places(recorded_work(base, largest_step(steps) or steps))[0]
    memory = memory_terms(place, steps, held) if held or base.accelerator else []
    rows = time_terms(timed_stage(run, stage, recorded_work(base, steps), where), steps) if timed else []
    unplanned = {r: statistics.median(x) for r in OWN if (x := [s.clock[r] for s in steps if r in s.clock])}
    return PlanAgainst(run, stage, where, len(steps), held, tuple(memory), place, tuple(rows), unplanned)


def _steps_of(folder: str, stage: Stage, option: str) -> list[Step]:
    """The recorded steps of a stage; ConfigError where there are none. `option`: the one that named the folder."""
    steps = [s for s in run_reader.steps(folder) if s.stage == stage.name]
    if not steps:
        raise ConfigError(f"{option} {folder}: stage {stage.name} took no step; name another with --stage")
    return steps


def factors_of(folder: str, stage: str | None) -> dict[str, float]:
    """Measured / predicted by role of a run's first steps, for plans of this machine.

    Raises:
        ConfigError: this machine was not probed.
    """
    # One more than `FIRST`: of time the very first step is left out (`time_terms`).
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
    work = recorded_work(stage_work(run, stage, shape, run.model.context or context), steps)
    return stage, seconds, by_saving(run, stage, work, seconds, merge(*(s.gauges for s in warm)), mean)


def run_shape(run: Run, folder: str) -> tuple[ModelShape, int]:
    """The shape of a run's model, and its positions, 0 where they are not said."""
    model_folder = Path(folder) / "model"
    return (read_shape(model_folder), 0) if (model_folder / "config.json").is_file() else model_shape(run.model)


# --- in a run ---------------------------------------------------------------------------------------------------------


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
    """A tracker that compares each step with its prediction, and gives one note a stage on memory and one on time.

    It stops nothing. Its notes depend on clocks and memory, so they are printed and not recorded: the record is the
    same in equal runs.
    """

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
        # Evaluation and checkpoints are no part of the plan of a step. `peak`: (bytes, role).
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
        # If the predicted step is shorter than `SHORT`, the first steps say how much longer than planned a step takes.
        # The very first one is left out, since it makes checks that are made only once.
        if p.seen == FIRST + 1:
            predicted = p.timed(recorded_work(p.work, p.steps[1:])).step
            p.factor = step_seconds(p.steps[1:]) / predicted if predicted < SHORT else 1.0
        # Compared are full windows of `STEPS` steps, which do not overlap and have none of the first steps.
        if p.seen < FIRST + 1 + STEPS or step.index % STEPS:
            return ""
        last = p.steps[-STEPS:]
        predicted, measured = p.factor * p.timed(recorded_work(p.work, last)).step, step_seconds(last)
        if measured <= max(SLOWER * predicted, SHORT):
            return ""
        like = "its first steps and its lengths tell" if p.factor != 1 else "was planned"
        return (
            f"note: the last {STEPS} steps of {step.stage} took {measured:.3g} s in the middle,"
            f" {measured / predicted:.1f} times what {like} ({predicted:.3g} s): is something else using this"
            " machine? posttrain plan --against shows which role it is"
        )


def watch_plan(run: Run, folder: Path, held: int | None, tell: Callable[[str], None]) -> PlanWatch:
    """Prints the prediction of each stage; returns the tracker that compares the run with it.

    Nothing is predicted if this machine was never probed (`posttrain plan --probe`). A run does not probe it.
    """
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
            place = places(work)[0]
        except ConfigError:
            continue  # a kind of stage, or adapters, that a plan does not count
        prediction = Prediction(stage, work, place, partial(timed_stage, run, stage, where=where))
        stages[stage.name] = prediction
        tell(
            f"plan: {stage.name} takes at most {prediction.place.most / 2**20:,.0f} MiB above what the process holds,"
            f" and about {prediction.timed(work).step:.2g} s a step with answers of {work.lengths.answer:,.0f} tokens"
        )
    return watch
