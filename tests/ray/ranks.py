"""Ranks beside a Ray cluster that was there before the run, by the command that docs/guides/ranks.md prints (`make
test-ray`)."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from posttrain.engine.pool.ray_actor import must_answer
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError
from tests.over_ranks import WORDS, free_port, said, tensors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/ranks.md"
THERE = "placement.address="
BEGINS = 90.0
"""Seconds in which a cluster answers."""
HERE = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with one CPU each, which are processes on this machine."""
    folder, there = Path(tempfile.mkdtemp(prefix="ray-")), f"127.0.0.1:{free_port()}"
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        port = there.rpartition(":")[2]
        head = _node(closing, folder, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        _await(there, head)
        _node(closing, folder, f"--address={there}")
        yield there


def _node(closing: ExitStack, folder: Path, *how: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1"]
    command += ["--node-ip-address=127.0.0.1", *how]
    with (folder / "said").open("ab") as log:
        node = subprocess.Popen(command, env=HERE | TOKEN, stdout=log, stderr=log, start_new_session=True)
    closing.callback(_end, node)
    return node


def _end(node: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        node.send_signal(signal.SIGTERM)
    try:
        node.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)


def _await(there: str, cluster: subprocess.Popen[bytes]) -> None:
    last = time.monotonic() + BEGINS
    while True:
        assert cluster.poll() is None, "the cluster has ended"
        try:
            return must_answer(there, 1.0)
        except ConfigError:
            assert time.monotonic() < last, "the cluster does not answer"
            time.sleep(0.5)


def printed() -> list[str]:
    """The words of the page's command, without the address."""
    (line,) = [x.strip() for x in PAGE.read_text().splitlines() if x.startswith("    posttrain run") and THERE in x]
    words = shlex.split(line)
    assert words[:3] == ["posttrain", "run", "arithmetic"]
    return [w for w in words[3:] if not w.startswith(THERE)]


def ended(folder: Path, *more: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "posttrain", "run", *WORDS, "--out", str(folder), *more]
    return subprocess.run(command, env=env, cwd=folder.parent, text=True, capture_output=True, timeout=300)


def play(folder: Path, *more: str) -> Path:
    done = ended(folder, *more, env=HERE | TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_command_of_the_page_trains_to_what_ranks_come_to_alone(address: str, tmp_path: Path) -> None:
    """Weights, optimizer and samples of two ranks with an engine beside rank 0; by both kinds of transport."""
    alone = play(tmp_path / "alone", "--nproc", "2")
    words = [*printed(), f"{THERE}{address}", "placement.cores=1"]  # so that each engine is on a node of its own
    assert "placement.transport=collective" in words
    for name in ("collective", "shared"):
        more = [w.replace("collective", name) for w in words]
        folder = play(tmp_path / name, *more)
        one, other = tensors(alone), tensors(folder)
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
        assert said(alone) == said(folder) != []
        assert [s.index for s in run_reader.steps(folder)] == [s.index for s in run_reader.steps(alone)]
        print(f"{name}: the same bits")


def test_a_cluster_with_a_token_says_what_is_missing(address: str, tmp_path: Path) -> None:
    """Without the token in the environment, although the cluster is there."""
    done = ended(tmp_path / "run", "placement=ray", f"{THERE}{address}", env=HERE | {"RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 2 and "set RAY_AUTH_MODE=token" in done.stderr, done.stdout + done.stderr
