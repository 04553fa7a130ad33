"""The beginning of a run over four ranks, and the most memory that each of its processes had, as a program:
`python -m tests.rank_memory FOLDER MODEL rows|whole local|processes` prints bytes as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.api import main, session
from posttrain.controller.rank_lead import RankLead
from posttrain.core.placement import Processes
from posttrain.core.run import Model, Optimizer
from posttrain.engine.models import load_policy
from tests.over_ranks import run_of

SIZES: dict[str, Model] = {
    "wide": Model(arch="llama", hidden=320, layers=24, heads=4, kv_heads=4, ffn=960, context=64),
    "small": Model(arch="llama", hidden=32, layers=2, heads=4, kv_heads=4, ffn=64, context=64),
}
"""109 MB, and what a process needs beside a model."""
RANKS = 4


class Enough(Exception):
    """Ends the run."""


def peaks(folder: Path, size: str, how: str, placement: str) -> dict[str, Any]:
    """Begin the run in a process of its own; the most bytes of each rank until its learner stands, where it ends."""
    here = {"PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rank_memory", str(folder), size, how, placement]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def saved(folder: Path, size: str) -> Path:
    """The model's directory."""
    made = load_policy(SIZES[size], None, 0)
    made.write(folder / size)
    return folder / size


def _peak(pid: int | str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def _play(folder: Path, size: str, how: str, placement: str) -> dict[str, Any]:
    run = run_of()
    sft = replace(run.stages[0], steps=1, batch=4, optimizer=Optimizer(kind="sgd", lr=1e-3))
    run = replace(run, stages=(sft,), model=replace(run.model, path=str(folder / size), context=64))
    run = replace(run, placement=Processes(engines=1) if placement == "processes" else run.placement)
    out, leads, make = dict[str, Any](), list[RankLead](), session.make_parts

    def pids() -> list[int | str]:
        assert leads and leads[0]._processes is not None
        return ["self", *leads[0]._processes.pids.values()]

    def parts(*given: Any) -> Any:
        leads.append(given[-1])
        out["before"] = [_peak(pid) for pid in pids()]
        return make(*given)

    def over(*given: Any) -> Any:
        out["loaded"] = [_peak(pid) for pid in pids()]
        raise Enough

    session.over_ranks, session.make_parts = over, parts
    if how == "whole":
        session.choose_reading = lambda run, lead: (None, ())
    with suppress(Enough):
        main.run(run, out=folder / f"run-{size}-{how}-{placement}", quiet=True, nproc=RANKS)
    return out


if __name__ == "__main__":
    print(json.dumps(_play(Path(sys.argv[1]), *sys.argv[2:])))
