"""Whole runs over ranks: the run of one process, whatever their number; killed, stopped, resumed with another number;
under torchrun with two nodes; and with faults in them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.api import main, ranked
from posttrain.core import checkpoint as checkpoints
from posttrain.core import reader, record
from posttrain.core.algorithm import patch
from posttrain.core.errors import InvariantError
from posttrain.core.ladder import GRPO
from posttrain.core.pieces.pull import KL
from posttrain.core.run import Run
from posttrain.engine.rank_orders import RankLost
from posttrain.role.saved_parts import SavedTensors
from posttrain.role.weights import OPTIMIZER, WEIGHTS
from tests import rank_faults
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove

BOUND = 5e-5
"""Largest difference of a weight after the run, over several ranks, from one process: float32, Adam's division by small
moments, four steps of imitation and four of reinforcement."""
KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "20"))
PULLED = patch(GRPO, "pulled", "-", pull=KL(coef=0.05))


def run_of(**rl: Any) -> Run:
    """Imitation, then reinforcement against a reference. Nothing is shared between segments, as over ranks."""
    run = tiny_run(**{"steps": 4, "checkpoint_every": 2, "algorithm": PULLED} | rl)
    sft = replace(run.stages[0], steps=4)
    return replace(
        run, stages=(sft, *run.stages[1:]), deterministic=True, model=replace(run.model, share_prefixes=False)
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer of the last checkpoint, whoever wrote it."""
    last = checkpoints.find(folder).folder
    return {f"{file} {n}": t for file in (WEIGHTS, OPTIMIZER) for n, t in SavedTensors(last / file).whole().items()}


def said(folder: Path) -> list[tuple[str, str, Any]]:
    """Every token that was sampled, in order, and what is learned from it (of judged groups the advantage is what the
    rewards are)."""
    return [
        (row.path.name, name, column.tobytes())
        for row in reader.episode_files(folder)
        for name, column in sorted(record.read_columns(row.path).items())
        if name in ("ids", "mask", "length", "advantage")
    ]


def apart(a: Path, b: Path) -> float:
    """The largest difference of a weight."""
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    names = [n for n in one if n.startswith(WEIGHTS)]
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in names)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    main.run(run_of(), out=folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same over two ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "two"
    main.run(run_of(), out=folder, quiet=True, nproc=2)
    return folder


def same_bits(a: Path, b: Path) -> None:
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert reader.record_digest(a) == reader.record_digest(b)


def test_one_rank_is_one_process(whole: Path, tmp_path: Path) -> None:
    """Law 7 over ranks: weights, optimizer and record, bit for bit."""
    main.run(run_of(), out=tmp_path / "run", quiet=True, nproc=1)
    same_bits(whole, tmp_path / "run")


def test_ranks_train_to_what_one_process_comes_to(whole: Path, two: Path, tmp_path: Path) -> None:
    """Two and four ranks: the same tokens are sampled, and the weights differ by rounding."""
    main.run(run_of(), out=tmp_path / "four", quiet=True, nproc=4)
    for folder in (two, tmp_path / "four"):
        gap = apart(whole, folder)
        print(f"{folder.name}: a weight differs by at most {gap:.2g} (bound {BOUND:g})")
        assert gap <= BOUND and said(whole) == said(folder) != []
        assert [s.index for s in reader.steps(folder)] == [s.index for s in reader.steps(whole)]
        assert not [n for s in reader.steps(folder) for n in s.notes if n.startswith("stopped")]


def test_twice_the_same(two: Path, tmp_path: Path) -> None:
    main.run(run_of(), out=tmp_path / "again", quiet=True, nproc=2)
    same_bits(two, tmp_path / "again")


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
    """`torchrun ... -m posttrain run`, as docs/shards.md prints it."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *how,
        "-m",
        "posttrain",
        "run",
        *WORDS,
        "--out",
        str(folder),
    ]
    here = {"PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=os.environ | here, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder.parent
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_nodes_of_torchrun(tmp_path: Path) -> None:
    """Two nodes on loopback, one rank on each: the bits of `--nproc 2`."""
    main.run("arithmetic", *WORDS[1:], out=tmp_path / "nproc", quiet=True, nproc=2)
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes = [torchrun(tmp_path / "nodes", *meet, "--node-rank", str(n)) for n in range(2)]
    told = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    same_bits(tmp_path / "nproc", tmp_path / "nodes")


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rank_faults.FAULTS)
def test_a_planted_fault_stops_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, whatever rank sees it first, before the run ends. The healthy runs above are the same without it."""
    monkeypatch.setattr(ranked, "WORKER", rank_faults.__name__)
    monkeypatch.setenv(rank_faults.PLANTED, name)
    sft, rl = run_of(steps=1).stages
    sft = replace(sft, batch=7)  # an odd number of units over two ranks
    run = replace(run_of(), stages=(sft, rl) if name == "a part is of another version" else (sft,))
    with rank_faults.planted(name, 0), pytest.raises((InvariantError, RankLost)) as found:
        main.run(run, out=tmp_path / "run", quiet=True, nproc=2, rank_timeout=30.0)
    print(found.value)
    assert rank_faults.FAULTS[name][1] in str(found.value)
