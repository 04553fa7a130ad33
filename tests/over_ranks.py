"""Whole small runs over ranks for the tests, what they left, and processes that are lost."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.api import main
from posttrain.config.model_settings import Lora
from posttrain.config.run import Run
from posttrain.engine.parallel.ranks.rank_processes import RankProcesses
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.record import checkpoint as checkpoints
from posttrain.record import run_reader, step_format
from posttrain.role.weights.saved_weights import OPTIMIZER, WEIGHTS, SavedTensors
from tests.tiny import tiny_run

BOUND = 5e-5
"""Largest difference of a weight after the run, over several ranks, from one process: float32, Adam's division by small
moments, four steps of imitation and four of reinforcement."""
PULLED = patch(GRPO, "pulled", "-", pull=KL(coef=0.05))


def drawn(names: Iterable[str], count: int) -> list[str]:
    """All of them; with POSTTRAIN_RANKS=drawn so many, by POSTTRAIN_SEED."""
    known = list(names)
    if os.environ.get("POSTTRAIN_RANKS", "all") != "drawn":
        return known
    seed = os.environ.get("POSTTRAIN_SEED", "0")
    chosen = random.Random(f"{seed} {known}").sample(known, count)
    return [name for name in known if name in chosen]


def run_of(model: dict[str, Any] | None = None, **rl: Any) -> Run:
    """Imitation, then reinforcement against a reference. POSTTRAIN_SEED draws whether these settings are played with
    shared beginnings.

    Args:
        model: further settings of the model.
    """
    share = random.Random(f"{os.environ.get('POSTTRAIN_SEED', '0')} {model} {rl}").random() < 0.5
    run = tiny_run(**{"steps": 4, "checkpoint_every": 2, "algorithm": PULLED} | rl)
    sft = replace(run.stages[0], steps=4)
    made = replace(run.model, share_prefixes=share, **(model or {}))
    return replace(run, stages=(sft, *run.stages[1:]), deterministic=True, model=made)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer of the last checkpoint, whoever wrote it."""
    last = checkpoints.find(folder).folder
    return {f"{file} {n}": t for file in (WEIGHTS, OPTIMIZER) for n, t in SavedTensors(last / file).whole().items()}


def said(folder: Path) -> list[tuple[str, str, Any]]:
    """Every token that was sampled, in order, and what is learned from it (of judged groups the advantage is what the
    rewards are)."""
    return [
        (row.path.name, name, column.tobytes())
        for row in run_reader.episode_files(folder)
        for name, column in sorted(step_format.read_columns(row.path).items())
        if name in ("ids", "mask", "length", "advantage")
    ]


def apart(a: Path, b: Path) -> float:
    """The largest difference of a weight."""
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    names = [n for n in one if n.startswith(WEIGHTS)]
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in names)


def same_bits(a: Path, b: Path) -> None:
    """Weights, optimizer and record."""
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert run_reader.record_digest(a) == run_reader.record_digest(b)


def is_that_of_one_process(whole: Path, folder: Path) -> None:
    """Weights, tokens, tensors that are written, and steps are those of the other run; and no check said anything."""
    gap = apart(whole, folder)
    print(f"{folder.name}: a weight differs by at most {gap:.2g} (bound {BOUND:g})")
    assert gap <= BOUND and said(whole) == said(folder) != []
    assert {n: (t.dtype, t.shape) for n, t in tensors(whole).items()} == {
        n: (t.dtype, t.shape) for n, t in tensors(folder).items()
    }
    assert [s.index for s in run_reader.steps(folder)] == [s.index for s in run_reader.steps(whole)]
    assert not [n for s in run_reader.steps(folder) for n in s.notes if n.startswith(("stopped", "rule "))]


# --- lost processes ---------------------------------------------------------------------------------------------------


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankProcesses]]:
    """The processes of ranks that runs inside the block begin."""
    made, begin = list[RankProcesses](), RankProcesses.__init__

    def started(self: RankProcesses, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(RankProcesses, "__init__", started)
        yield made


def signalled(made: list[RankProcesses], after: float, number: int, over: threading.Event) -> threading.Thread:
    """Sends a signal to the last rank, so many seconds after its process has begun, or never where the run is over."""

    def send() -> None:
        while not made and not over.is_set():
            time.sleep(0.005)
        if not over.wait(after):
            pid = made[-1].pids[max(made[-1].pids)]
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


ALONE = "import sys; from pathlib import Path; from tests.over_ranks import play; play(*sys.argv[1:])"
"""A run in a process of its own."""


def play(folder: str, lora: str) -> None:
    """Go on over two ranks with the run of all weights, or of an adapter of this rank (0: none)."""
    go_on(Path(folder), run_of({"lora": Lora(rank=int(lora))} if int(lora) else {}), nproc=2, rank_timeout=60.0)


def launched(folder: Path, lora: int, log: Path) -> subprocess.Popen[bytes]:
    """The run as a process of its own, which is rank 0."""
    here = {"PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", ALONE, str(folder), str(lora)], env=os.environ | here, stdout=out, stderr=out
        )


def begun_by(pid: int) -> list[int]:
    """Living processes that were begun to end with this one, whether it lives or not."""
    out = list[int]()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"die_with({pid})".encode() in (entry / "cmdline").read_bytes():
                out.append(int(entry.name))
    return out


def go_on(folder: Path, run: Run, **how: Any) -> None:
    """Go on, or begin where nothing was written yet."""
    if (folder / "run.json").exists():
        main.run(resume=folder, quiet=True, **how)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        main.run(run, out=folder, quiet=True, **how)


# --- torchrun ---------------------------------------------------------------------------------------------------------

WORDS = [
    "arithmetic",
    "sft.steps=3",
    "sft.batch=8",
    "rl.steps=3",
    "rl.prompts=4",
    "rl.siblings=3",
    "rl.eval_every=0",
    "rl.checkpoint_every=1",
    "env.heldout=4",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "model.context=64",
    "deterministic=true",
    "threads=1",
]
"""A run for the command line."""


def torchrun(folder: Path, *how: str) -> subprocess.Popen[str]:
    """`torchrun ... -m posttrain run`, as docs/guides/ranks.md prints it."""
    command = [sys.executable, "-m", "torch.distributed.run", *how]
    command += ["-m", "posttrain", "run", *WORDS, "--out", str(folder)]
    here = {"PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=os.environ | here, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder.parent
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
