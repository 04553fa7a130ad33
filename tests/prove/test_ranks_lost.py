"""Ranks that are lost in the middle of a whole run: killed at random instants, stopped, started again by torchrun.

The instants are drawn from a seed that is printed: POSTTRAIN_SWEEP_SEED repeats it, POSTTRAIN_SWEEP_KILLS is how many
are killed: half of them the last rank, and half the process of the run itself, which is rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.api import main
from posttrain.config.model_settings import Lora
from posttrain.config.run import Run
from posttrain.engine.parallel.ranks.rank_orders import RankLost
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from tests.killing import gone
from tests.over_ranks import WORDS, begun_by, drawn, go_on, launched, run_of, same_bits, signalled, torchrun, watched

pytestmark = pytest.mark.prove

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "20"))
RUNS: dict[str, Run] = {"all weights": run_of(), "an adapter": run_of({"lora": Lora(rank=2)})}
ITSELF = {"the run itself, all weights": 0, "the run itself, an adapter": 2}
"""Numbers of an adapter's rank; 0: none."""
HERE = drawn([*RUNS, *ITSELF, "stands still", "torchrun", "the agent of torchrun"], 1)
"""What is lost here, and when."""
COUNT = -(-KILLS // (len(RUNS) + len(ITSELF)))
GONE_SECONDS = 10.0
"""Within which the other ranks are gone after the process that started them."""


@pytest.mark.parametrize("kind", [name for name in RUNS if name in HERE])
def test_a_rank_killed_at_any_instant(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at instants uniform over the life of a rank's process, one after the other in one run that is resumed
    each time: it stops with the first cause, and ends with the bits of one that lost nobody."""
    run, count = RUNS[kind], COUNT
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    begun = time.monotonic()
    main.run(run, out=tmp_path / "whole", quiet=True, nproc=2)
    seconds = time.monotonic() - begun
    drawn = np.random.default_rng(seed).uniform(0.0, seconds, count)
    print(f"{kind}, POSTTRAIN_SWEEP_SEED={seed}: {count} kills within {seconds:.1f} s")
    lost = finished = 0
    for at, instant in enumerate(drawn):
        folder, over = tmp_path / f"run-{finished}", threading.Event()
        with watched(monkeypatch) as made:
            thread = signalled(made, float(instant), signal.SIGKILL, over)
            try:
                go_on(folder, run, nproc=2, rank_timeout=60.0)
            except RankLost as error:
                lost += 1
                assert "rank 1 is gone" in str(error) and "SIGKILL" in str(error), error
                assert "--resume" in str(error) or "Nothing was begun" in str(error), error
            else:
                finished += 1  # it came to its end before the kill
                same_bits(tmp_path / "whole", folder)
            over.set()
            thread.join()
            assert all(p.ended(1) for p in made), f"kill {at}: a process is left"
    folder = tmp_path / f"run-{finished}"
    go_on(folder, run, nproc=2)
    same_bits(tmp_path / "whole", folder)
    print(f"{lost} kills stopped a run with its first cause; {finished + 1} runs came to their end")
    assert lost >= count // 4


@pytest.mark.parametrize("kind", [name for name in ITSELF if name in HERE])
def test_the_run_itself_killed_at_any_instant(kind: str, tmp_path: Path) -> None:
    """SIGKILL of rank 0, which started the other: that one is gone within seconds, and the run that goes on ends with
    the bits of one that was never killed."""
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    log, begun = tmp_path / "log", time.monotonic()
    assert launched(tmp_path / "whole", ITSELF[kind], log).wait(300) == 0, log.read_text()
    seconds = time.monotonic() - begun
    print(f"{kind}, POSTTRAIN_SWEEP_SEED={seed}: {COUNT} kills within {seconds:.1f} s")
    lost = finished = left = 0
    slowest = 0.0
    for instant in np.random.default_rng(seed).uniform(0.0, seconds, COUNT):
        folder = tmp_path / f"run-{finished}"
        process = launched(folder, ITSELF[kind], log)
        try:
            assert process.wait(float(instant)) == 0, log.read_text()
            finished += 1  # it came to its end before the kill
            same_bits(tmp_path / "whole", folder)
        except subprocess.TimeoutExpired:
            lost, left = lost + 1, left + bool(begun_by(process.pid))
            process.kill()
            process.wait()
            killed = time.monotonic()
            while others := begun_by(process.pid):
                assert time.monotonic() - killed < GONE_SECONDS, f"processes {others} outlive the run that began them"
                time.sleep(0.02)
            slowest = max(slowest, time.monotonic() - killed)
    folder = tmp_path / f"run-{finished}"
    assert launched(folder, ITSELF[kind], log).wait(300) == 0, log.read_text()
    same_bits(tmp_path / "whole", folder)
    print(
        f"{lost} kills stopped a run, {left} with another rank alive, gone after at most {slowest:.2f} s;"
        f" {finished + 1} runs came to their end"
    )
    assert lost >= COUNT // 4


@pytest.mark.skipif("stands still" not in HERE, reason="not drawn")
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


@pytest.mark.skipif("torchrun" not in HERE, reason="not drawn")
def test_torchrun_starts_a_lost_run_again(tmp_path: Path) -> None:
    """A rank is killed: torchrun starts all ranks again with the same command, which goes on with the run."""
    main.run("arithmetic", *WORDS[1:], out=tmp_path / "nproc", quiet=True, nproc=2)
    node = torchrun(tmp_path / "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    await_reinforcement(tmp_path / "run")
    ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in children(node.pid)}
    os.kill(next(pid for pid, about in ranks.items() if b"\0RANK=1\0" in about), signal.SIGKILL)
    told = node.communicate(timeout=240)[0]
    assert node.returncode == 0, told
    same_bits(tmp_path / "nproc", tmp_path / "run")


@pytest.mark.skipif("the agent of torchrun" not in HERE, reason="not drawn")
def test_ranks_end_when_the_agent_of_torchrun_is_killed(tmp_path: Path) -> None:
    """Nobody is left who would end them. Each says why it ends, and the run goes on from its last checkpoint."""
    node = torchrun(tmp_path / "run", "--standalone", "--nproc-per-node", "2")
    await_reinforcement(tmp_path / "run")
    ranks = children(node.pid)
    assert len(ranks) == 2
    node.kill()
    try:
        assert gone(ranks, GONE_SECONDS), "a rank outlives the process that started it"
        told = node.communicate(timeout=60)[0]
        assert f"(it was process {node.pid}) is gone, so this one ends" in told, told
    finally:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    main.run("arithmetic", *WORDS[1:], out=tmp_path / "nproc", quiet=True, nproc=2)
    main.run(resume=tmp_path / "run", quiet=True, nproc=2)
    same_bits(tmp_path / "nproc", tmp_path / "run")


def await_reinforcement(folder: Path) -> None:
    """Until the first step of reinforcement is in a checkpoint."""
    until = time.monotonic() + 200
    while not list((folder / "checkpoints").glob("0*-rl-000001")) and time.monotonic() < until:
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes that the main thread of this one has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
