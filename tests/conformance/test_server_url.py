"""A run against a vLLM server that somebody else started: `engine.url`, from the first push to the last evaluation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import make_policy
from posttrain.config.engines import VLLM
from posttrain.engine.vllm.spawn_server import SpawnedServer
from posttrain.record.run_reader import steps as read_steps
from tests.conformance import subjects
from tests.tiny import MODEL, only_rl, play, tiny_parts, tiny_run

pytestmark = pytest.mark.skipif("vllm-server" not in subjects.ENGINES, reason="needs vLLM: make test-vllm")


def test_a_run_trains_against_a_server_by_its_address(tmp_path: Path) -> None:
    """Every canary holds on the way: what is served has the learner's fingerprint after each push, and rho is 1."""
    # vLLM for CPU attends with heads of 32 and more
    run = replace(only_rl(tiny_run(steps=2)), model=replace(MODEL, hidden=64))
    own = SpawnedServer(make_policy(run, make_environment(run)), slots=16, cache_bytes=64 << 20, eager=True)
    try:
        run = replace(run, engine=VLLM(url=own.url, share=str(own.folder)))
        (result,) = asyncio.run(play(tiny_parts(tmp_path, run)))
    finally:
        own.close()
    steps = read_steps(tmp_path)
    assert result.steps == 2 and result.optimizer_steps == 2 and [s.version for s in steps if s.index] == [1, 2]
    assert all(s.gauges["canary/logp_gap_worst"].sum < 2e-3 for s in steps if "canary/logp_gap_worst" in s.gauges)
