"""Engines as actors of a real Ray cluster, which the test starts and ends (`make test-ray`)."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray")

from posttrain.config.env import Reward
from posttrain.config.placement import Local, Ray
from posttrain.core.types import SampledTurn
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.environment_pool import EnvironmentPool
from posttrain.engine.pool.ray_actor import RayCluster, RayHost
from posttrain.engine.pool.worker_side import EngineFacts, EngineStart
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_memory import SharedCarrier
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, EngineError
from posttrain.verifier.workers.ray_worker import RayWorker
from tests.engine.pool_parts import PLAIN, KnownSampler, Refuses, known, prompt
from tests.killing import REWARD
from tests.laws.test_placement import Killer, placed, played

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "1"))
"""Actors of a case that are killed at least, in as many runs as that takes, `AT_ONCE` in a run at most."""
AT_ONCE = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    there = RayCluster(None, 2, 1, 60.0)
    yield there
    there.close()


def actor_pool(cluster: RayCluster, engine: object = KnownSampler, timeout: float = 60.0) -> EnginePool:
    start = pickle.dumps(EngineStart(engine, ParcelReceiver))  # type: ignore[arg-type]

    def new(number: int) -> tuple[RayHost, Future[EngineFacts]]:
        host = RayHost(f"engine {number}", start, cluster, number, threads=1)
        return host, host.started

    return EnginePool(new, ParcelSender(SharedCarrier()), count=2, timeout=timeout, deaths=3)


def test_an_address_where_no_cluster_is_says_so() -> None:
    """It comes first: a process has one connection to Ray."""
    with pytest.raises(ConfigError, match=r"placement.address=127.0.0.1:1: no Ray cluster answers"):
        RayCluster("127.0.0.1:1", 1, 0, 5.0)


def test_without_an_address_a_cluster_of_its_own_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Ray itself would look for one that somebody else has started on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    RayCluster(None, 1, 1, 60.0).close()


def test_a_killed_actor_is_replaced_and_its_turns_are_asked_again(cluster: RayCluster) -> None:
    import torch

    pool = actor_pool(cluster)
    first = pool.engines[0].host.pid
    assert first is not None and first != os.getpid()

    async def play() -> list[SampledTurn]:
        assert await pool.load(3, [("w", torch.tensor(2.0))]) == "weight 2"
        os.kill(first, signal.SIGKILL)
        found = await asyncio.gather(*(pool.generate(prompt(t), PLAIN, t) for t in range(40)))
        await pool.score(prompt())  # waits for the new one
        return found

    found = asyncio.run(play())
    assert all((s.ids == known(prompt(t), t, 2.0)).all() and (s.version == 3).all() for t, s in enumerate(found))
    assert pool.clock()["engine/deaths"] == 1 and pool.engines[0].host.pid != first
    pool.close()


LOST_NODE = """
import asyncio, os, signal, sys, time
import ray
from posttrain.engine.pool.ray_actor import RayCluster
from tests.ray.placed import actor_pool
from tests.engine.pool_parts import PLAIN, prompt

cluster = RayCluster(None, 2, 1, 60.0)
pool = actor_pool(cluster, timeout=600.0)

async def play():
    await pool.generate(prompt(), PLAIN, 1)
    for process in ray._private.worker._global_node.all_processes["raylet"]:
        os.kill(process.process.pid, signal.SIGKILL)
    for engine in pool.engines:
        os.kill(engine.host.pid, signal.SIGKILL)
    await pool.generate(prompt(), PLAIN, 2)

try:
    asyncio.run(play())
except Exception as error:
    print(type(error).__name__, error, flush=True)
pool.close()
cluster.close()
"""


def test_a_lost_node_is_told_at_once_and_in_our_words_alone() -> None:
    """Its actors and its agent are killed; no wait has a deadline before ten minutes."""
    told = subprocess.run([sys.executable, "-c", LOST_NODE], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.startswith("EngineError the Ray node of this machine is gone") and "--resume" in told.stdout
    assert told.stdout.count("\n") == 1 and "\x1b" not in told.stdout + told.stderr, told.stdout + told.stderr


def test_a_start_that_fails_tells_its_cause(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match="there is no such model"):
        actor_pool(cluster, partial(Refuses, "raises"))
    with pytest.raises(EngineError, match="engine 0 did not start: its actor is lost"):
        actor_pool(cluster, partial(Refuses, "exits"))


def test_verifiers_on_ray_change_no_bit_though_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster
) -> None:
    """Every fortieth question kills its actor, and is asked again from a new one."""
    (file := tmp_path / "length.py").write_text(REWARD)
    run = placed(Local(), 0, steps=4)
    run = replace(run, env=replace(run.env, rewards=(Reward(function=f"{file}:length", workers=2),)))
    local = played(run, tmp_path / "local")
    asked, killed, ask = Counter[str](), set[int](), RayWorker.ask

    def deadly(self: RayWorker, request: bytes) -> dict[str, Any]:
        asked["all"] += 1
        if asked["all"] % 40 == 39:
            killed.add(self.processes[0])
            os.kill(self.processes[0], signal.SIGKILL)
        return ask(self, request)

    monkeypatch.setattr(RayWorker, "ask", deadly)
    assert played(replace(run, placement=Ray(engines=1, verifiers=True)), tmp_path / "ray") == local
    print(f"{len(killed)} of the verifiers' actors killed, {asked['all']} questions")
    assert len(killed) >= 3 and os.getpid() not in killed


def test_episodes_on_ray_change_no_bit_though_their_actors_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster
) -> None:
    run = placed(Local(), 0, steps=8)
    local = played(run, tmp_path / "local")
    killer, begin = Killer(11, 0.5, 3), EnvironmentPool.__init__

    def watched(self: EnvironmentPool, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        killer.pools.append(cast("EnginePool", SimpleNamespace(engines=self.processes)))

    monkeypatch.setattr(EnvironmentPool, "__init__", watched)
    killer.thread.start()
    try:
        elsewhere = Ray(engines=1, environments=2, deaths=5)
        assert played(replace(run, placement=elsewhere), tmp_path / "ray") == local
    finally:
        killer.over.set()
        killer.thread.join()
    told = sum(s.clock.get("environment/deaths", 0) for s in run_reader.steps(tmp_path / "ray"))
    print(f"{killer.killed} actors that play episodes killed, {told:g} told in the record")
    assert killer.killed


@pytest.mark.parametrize(("staleness", "transport"), [(0, "collective"), (2, "shared")])
def test_engines_on_ray_change_no_bit_though_they_are_killed(
    staleness: int, transport: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster
) -> None:
    local = played(placed(Local(), staleness, steps=8), tmp_path / "local")
    run = placed(Ray(engines=2, transport=transport, deaths=AT_ONCE + 2), staleness, steps=8)
    assert played(run, tmp_path / "ray") == local
    killed, begin = 0, EnginePool.__init__
    while killed < KILLS:
        killer, folder = Killer(7 + killed, 0.5, min(AT_ONCE, max(3, KILLS - killed))), tmp_path / f"killed-{killed}"

        def watched(self: EnginePool, *args: object, killer: Killer = killer, **kwargs: object) -> None:
            begin(self, *args, **kwargs)  # type: ignore[arg-type]
            killer.pools.append(self)

        monkeypatch.setattr(EnginePool, "__init__", watched)
        killer.thread.start()
        try:
            assert played(replace(run), folder) == local
        finally:
            killer.over.set()
            killer.thread.join()
        told = sum(s.clock.get("engine/deaths", 0) for s in run_reader.steps(folder))
        print(f"{killer.killed} actors killed, {told:g} told in the record", flush=True)
        assert killer.killed, "a run in which nobody could be killed"
        killed += killer.killed
