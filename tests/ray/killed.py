"""Processes of every kind are killed under placement=ray, and nothing is lost (`make test-ray-kills`): actors with
engines, actors that play episodes, actors with a worker of a reward function, those workers and their guardians,
sandboxes, the tracker of shared memory, and the learner, whose run is resumed on a cluster of its own.

As `tests/prove/test_killed_roles.py` does it in processes: POSTTRAIN_SWEEP_SEED repeats the instants,
POSTTRAIN_SWEEP_KILLS is how many processes are killed. Each run starts and ends its own cluster, whose own processes
are not killed: who loses those has lost the machine.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from posttrain.config.placement import Local, Ray
from posttrain.engine.pool.ray_actor import RayHost
from tests.killing import CheckedEnvironmentParts, RoleKiller, checked, ended, kinds_of, living, order_of_kinds
from tests.late import nothing_lost_or_doubled
from tests.laws.test_placement import outcome, placed
from tests.prove.test_killed_roles import BETWEEN, NOBODY, counted, drawn_seed

KINDS = ("engine", "environment", "actor", "verifier", "guardian", "sandbox", "tracker", "learner")
"""As in `tests.killing`, where `actor` is the actor that holds a worker of a reward function, and its guardian."""
KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", len(KINDS)))
ACTOR, GUARDIAN = "ray::WorkerActor", "posttrain.verifier.workers.guardian"


class RayKiller(RoleKiller):
    """Finds the processes of a run on Ray: below the cluster that the run has started."""

    def __init__(self, started: Path, kinds: list[str], rng: np.random.Generator) -> None:
        super().__init__(kinds, rng, BETWEEN)
        self.started = started

    def alive(self, run: int) -> dict[str, list[int]]:
        parents, commands = living()
        out = {kind: [] for kind in KINDS} | {
            k: v for k, v in kinds_of(run).items() if k not in ("verifier", "guardian")
        }
        for pid in parents:
            if not below(pid, run, parents):
                continue
            above, names = parents[pid], [p.name.partition("-")[0] for p in self.started.glob(f"*-{pid}")]
            for kind in names:
                out[kind].append(pid)
            if commands[pid].startswith(ACTOR):
                out["actor"].append(pid)
            elif GUARDIAN in commands[pid] and commands[above].startswith(ACTOR):
                out["guardian"].append(pid)
            elif GUARDIAN in commands.get(above, "") and commands[parents[above]].startswith(ACTOR):
                out["verifier"].append(pid)
        return out


def below(pid: int, run: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != run:
        pid = parents[pid]
    return pid == run


def test_whoever_is_killed_on_ray_the_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many runs as it takes to kill all of them, at staleness 2. Each ends with the weights, optimizer, episodes and
    record of a run in one process that lost nobody; no sample is lost, none is doubled."""
    (started := tmp_path / "started").mkdir()
    keep_pid = RayHost._keep_pid

    def tells(self: RayHost, facts: Future[Any]) -> None:
        keep_pid(self, facts)
        if self.pid is not None:
            (started / f"{self.name.partition(' ')[0]}-{self.pid}").touch()

    monkeypatch.setattr(RayHost, "_keep_pid", tells)
    monkeypatch.setattr("posttrain.build.spawn_engines.EnvironmentParts", CheckedEnvironmentParts)
    how = Ray(engines=2, environments=2, verifiers=True, deaths=KILLS + 2)
    run = checked(placed(how, 2, steps=12), tmp_path / "rewards")
    ended(tmp_path / "whole", replace(run, placement=Local()), NOBODY)
    whole, rng, killed, runs = outcome(tmp_path / "whole"), np.random.default_rng(drawn_seed()), Counter[str](), 0
    kinds = order_of_kinds(rng, KILLS, KINDS)
    while killed.total() < KILLS:
        killer = RayKiller(started, kinds[killed.total() :], rng)
        folder, runs = tmp_path / f"run{runs}", runs + 1
        ended(folder, run, killer)
        assert killer.killed, "a run in which nobody could be killed"
        killed += killer.killed
        print(f"run {runs}: {dict(killer.killed)}", flush=True)
        assert outcome(folder) == whole, f"it differs after {dict(killer.killed)} were killed"
        nothing_lost_or_doubled(folder, counted(run))
    print(f"killed in {runs} runs: {dict(killed)}")
    assert set(killed) == set(kinds)
