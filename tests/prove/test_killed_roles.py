"""Processes of every kind are killed under placement=processes, and nothing is lost: engines, verifier workers and
their guardians, sandboxes, the tracker of shared memory, processes that play episodes, and the learner, whose run is
resumed.

The instants are drawn from a seed that is printed: POSTTRAIN_SWEEP_SEED repeats it, POSTTRAIN_SWEEP_KILLS is how many
processes are killed, every kind as often as the others. Children are forked from a process that has computed nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config.placement import Local, Processes
from posttrain.config.run import Run
from posttrain.core.exchange.request_owner import DEADLY
from posttrain.record import run_reader, step_format
from posttrain.sandbox.choose_backend import choose
from tests.killing import (
    KINDS,
    POISON,
    CheckedEnvironmentParts,
    DeadlyParts,
    RoleKiller,
    checked,
    ended,
    gone,
    kinds_of,
    order_of_kinds,
)
from tests.late import nothing_lost_or_doubled
from tests.laws.test_placement import outcome, placed

pytestmark = pytest.mark.prove

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", len(KINDS)))
BETWEEN = 0.5
"""Mean seconds between two kills."""
NOBODY = RoleKiller((), np.random.default_rng(0), 1.0)
"""Kills nobody."""


@pytest.fixture(scope="module", autouse=True)
def sandboxes() -> None:
    """The self-test of the sandbox is done once, here, and not in each child."""
    choose("auto", ())


def drawn_seed() -> int:
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    print(f"\nPOSTTRAIN_SWEEP_SEED={seed}")
    return seed


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.build.spawn_engines.EnvironmentParts", CheckedEnvironmentParts)


def processes(folder: Path, staleness: int, steps: int = 12, **how: Any) -> Run:
    return checked(placed(Processes(engines=2, environments=2, **how), staleness, steps=steps), folder)


def counted(run: Run) -> Run:
    """The run as `nothing_lost_or_doubled` reads it."""
    return replace(run, env=replace(run.env, rewards=()))


@pytest.mark.parametrize("staleness", [0, 2])
def test_whoever_is_killed_the_run_ends_with_the_same_bits(staleness: int, tmp_path: Path) -> None:
    """As many runs as it takes to kill all of them. Each ends with the weights, optimizer, episodes and record of a run
    in one process that lost nobody; no sample is lost, none is doubled."""
    run = processes(tmp_path / "rewards", staleness, deaths=KILLS + 2)
    ended(tmp_path / "whole", replace(run, placement=Local()), NOBODY)
    whole, rng, killed, runs = outcome(tmp_path / "whole"), np.random.default_rng(drawn_seed()), Counter[str](), 0
    kinds = order_of_kinds(rng, KILLS)
    while killed.total() < KILLS:
        killer = RoleKiller(kinds[killed.total() :], rng, BETWEEN)
        folder, runs = tmp_path / f"run{runs}", runs + 1
        ended(folder, run, killer)
        assert killer.killed, "a run in which nobody could be killed"
        killed += killer.killed
        print(f"run {runs}: {dict(killer.killed)}", flush=True)
        assert outcome(folder) == whole, f"it differs after {dict(killer.killed)} were killed"
        nothing_lost_or_doubled(folder, counted(run))
    print(f"killed in {runs} runs: {dict(killed)}")
    assert set(killed) == set(kinds)


def test_nobody_outlives_a_run_whose_learner_is_killed(tmp_path: Path) -> None:
    """Engines, verifiers and sandboxes end with it, though it cannot tell them."""
    seen = dict[str, list[int]]()

    class Looks(RoleKiller):
        def attack(self, run: int) -> None:
            while not all(seen.get(kind) for kind in KINDS) and not self.over.wait(0.05):
                seen.update(kinds_of(run))
            super().attack(run)

    run = processes(tmp_path / "rewards", 0, steps=4)
    assert ended(tmp_path / "run", run, Looks(["learner"], np.random.default_rng(0), 0.01)) == 1
    assert all(seen[kind] for kind in KINDS), f"not all kinds were there: {seen}"
    assert [len(seen[kind]) for kind in ("learner", "engine", "environment", "tracker")] == [1, 2, 2, 1]
    every = [pid for pids in seen.values() for pid in pids]
    assert len(set(every)) == len(every), "no process is of two kinds"
    assert gone(every)


def test_a_poisonous_task_ends_on_the_dead_letter_list_whoever_else_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its episodes fail by name after `placement.deaths` engines. Those of all other tasks are said and judged as in a
    run without poison, although verifiers, sandboxes and the tracker are killed meanwhile."""
    run = processes(tmp_path / "rewards", 0, steps=1, deaths=2)
    ended(tmp_path / "whole", replace(run, placement=Local()), NOBODY)
    healthy = first_step(tmp_path / "whole")
    poisoned = healthy[0].episode
    segment = poisoned.segments[0]
    monkeypatch.setenv(POISON, " ".join(str(int(i)) for i in segment.ids[: int(np.argmax(segment.mask))]))
    monkeypatch.setattr("posttrain.build.spawn_engines.EngineParts", DeadlyParts)
    rng = np.random.default_rng(drawn_seed())
    killer = RoleKiller(order_of_kinds(rng, KILLS, KINDS[1:6]), rng, BETWEEN)
    ended(tmp_path / "poisoned", run, killer)
    print(f"killed beside the engines that died of it: {dict(killer.killed)}")
    assert killer.killed
    found = first_step(tmp_path / "poisoned")
    failed = [e.episode for e in found if e.episode.reward is None]
    assert {(e.task.id, e.sibling) for e in failed} == {
        (e.episode.task.id, e.episode.sibling) for e in healthy if e.episode.task.id == poisoned.task.id
    }
    assert all(e.verdicts[0].source == DEADLY for e in failed)
    # Where the killer met an episode's environment twice, that may have ended it before the second engine died of it.
    by_engines = ["2 engines died" in e.error for e in failed]
    by_environments = ["2 processes of environments died" in e.error for e in failed]
    assert any(by_engines) and all(x or y for x, y in zip(by_engines, by_environments, strict=True))
    others = [{said(e) for e in rows if e.episode.task.id != poisoned.task.id} for rows in (healthy, found)]
    assert others[0] == others[1] and others[0]
    notes = [n for s in run_reader.steps(tmp_path / "poisoned") for n in s.notes if n.startswith("dead letter")]
    assert notes and all(f"task {poisoned.task.id!r}" in n for n in notes)


def first_step(folder: Path) -> tuple[step_format.Recorded, ...]:
    """The episodes of the first step of reinforcement."""
    rows = [r for r in run_reader.episode_files(folder) if (r.stage, r.kind) == ("rl", "train")]
    return step_format.from_columns(step_format.read_columns(rows[0].path))


def said(row: step_format.Recorded) -> tuple[str, int, bytes, float | None]:
    e = row.episode
    return e.task.id, e.sibling, e.segments[0].ids.tobytes(), e.reward
