"""What to make faster first in a measured run: changes that it does not have yet, and the seconds that each would save.

A change shortens the measured seconds of a role. How much it shortens them is computed from the run's own sizes, where
that is possible. Else it comes from measurements of other runs or from published figures. `RunChange.source` says
which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.config.engines import Embedded
from posttrain.config.placement import Local
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Gauges
from posttrain.plan.budget import OPTIMISATIONS
from posttrain.plan.throughput import Times
from posttrain.plan.work import Work

Source = Literal["this run", "counted", "measured here", "quoted"]
"""Where the saved seconds come from: this run's measurements, its sizes, measurements of other runs, published
figures."""
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
    """The changes that this run does not have, largest saving first.

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
    """Changes of any stage: what is measured, kept and written, and how numbers are computed."""
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
    """Changes that shorten rollouts, or the wait for them."""
    name, rollout = stage.name, seconds.get("rollout", 0.0)
    if not stage.staleness:
        # The recorded times in the form of a plan, whose rule then computes the step in which roles overlap. The 0:
        # verdicts are within the rollout.
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
        # With `oversample` a group waits for the k-th of n answers, and no longer for the longest one. The k-th
        # shortest of n lengths is near their quantile k / (n + 1).
        more = stage.siblings + max(1, stage.siblings // 4)
        waited = work.lengths.quantile(stage.siblings / (more + 1)) / work.lengths.longest(work.sequences)
        price = "prefers short answers"
        yield RunChange(f"{name}.oversample={more}", rollout * max(0.0, 1 - waited) * _tail(gauges), price, "counted")
    if stage.sync_every is None:
        every = 5 * stage.optimizer_steps
        saved = seconds.get("sync", 0) * (1 - OPTIMISATIONS["every 5"].factor)
        yield RunChange(f"{name}.sync_every={every}", saved, "samples are up to 4 steps old", "counted")


def _tail(gauges: Gauges) -> float:
    """Share of the slots' time that is empty, mostly while the last long answers of a step are sampled."""
    full = gauges.get("engine/occupancy")
    return 1 - full.mean if full is not None and full.count else 0.0


def _of_learning(run: Run, stage: Reinforce, work: Work, seconds: Mapping[str, float]) -> Iterator[RunChange]:
    """Changes that shorten the learner's work on the answers of a step."""
    reads = stage.algorithm.reads
    if "reference" in reads and not stage.algorithm.own_teacher:
        price = "no distance to the start is paid for: another algorithm"
        yield RunChange(f"{stage.name}.algorithm.pull=none", seconds.get("score", 0), price, "this run")
    if not run.model.share_prefixes and stage.siblings > 1:
        # The work of a token with and without shared beginnings, as a plan counts it.
        shared, whole = (replace(work, share=x).group_tokens for x in (True, False))
        saved = seconds.get("learn", 0) * (1 - shared / whole)
        yield RunChange("model.share_prefixes=true", saved, "results change by rounding", "counted")
    if run.model.lora is None and run.model.path is not None:
        price = "an adapter trains, not all weights"
        # A training pass has three matrix products for each weight. With an adapter the one for the weight's gradient
        # is left out.
        yield RunChange("model.lora.rank=16", seconds.get("learn", 0) / 3, price, "counted")
