"""vLLM under `placement=processes`: several engines as one sampler, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.config.engines import VLLM
from posttrain.config.placement import Processes
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.pool_turns import PooledEngine, PooledTurn
from posttrain.role.learning.logprob_tolerance import LEAST
from tests.conformance import subjects
from tests.conformance.test_asked_ahead import ahead
from tests.late import nothing_lost_or_doubled, rl_steps

pytestmark = pytest.mark.skipif("vllm-server" not in subjects.ENGINES, reason="needs vLLM: make test-vllm-servers")
HOW = VLLM(eager=True, cache_gib=1 / 16)


def test_a_run_on_two_engines_of_which_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays_on_though_one_is_killed(replace(HOW, update="inflight"), Processes(engines=2), tmp_path, monkeypatch)


def plays_on_though_one_is_killed(
    how: VLLM, placement: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is asked ahead, and weights arrive in the middle of turns. An engine is killed as the third version is
    installed: no sample is lost or doubled, and all log-probs are the learner's."""
    given, killed, take, load = Counter[str](), list[int](), PooledEngine.take, EnginePool.load

    def counted(self: PooledEngine, turn: PooledTurn) -> None:
        given[self.name] += 1
        take(self, turn)

    async def deadly(self: EnginePool, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        if version == 3:
            pid = self.engines[1].host.pid
            assert pid is not None
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return await load(self, version, tensors)

    monkeypatch.setattr(PooledEngine, "take", counted)
    monkeypatch.setattr(EnginePool, "load", deadly)
    run = replace(ahead(how), placement=placement)
    folder = posttrain.run(run, out=tmp_path / "run", quiet=True).folder
    nothing_lost_or_doubled(folder, run)
    steps = rl_steps(folder)
    assert killed and sum(s.clock["engine/deaths"] for s in steps) == 1
    assert set(given) == {"engine 0", "engine 1"} and min(given.values()) > sum(given.values()) / 10, "both sample"
    gaps = [s.gauges["canary/logp_gap_worst"].sum for s in steps if "canary/logp_gap_worst" in s.gauges]
    assert gaps and max(gaps) < LEAST["float32"].worst
