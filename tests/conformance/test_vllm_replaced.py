"""A vLLM server under `placement=processes` that is killed (`make test-vllm-ahead`; it starts two of them)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import make_policy
from posttrain.build.spawn_engines import engine_pool
from posttrain.config.engines import VLLM
from posttrain.config.placement import Processes
from posttrain.core.types import SampledTurn
from posttrain.engine.learner.learner import HFLearner
from posttrain.role.sync import whole_tensors
from tests.conformance import subjects
from tests.conformance.test_asked_ahead import ahead
from tests.conformance.test_server_life import alive, left_in_memory, soon

pytestmark = pytest.mark.skipif("vllm-server" not in subjects.ENGINES, reason="needs vLLM: make test-vllm-ahead")


def children(of: int) -> list[int]:
    """Ids of the living processes that this one has begun."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z" and parent == str(of):
            found.append(int(entry.name))
    return found


def test_a_vllm_server_that_is_killed_is_replaced_and_asked_again() -> None:
    """The engine's process lives on and its server does not: both are replaced, with the newest weights."""
    run = ahead(VLLM(eager=True, cache_gib=1 / 16, server=True))
    policy = make_policy(run, make_environment(run))
    before, said = left_in_memory(), list[str]()
    pool = engine_pool(run, Processes(engines=1), policy, said.append)
    learner, contract = HFLearner(policy), subjects.contract(max_tokens=40)
    prompt = np.arange(1, 9, dtype=np.int32)
    first = pool.engines[0].host.pid
    assert first is not None
    (server,) = [p for p in children(first) if os.getpgid(p) == p]

    async def play() -> list[SampledTurn]:
        served = await pool.load(3, whole_tensors(learner.shards()))
        assert served == learner.fingerprint()
        turns = [asyncio.create_task(pool.generate(prompt, contract, t)) for t in range(64)]
        await asyncio.sleep(0.05)
        os.killpg(server, signal.SIGKILL)
        return await asyncio.gather(*turns, pool.generate(prompt, contract, 64))

    try:
        found = asyncio.run(play())
        assert len(found) == 65 and all(
            len(s.ids) == 40 and (s.version == 3).all() and np.isfinite(s.logp).all() for s in found
        )
        assert len({s.ids.tobytes() for s in found}) > 1
        assert "engine 0 died: it has ended with exit code -9. Its last words" in said[0]
        assert pool.clock()["engine/deaths"] == 1 and pool.engines[0].host.pid != first
        last = children(pool.engines[0].host.pid or 0)
    finally:
        pool.close()
    assert last and soon(lambda: not any(alive(p) for p in last)), "a server ends with its engine"
    assert soon(lambda: not left_in_memory() - before), "and folders are removed, also of one that was killed"
