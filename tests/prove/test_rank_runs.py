"""Whole runs over ranks: the run of one process, whatever their number, with every kind of stage that is offered; with
engines in processes of their own; gone on with by another number of ranks; under torchrun with two nodes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.api import main
from posttrain.config.placement import Processes
from posttrain.config.run import Optimizer
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.stage import Stage
from posttrain.core.sampling import Sampling
from posttrain.record import checkpoint as checkpoints
from posttrain.record import run_reader
from tests.killing import cut_run
from tests.over_ranks import BOUND, WORDS, apart, drawn, free_port, run_of, said, same_bits, tensors, torchrun

pytestmark = pytest.mark.prove
ROOT = Path(__file__).parents[2]


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
        assert [s.index for s in run_reader.steps(folder)] == [s.index for s in run_reader.steps(whole)]
        assert not [n for s in run_reader.steps(folder) for n in s.notes if n.startswith("stopped")]


def test_twice_the_same(two: Path, tmp_path: Path) -> None:
    main.run(run_of(), out=tmp_path / "again", quiet=True, nproc=2)
    same_bits(two, tmp_path / "again")


STAGES: dict[str, Stage] = {
    "dpo": Preference(name="dpo", batch=6, steps=3, optimizer=Optimizer(lr=1e-3, warmup=1), eval=False),
    "online": OnlinePreference(
        name="online", prompts=6, sampling=Sampling(max_tokens=6), eval_every=0, steps=3, optimizer=Optimizer(lr=1e-3)
    ),
}
"""Further kinds of stage, each after the imitation."""


@pytest.mark.parametrize("kind", drawn(STAGES, 1))
def test_preferences_over_ranks(kind: str, tmp_path: Path) -> None:
    run = replace(run_of(), stages=(run_of().stages[0], STAGES[kind]))
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "two", quiet=True, nproc=2)
    gap = apart(tmp_path / "one", tmp_path / "two")
    print(f"{kind}: a weight differs by at most {gap:.2g} (bound {BOUND:g})")
    assert gap <= BOUND and said(tmp_path / "one") == said(tmp_path / "two")


@pytest.mark.parametrize("transport", drawn(["shared", "collective"], 1))
def test_engines_in_processes_get_the_weights_of_all_ranks(transport: Any, two: Path, tmp_path: Path) -> None:
    """Two ranks and two engines, each in a process of its own: the bits of two ranks with an engine beside rank 0."""
    run = replace(run_of(), placement=Processes(engines=2, transport=transport))
    main.run(run, out=tmp_path / "placed", quiet=True, nproc=2)
    one, other = tensors(two), tensors(tmp_path / "placed")
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert said(two) == said(tmp_path / "placed")


# --- gone on with by another number of ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("wrote", drawn(["1", "2", "4"], 1))
def test_a_run_goes_on_with_another_number_of_ranks(
    wrote: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by 1, 2 or 4 ranks, gone on with by 1, 2, 4 or one process without any."""
    cut_run(run_of(), tmp_path / "cut", monkeypatch, nproc=int(wrote))
    parts = list((checkpoints.find(tmp_path / "cut").folder).glob("weights*.safetensors"))
    assert len(parts) == int(wrote)
    for word in drawn(["none", "1", "2", "4"], 2):
        reads = None if word == "none" else int(word)
        folder = tmp_path / f"by-{reads}"
        shutil.copytree(tmp_path / "cut", folder)
        main.run(resume=folder, quiet=True, nproc=reads)
        gap = apart(whole, folder)
        print(f"written by {wrote}, read by {reads}: {gap:.2g}")
        assert gap <= BOUND and said(whole) == said(folder)
        if wrote == "1" and reads in (None, 1):
            same_bits(whole, folder)


def test_a_run_of_one_process_goes_on_over_ranks(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_run(run_of(), tmp_path / "cut", monkeypatch)
    main.run(resume=tmp_path / "cut", quiet=True, nproc=2)
    assert apart(whole, tmp_path / "cut") <= BOUND and said(whole) == said(tmp_path / "cut")


SRUN = """#!/bin/bash
for node in $(seq "$SLURM_NNODES"); do "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait "$node" || code=$?; done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf '127.0.0.1\n127.0.0.1\n'
"""
"""What stands for the commands of SLURM: two nodes, which are this machine, and the same command on each."""


def by_address(folder: Path) -> list[subprocess.Popen[str]]:
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [torchrun(folder, *meet, "--node-rank", str(n)) for n in range(2)]


def by_slurm(folder: Path) -> list[subprocess.Popen[str]]:
    """The script of docs/guides/ranks.md with one rank on each node, another port and folder, and a smaller run."""
    (script,) = re.findall(r"```slurm\n(.*?)```", (ROOT / "docs/guides/ranks.md").read_text(), flags=re.S)
    for old, new in {
        "--nproc-per-node 2": "--nproc-per-node 1",
        ":29500": f":{free_port()}",
        "run arithmetic": f"run {' '.join(WORDS)}",
        "/shared/runs/mine": str(folder),
    }.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (bin := folder.parent / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "job": script}.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | slurm | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    to: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([bin / "job"], env=env, cwd=folder.parent, **to)]


@pytest.mark.parametrize("how", drawn(["address", "slurm"], 1))
def test_two_nodes_of_torchrun(how: str, tmp_path: Path) -> None:
    """Two nodes on loopback, one rank on each: the bits of `--nproc 2`."""
    main.run("arithmetic", *WORDS[1:], out=tmp_path / "nproc", quiet=True, nproc=2)
    begun = (by_slurm if how == "slurm" else by_address)(tmp_path / "nodes")
    told = [one.communicate(timeout=240)[0] for one in begun]
    assert not any(one.returncode for one in begun), told
    same_bits(tmp_path / "nproc", tmp_path / "nodes")
