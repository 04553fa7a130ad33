"""One side of a benchmark: a process of its own that answers one JSON object per line, and what the machine gave it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Worker:
    """A process that takes commands and answers each with one JSON object. It is told to quit by closing its line.

    Args:
        name: how it is called in messages.
        command: program and arguments.
        threads: of OpenMP and MKL. They wait as in a user's program: a while awake, then asleep. Where neighbours take
            the cores, a barrier costs less with OMP_WAIT_POLICY=PASSIVE in the environment, which both sides then have.
        errors: file for what it prints.
        more: environment variables of this side alone.
    """

    def __init__(
        self, name: str, command: Sequence[str], threads: int, errors: Path, more: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.errors = name, errors
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        env = os.environ | ours | dict(more or {})
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *why: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def listen(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} process ended early. Its last words:\n{self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.listen()

    def timed(self, **command: Any) -> dict[str, Any]:
        """The answer, with CPU seconds of the process and the share of the cores that other programs took meanwhile."""
        before = (time.perf_counter(), _busy(), _own(self._process.pid))
        told = self.ask(**command)
        wall, busy, own = (
            now - then
            for now, then in zip((time.perf_counter(), _busy(), _own(self._process.pid)), before, strict=True)
        )
        return told | {"others": max(0.0, busy - own) / (wall * (os.cpu_count() or 1)), "cpu_seconds": own}


def _busy() -> float:
    """CPU seconds all programs of the machine have used (Linux)."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own(pid: int) -> float:
    """CPU seconds one process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sgemm(seconds: float = 0.5, n: int = 1024) -> dict[str, float]:
    """GFLOP/s of an n-cubed float32 matrix product: the best by wall time, and the median by CPU time, of the library
    that is faster here, MKL or oneDNN.

    The second divides by the calling thread's own CPU time, so what other programs take of the cores does not count;
    the work is split evenly over the threads.
    """
    import torch

    from posttrain.engine.layers.layer_products import linear

    a, b = torch.randn(n, n), torch.randn(n, n)
    found = [_rate(lambda: a @ b, seconds / 2, n), _rate(lambda: linear(a, b), seconds / 2, n)]
    return max(found, key=lambda rate: rate["cpu"])


def _rate(product: Callable[[], object], seconds: float, n: int) -> dict[str, float]:
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun, cpu = time.perf_counter(), time.thread_time()
        product()
        walls.append(time.perf_counter() - begun)
        cpus.append(time.thread_time() - cpu)
    gflop = 2 * n**3 / 1e9
    return {"wall": gflop / min(walls), "cpu": gflop / statistics.median(cpus)}


def machine(threads: int) -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    wait = os.environ.get("OMP_WAIT_POLICY", "default")
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "threads": threads, "threads_wait": wait}
