"""The observers of a stage get every event, and keep nothing of it longer than they need it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.checks.data_checks import TaskCheck
from posttrain.checks.learning.gradient_and_update_checks import StepGradients, UpdateCheck, update_agrees
from posttrain.checks.sampling.policy_change import before
from posttrain.config.run import Optimizer, Reinforce
from posttrain.config.stages.stage import Stage
from posttrain.core.abilities import Abilities
from posttrain.core.batch import Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Step
from posttrain.core.sampling import Sampling
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.ladder.policy_rows import DAPO, DR_GRPO
from posttrain.record import run_reader
from posttrain.role.events import (
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    Observers,
    PackedEvent,
    PlayedEvent,
    PushedEvent,
)
from posttrain.stages.checks_by_kind import observers
from posttrain.system.errors import InvariantError
from tests.tiny import play, tiny_parts, tiny_run


def observed(folder: Path, more: Observer) -> None:
    """A tiny run of both kinds of stage, with one more observer, which observes last."""
    parts = tiny_parts(folder)
    own = parts.observe

    def observe(stage: Stage, steps: Sequence[Step], kept: Mapping[str, Any]) -> Observers:
        return Observers([*own(stage, steps, kept)._all, more])

    parts.observe = observe
    asyncio.run(play(parts))


class Counts(Observer):
    async def after(self, roles: Any, step: Step) -> ObserverReport | None:
        return ObserverReport(notes=(f"after {step.stage} {step.index}",))


@pytest.mark.prove
def test_the_end_of_a_step_is_heard_in_every_kind_of_stage(tmp_path: Path) -> None:
    observed(tmp_path / "run", Counts())
    steps = list(run_reader.steps(tmp_path / "run"))
    assert {s.stage for s in steps} == {"sft", "rl"}
    assert all(f"after {s.stage} {s.index}" in s.notes for s in steps)


@pytest.mark.prove
def test_a_stage_that_is_over_frees_its_optimizer(tmp_path: Path) -> None:
    """Moments and masters are as large as the weights: no next stage begins while they wait for the garbage
    collector."""
    parts = tiny_parts(tmp_path / "run")
    make, made, alive = parts.optimize, list[weakref.ref[Any]](), list[bool]()

    def optimize(config: Optimizer) -> Any:
        alive.extend(one() is not None for one in made)
        optimizer = make(config)
        made.append(weakref.ref(optimizer))
        return optimizer

    parts.optimize = optimize
    gc.collect()
    gc.disable()
    try:
        asyncio.run(play(parts))
        alive.extend(one() is not None for one in made)
    finally:
        gc.enable()
    assert alive == [False] * 3


class Copies(Observer):
    """Whether copies of weights are still held when their step is learned. It must observe last."""

    def __init__(self) -> None:
        self.held: list[bool] = []

    async def begin(self, roles: Any) -> None:
        self._check = next(o for o in roles.watch._all if isinstance(o, UpdateCheck))

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, PackedEvent | LearnedEvent):
            self.held.append(self._check._handed is not None)


@pytest.mark.prove
def test_copies_of_weights_live_as_long_as_the_optimizer_step(tmp_path: Path) -> None:
    copies = Copies()
    observed(tmp_path / "run", copies)
    assert len(copies.held) > 12 and not any(copies.held)


class ReadsBefore(Observer):
    """What the policy said before a step: read of its rollouts, and scored by the learner."""

    def __init__(self) -> None:
        self.read: list[np.ndarray] = []
        self.scored: list[np.ndarray] = []
        self.passes: list[int] = []

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or not event.experience.groups:
            return None
        real, run, calls = roles.learner, roles.run, list[Packed]()
        roles.learner = SimpleNamespace(
            score=lambda packed: calls.append(packed) or real.score(packed), routers=real.routers
        )
        for dtype, told in (("float32", self.read), ("bfloat16", self.scored)):
            roles.run = replace(run, model=replace(run.model, dtype=dtype))
            told.append(before(roles, event.experience).logp_M)
            self.passes.append(len(calls))
        roles.learner, roles.run = real, run
        return None


@pytest.mark.prove
def test_the_policy_before_a_step_is_read_of_its_own_rollouts_in_float32(tmp_path: Path) -> None:
    reads = ReadsBefore()
    observed(tmp_path / "run", reads)
    assert len(reads.read) >= 3 and reads.passes == [0, 1] * len(reads.read), "no pass in float32, one elsewhere"
    for read, scored in zip(reads.read, reads.scored, strict=True):
        assert len(read) and float(np.abs(read - scored).max()) <= 1e-4
    assert all(
        float(s.gauges["policy/kl_step"].mean) >= 0 for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"
    )


def test_rollouts_of_older_weights_are_scored_before_a_step() -> None:
    """They are not what the policy says now."""
    old, scored = group(0, (0.0, 1.0)), np.array([-2.0], np.float32)
    roles: Any = SimpleNamespace(
        run=SimpleNamespace(model=SimpleNamespace(dtype="float32")),
        learner=SimpleNamespace(score=lambda packed: np.tile(scored, packed.spoken), routers=lambda: None),
        trainer=SimpleNamespace(version=1, trained=dict),
    )
    assert before(roles, Experience(1, 0, (old,), (True,), 1)).logp_M.tolist() == [-2.0]
    roles.trainer.version = 0
    assert before(roles, Experience(1, 0, (old,), (True,), 1)).logp_M.tolist() == [-1.0]


def test_a_kind_that_derives_from_another_is_observed_like_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Reinforce):
        """A kind of stage from outside the package that plays and learns as reinforcement does."""

    try:
        found = observers(Twice(name="rl", algorithm=DR_GRPO), [], {})
        assert [type(o) for o in found._all] == [
            type(o) for o in observers(Reinforce(name="rl", algorithm=DR_GRPO), [], {})._all
        ]
    finally:
        Twice.withdraw()


def group(visit: int, rewards: Sequence[float]) -> Group:
    task = Task(str(visit), "?")
    said = Segment(
        np.array([1, 2], np.int32),
        np.array([False, True]),
        np.array([np.nan, -1.0], np.float32),
        np.array([-1, 0], np.int32),
        Sampling(stop_ids=()),
    )
    episodes = [
        Episode(task, visit, i, (said,), Stop.SAID, (Judged("x", 1.0, Verdict.value(r)),), "")
        for i, r in enumerate(rewards)
    ]
    return Group(task, visit, tuple(episodes))


@pytest.mark.parametrize("spoilt", [0, 1], ids=["learned from", "spare"])
def test_every_group_that_passed_is_looked_at(spoilt: int) -> None:
    """Those that found no room any more count for the rate at which groups pass, so the filter is wrong about them
    too."""
    played = tuple(group(visit, (1.0, 1.0) if visit == spoilt else (0.0, 1.0)) for visit in range(2))
    environment = SimpleNamespace(train=SimpleNamespace(count=None), abilities=Abilities())
    roles: Any = SimpleNamespace(
        rollout=SimpleNamespace(environment=environment),
        prompts=SimpleNamespace(source=environment.train),
        stage=Reinforce(name="rl", algorithm=DAPO),
    )
    with pytest.raises(InvariantError, match="filter=mixed kept"):
        TaskCheck().on_event(roles, PlayedEvent(Experience(1, 0, played, (True, True), 1)))


@pytest.mark.parametrize("size", [1e-3, 1e-17, 1e-21, 1e-30])
def test_a_gradient_that_float32_cannot_square_is_no_fault(size: float) -> None:
    """The second moment of a gradient below 1e-20 has no digits left in float32; nothing else moves the weights."""
    config = Optimizer(warmup=0)
    w = torch.nn.Parameter(torch.linspace(0.5, 1.5, 7))
    optimizer = StageOptimizer({"w": w}, config)
    w.grad = torch.linspace(-1, 1, 7) * size
    handed = StepGradients.of(optimizer, config)
    optimizer.step()
    update_agrees(config, handed, optimizer.trained(), optimizer.state_tensors())


class Listens(Observer):
    """Whether what a pass said is still alive once its optimizer step is over."""

    def __init__(self) -> None:
        self.alive: list[bool] = []
        self._heard: list[weakref.ref[Any]] = []

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, PackedEvent | PushedEvent):
            self.alive += [one() is not None for one in self._heard]
            self._heard.clear()
        if isinstance(event, LearnedEvent):
            self._heard.append(weakref.ref(event.passes))


@pytest.mark.prove
def test_what_a_pass_said_is_freed_with_its_step(tmp_path: Path) -> None:
    """Hooks on its tensors would keep the arrays alive, and the graph with them."""
    listens = Listens()
    gc.disable()
    try:
        observed(tmp_path / "run", listens)
    finally:
        gc.enable()
    assert len(listens.alive) > 5 and not any(listens.alive)


def test_what_the_run_holds_out_is_not_trained_on_elsewhere(tmp_path: Path) -> None:
    """A stage on the run's tasks with another split: what the run is measured on is among its training tasks."""
    run = tiny_run(steps=8, prompts=8)
    sft, rl = run.stages
    leaks = replace(rl, env=replace(run.env, heldout=1))
    with pytest.raises(InvariantError, match="held-out accuracy would measure memory"):
        posttrain.run(replace(run, stages=(sft, leaks, replace(sft, name="after"))), out=tmp_path / "run", quiet=True)


def test_what_the_run_holds_out_is_not_imitated_elsewhere(tmp_path: Path) -> None:
    sft, rl = tiny_run().stages
    leaks = replace(sft, env=replace(tiny_run().env, heldout=1))
    with pytest.raises(InvariantError, match="held-out accuracy would measure memory"):
        posttrain.run(replace(tiny_run(), stages=(leaks, rl)), out=tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run" / "kept").glob("sft*"))
