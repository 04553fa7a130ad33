"""Whole runs over ranks: the run of one process, whatever their number; killed, stopped, resumed with another number;
under torchrun with two nodes; and with faults in them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.api import main, ranked
from posttrain.controller.interrupt import Interrupted
from posttrain.controller.stages.reinforce import ReinforceDriver
from posttrain.core import checkpoint as checkpoints
from posttrain.core import reader, record
from posttrain.core.algorithm import patch
from posttrain.core.errors import InvariantError
from posttrain.core.ladder import GRPO
from posttrain.core.pieces.pull import KL
from posttrain.core.placement import Processes
from posttrain.core.preference_stage import OnlinePreference, Preference
from posttrain.core.run import Optimizer, Run
from posttrain.core.sampling import Sampling
from posttrain.core.stage import Stage
from posttrain.engine.rank_orders import RankLost
from posttrain.engine.rank_processes import RankProcesses
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


STAGES: dict[str, Stage] = {
    "dpo": Preference(name="dpo", batch=6, steps=3, optimizer=Optimizer(lr=1e-3, warmup=1), eval=False),
    "online": OnlinePreference(
        name="online", prompts=6, sampling=Sampling(max_tokens=6), eval_every=0, steps=3, optimizer=Optimizer(lr=1e-3)
    ),
}
"""Further kinds of stage, each after the imitation."""


@pytest.mark.parametrize("kind", STAGES)
def test_preferences_over_ranks(kind: str, tmp_path: Path) -> None:
    run = replace(run_of(), stages=(run_of().stages[0], STAGES[kind]))
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "two", quiet=True, nproc=2)
    gap = apart(tmp_path / "one", tmp_path / "two")
    print(f"{kind}: a weight differs by at most {gap:.2g} (bound {BOUND:g})")
    assert gap <= BOUND and said(tmp_path / "one") == said(tmp_path / "two")


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_engines_in_processes_get_the_weights_of_all_ranks(transport: Any, two: Path, tmp_path: Path) -> None:
    """Two ranks and two engines, each in a process of its own: the bits of two ranks with an engine beside rank 0."""
    run = replace(run_of(), placement=Processes(engines=2, transport=transport))
    main.run(run, out=tmp_path / "placed", quiet=True, nproc=2)
    one, other = tensors(two), tensors(tmp_path / "placed")
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert said(two) == said(tmp_path / "placed")


# --- cut and resumed --------------------------------------------------------------------------------------------------


def cut_run(folder: Path, nproc: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops by a signal after its second step of reinforcement."""
    remember = ReinforceDriver.remember

    def cut(self: ReinforceDriver, asked: Any, step: Any) -> Any:
        if asked.index == 2:
            self.stopper.stop(15)
        return remember(self, asked, step)

    with monkeypatch.context() as patched:
        patched.setattr(ReinforceDriver, "remember", cut)
        with pytest.raises(Interrupted):
            main.run(run_of(), out=folder, quiet=True, nproc=nproc)


@pytest.mark.parametrize("wrote", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_ranks(
    wrote: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by 1, 2 or 4 ranks, gone on with by 1, 2, 4 or one process without any."""
    cut_run(tmp_path / "cut", wrote, monkeypatch)
    parts = list((checkpoints.find(tmp_path / "cut").folder).glob("weights*.safetensors"))
    assert len(parts) == wrote
    for reads in (None, 1, 2, 4):
        folder = tmp_path / f"by-{reads}"
        shutil.copytree(tmp_path / "cut", folder)
        main.run(resume=folder, quiet=True, nproc=reads)
        gap = apart(whole, folder)
        print(f"written by {wrote}, read by {reads}: {gap:.2g}")
        assert gap <= BOUND and said(whole) == said(folder)
        if wrote == 1 and reads in (None, 1):
            same_bits(whole, folder)


def test_a_run_of_one_process_goes_on_over_ranks(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_run(tmp_path / "cut", None, monkeypatch)
    main.run(resume=tmp_path / "cut", quiet=True, nproc=2)
    assert apart(whole, tmp_path / "cut") <= BOUND and said(whole) == said(tmp_path / "cut")


# --- killed, stopped --------------------------------------------------------------------------------------------------


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


def signalled(made: list[RankProcesses], after: float, number: int) -> threading.Thread:
    """Sends a signal to the last rank, so many seconds after its process has begun."""

    def send() -> None:
        while not made:
            time.sleep(0.005)
        time.sleep(after)
        pid = made[-1].pids[max(made[-1].pids)]
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def go_on(folder: Path, run: Run, **how: Any) -> None:
    """Go on, or begin where nothing was written yet."""
    if (folder / "run.json").exists():
        main.run(resume=folder, quiet=True, **how)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        main.run(run, out=folder, quiet=True, **how)


def test_a_rank_killed_at_any_instant(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at instants uniform over the life of a rank's process, one after the other in one run that is resumed
    each time: it stops with the first cause, and ends with the bits of one that lost nobody. POSTTRAIN_SWEEP_SEED
    repeats it, POSTTRAIN_SWEEP_KILLS is how many are killed."""
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    begun = time.monotonic()
    main.run(run_of(), out=tmp_path / "timed", quiet=True, nproc=2)
    seconds = time.monotonic() - begun
    drawn = np.random.default_rng(seed).uniform(0.0, seconds, KILLS)
    print(f"POSTTRAIN_SWEEP_SEED={seed}: {len(drawn)} kills within {seconds:.1f} s")
    lost = finished = 0
    for at, instant in enumerate(drawn):
        folder = tmp_path / f"run-{finished}"
        with watched(monkeypatch) as made:
            thread = signalled(made, float(instant), signal.SIGKILL)
            try:
                go_on(folder, run_of(), nproc=2, rank_timeout=30.0)
            except RankLost as error:
                lost += 1
                assert "rank 1 is gone" in str(error) and "SIGKILL" in str(error), error
                assert "--resume" in str(error) or not (folder / "run.json").exists()
            else:
                finished += 1  # the kill came after its end
                same_bits(two, folder)
            thread.join()
            assert all(p.ended(1) for p in made), f"kill {at}: a process is left"
    folder = tmp_path / f"run-{finished}"
    go_on(folder, run_of(), nproc=2)
    same_bits(two, folder)
    print(f"{lost} kills stopped a run with its first cause; {finished + 1} runs came to their end")
    assert lost >= KILLS // 4


def test_a_rank_that_stands_still_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: after the time-out the run says who waited for whom, and leaves no process."""
    with watched(monkeypatch) as made:
        remember = ReinforceDriver.remember

        def stop(self: ReinforceDriver, asked: Any, step: Any) -> Any:
            if asked.index == 2:
                os.kill(made[-1].pids[1], signal.SIGSTOP)
            return remember(self, asked, step)

        monkeypatch.setattr(ReinforceDriver, "remember", stop)
        with pytest.raises(RankLost) as found:
            main.run(run_of(), out=tmp_path / "run", quiet=True, nproc=2, rank_timeout=6.0)
        print(found.value)
        assert "rank 0 waited" in str(found.value) and "rank 1 is a process that is stopped" in str(found.value)
        assert made[-1].ended(1)


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


def test_torchrun_starts_a_lost_run_again(tmp_path: Path) -> None:
    """A rank is killed: torchrun starts all ranks again with the same command, which goes on with the run."""
    main.run("arithmetic", *WORDS[1:], out=tmp_path / "nproc", quiet=True, nproc=2)
    node = torchrun(tmp_path / "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    until = time.monotonic() + 200
    while not list((tmp_path / "run" / "checkpoints").glob("0*-rl-000001")) and time.monotonic() < until:
        time.sleep(0.02)
    children = [int(p) for p in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
    ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in children}
    os.kill(next(pid for pid, about in ranks.items() if b"\0RANK=1\0" in about), signal.SIGKILL)
    told = node.communicate(timeout=240)[0]
    assert node.returncode == 0, told
    same_bits(tmp_path / "nproc", tmp_path / "run")


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
