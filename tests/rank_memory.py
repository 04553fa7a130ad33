"""The beginning of a run over four ranks, and the most memory that each of its processes had, as a program:
`python -m tests.rank_memory FOLDER MODEL rows|whole local|processes|vllm loaded|pushed` prints bytes as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.api import main, session
from posttrain.config.engines import VLLM
from posttrain.config.placement import Processes
from posttrain.config.run import Model, Optimizer, Run
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.parallel import gather
from posttrain.engine.vllm import worker_parts
from posttrain.role.sync import Sync
from posttrain.stages.ranks.rank_lead import RankLead
from tests.over_ranks import run_of

SIZES: dict[str, Model] = {
    "wide": Model(arch="llama", hidden=448, layers=12, heads=4, kv_heads=4, ffn=1344, context=64),
    "small": Model(arch="llama", hidden=32, layers=2, heads=4, kv_heads=4, ffn=64, context=64),
}
"""125 MB, and what a process needs beside a model."""
RANKS = 4


clib = ctypes.CDLL(None)


class Enough(Exception):
    """Ends the run."""


class MallocInfo(ctypes.Structure):
    """What glibc tells of its memory."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for part in ("arena ordblks smblks hblks hblkhd", "usmblks fsmblks uordblks fordblks keepcost")
        for name in part.split()
    ]


def allocated() -> int:
    """Bytes that this process has asked the C library for and not freed."""
    ask = clib.mallinfo2
    ask.restype = MallocInfo
    told = ask()
    return told.uordblks + told.hblkhd


@contextmanager
def watching(look: Callable[[], object]) -> Iterator[None]:
    """Inside, `look` is called every 2 ms by another thread."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def peaks(folder: Path, size: str, how: str, placement: str, until: str = "loaded") -> dict[str, Any]:
    """Begin the run in a process of its own; the most bytes of each rank until its learner stands, where it ends. With
    until="pushed" it ends after the first push of trained weights, and rank 0's most bytes within that are told too:
    `allocated` what it asked for, `pushed` what it had with all that the C library keeps, each above the start."""
    here = {"PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rank_memory", str(folder), size, how, placement, until]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def saved(folder: Path, size: str) -> Path:
    """The model's directory."""
    made = load_policy(SIZES[size], None, 0)
    made.write(folder / size)
    return folder / size


def _said(pid: int | str, word: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(word)))


def _run(folder: Path, size: str, placement: str) -> Run:
    run = run_of()
    sgd = Optimizer(kind="sgd", lr=1e-3)
    stages = replace(run.stages[0], steps=1, batch=4, optimizer=sgd), replace(run.stages[1], steps=1, optimizer=sgd)
    run = replace(run, stages=stages, model=replace(run.model, path=str(folder / size), context=64))
    if placement == "vllm":
        return replace(run, deterministic=False, engine=VLLM(server=True, cache_gib=0.1, eager=True))
    return replace(run, placement=Processes(engines=1) if placement == "processes" else run.placement)


def _play(folder: Path, size: str, how: str, placement: str, until: str) -> dict[str, Any]:
    out, leads, make, push = dict[str, Any](), list[RankLead](), session.make_parts, Sync.push

    def each(word: str) -> list[int]:
        assert leads and leads[0]._processes is not None
        return [_said(pid, word) for pid in ("self", *leads[0]._processes.pids.values())]

    def parts(*given: Any) -> Any:
        leads.append(given[-1])
        out["before"] = each("VmHWM")
        return make(*given)

    def over(*given: Any) -> Any:
        out["loaded"] = each("VmHWM")
        if until == "loaded":
            raise Enough
        return over_ranks(*given)

    async def watched(self: Sync, version: int) -> str:
        """The first push of trained weights: in that of the first ones much is built that stays."""
        if version == 0:
            return await push(self, version)
        clib.malloc_trim(0)  # what was freed before would hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        held, live = _said("self", "VmRSS"), [allocated()]
        with watching(lambda: live.append(allocated())):
            await push(self, version)
        out["pushed"], out["allocated"] = _said("self", "VmHWM") - held, max(live) - live[0]
        raise Enough

    over_ranks, session.over_ranks, session.make_parts = session.over_ranks, over, parts
    Sync.push = watched  # type: ignore[method-assign]
    gather.BUCKET = worker_parts.BUCKET = 8 << 20
    if how == "whole":
        session.choose_reading = lambda run, lead: (None, ())
    with suppress(Enough):
        main.run(_run(folder, size, placement), out=folder / f"run-{size}-{how}-{placement}", quiet=True, nproc=RANKS)
    return out


if __name__ == "__main__":
    print(json.dumps(_play(Path(sys.argv[1]), *sys.argv[2:])))
