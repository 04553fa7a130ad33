"""Ranks that are lost in the middle of a whole run: killed at random instants, stopped, started again by torchrun.

The instants are drawn from a seed that is printed: POSTTRAIN_SWEEP_SEED repeats it, POSTTRAIN_SWEEP_KILLS is how many
are killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.api import main
from posttrain.controller.stages.reinforce import ReinforceDriver
from posttrain.core.adapter import Lora
from posttrain.core.run import Run
from posttrain.engine.rank_orders import RankLost
from tests.over_ranks import WORDS, drawn, go_on, run_of, same_bits, signalled, torchrun, watched

pytestmark = pytest.mark.prove

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "20"))
HERE = drawn(["all weights", "an adapter", "stands still", "torchrun"], 1)
"""What is lost here, and when."""
RUNS: dict[str, Run] = {"all weights": run_of(), "an adapter": run_of({"lora": Lora(rank=2)})}


@pytest.mark.parametrize("kind", [name for name in RUNS if name in HERE])
def test_a_rank_killed_at_any_instant(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at instants uniform over the life of a rank's process, one after the other in one run that is resumed
    each time: it stops with the first cause, and ends with the bits of one that lost nobody."""
    run, count = RUNS[kind], -(-KILLS // len(RUNS))
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
    until = time.monotonic() + 200
    while not list((tmp_path / "run" / "checkpoints").glob("0*-rl-000001")) and time.monotonic() < until:
        time.sleep(0.02)
    children = [int(p) for p in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
    ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in children}
    os.kill(next(pid for pid, about in ranks.items() if b"\0RANK=1\0" in about), signal.SIGKILL)
    told = node.communicate(timeout=240)[0]
    assert node.returncode == 0, told
    same_bits(tmp_path / "nproc", tmp_path / "run")
