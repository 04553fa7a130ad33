"""A vLLM server that dies is a typed failure with its log, and no process outlives its run, however that ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.core.types import SampledTurn
from posttrain.engine.vllm.spawn_server import SpawnedServer
from posttrain.engine.vllm.vllm_server import VLLMServer
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import EndpointError, EngineError
from posttrain.verifier.http_client import Endpoint, Patience
from tests.conformance import subjects

pytestmark = pytest.mark.skipif("vllm-server" not in subjects.ENGINES, reason="needs vLLM: make test-vllm")

PROGRAM = """
import sys
from tests.conformance import subjects
from posttrain.engine.vllm import spawn_server as spawn
spawn.SpawnedServer._wait = lambda self: (print(self._process.pid, flush=True), sys.stdin.read())
spawn.SpawnedServer(subjects.new_policy(), slots=2, cache_bytes=1 << 24, eager=True)
"""
"""A run that has started a server and then waits."""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(gone: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while time.monotonic() < until and not gone():
        time.sleep(0.1)
    return gone()


def left_in_memory() -> set[str]:
    """Folders of servers that nobody has removed."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("posttrain-vllm-")}


def test_a_server_ends_with_a_run_that_was_killed() -> None:
    before = left_in_memory()
    run = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    server = int(run.stdout.readline())
    time.sleep(2)
    assert alive(server)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert soon(lambda: not alive(server)) and not left_in_memory() - before, "and its folder is removed"


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(
        EngineError, match=r"did not start: it has ended with exit code 1\. Its last words:[\s\S]*max_num_seqs"
    ):
        SpawnedServer(subjects.new_policy(), slots=-1, cache_bytes=1 << 24, eager=True)


def test_a_server_that_dies_is_reported_with_its_role() -> None:
    policy = subjects.new_policy()
    own = SpawnedServer(policy, slots=4, cache_bytes=64 << 20, eager=True)
    endpoint = Endpoint(own.url, "rollout", patience=Patience(tries=2, first=0.1))
    engine = VLLMServer(policy, endpoint, share=own.folder, timeout=60, ended=own.ended)
    group = own._process.pid
    subject = subjects.Subject("dying", engine, policy, subjects.HFLearner(policy), *[lambda: None] * 4)  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.generate(subject.ids("x"), subjects.contract(), 0)
        await subject.publish(1)
        running = [
            asyncio.create_task(engine.generate(subject.ids("x"), subjects.contract(max_tokens=150), i))
            for i in range(200)
        ]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        os.killpg(group, signal.SIGKILL)
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        failed = [x for x in outcomes if isinstance(x, EndpointError)]
        kinds = Counter(type(x).__name__ for x in outcomes)
        assert failed and len(failed) + kinds[SampledTurn.__name__] == 200, kinds
        assert all(x.role == "rollout" and "exit code -9" in str(x) for x in failed)
        with pytest.raises(EndpointError, match="exit code -9"):
            await engine.load(9, whole_tensors(subject.learner.shards()))
        await endpoint.close()

    try:
        asyncio.run(main())
    finally:
        own.close()
    assert not own.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
