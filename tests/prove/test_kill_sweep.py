"""Law 7: a run killed at any instant and resumed equals one never killed, bit for bit, in weights, optimizer and
record.

Children are forked from a parent that has imported everything and computed nothing, so that a trial costs about what
the run itself costs. The instants are drawn from a seed that is printed; set POSTTRAIN_SWEEP_SEED to repeat one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posttrain.api import main
from posttrain.core import checkpoint as checkpoints
from posttrain.core.algorithm import patch
from posttrain.core.ladder import GRPO, PPO
from posttrain.core.pieces.baseline import Ema
from posttrain.core.pieces.pull import KL
from posttrain.core.pieces.token import EntropyBonus
from posttrain.core.reader import record_digest
from posttrain.core.run import Run
from posttrain.role import weights
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "20"))
INSIDE = 5


def sweep_run() -> Run:
    """SFT, then RL with a reference that is refreshed, coefficients that adapt, several minibatches and epochs,
    evaluation."""
    steered = patch(
        GRPO, "steered", "-", pull=KL(refresh=2, target=0.001, horizon=64), entropy=EntropyBonus(coef=0.0, target=5.0)
    )
    return replace(
        tiny_run(algorithm=steered, steps=6, prompts=4, minibatches=2, epochs=2, eval_every=2, checkpoint_every=2),
        deterministic=False,
    )


def digest(folder: Path) -> str:
    """Everything law 7 speaks of: the last checkpoint's files, and the record without its clock."""
    last = checkpoints.find(folder)
    h = hashlib.blake2b(record_digest(folder).encode())
    for name in (weights.WEIGHTS, weights.OPTIMIZER):
        path = last.folder / name
        h.update(name.encode() + (path.read_bytes() if path.exists() else b"-"))
    state = {k: v for k, v in last.state.items() if k in ("stage", "version", "accuracy")}
    cut = {k: v for k, v in (last.state["running"] or {}).items() if k not in ("seconds", "roles", "peaks")}
    h.update(repr((sorted(state.items()), sorted(cut.items()))).encode())
    return h.hexdigest()


def child(work: Callable[[], object]) -> int:
    """Fork, do the work in the child, and never return there."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.stdout.flush()
        work()
        code = 0
    except BaseException as error:
        print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def start(folder: Path, run: Run) -> Callable[[], object]:
    return lambda: main.run(run, out=folder, quiet=True)


def resume(folder: Path, run: Run) -> Callable[[], object]:
    """Go on, or begin where the kill came before anything was written."""
    return (lambda: main.run(resume=folder, quiet=True)) if (folder / "run.json").exists() else start(folder, run)


def finish(folder: Path, run: Run) -> str:
    _, status = os.waitpid(child(resume(folder, run)), 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"resuming {folder} failed"
    return digest(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """Digest and duration of the run never killed."""
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    begun = time.monotonic()
    _, status = os.waitpid(child(start(folder, sweep_run())), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return digest(folder), time.monotonic() - begun


def test_twice_the_same(whole: tuple[str, float], tmp_path: Path) -> None:
    """The comparison means something: two runs never killed agree, and a run of another seed does not."""
    assert finish(tmp_path / "again", sweep_run()) == whole[0]
    assert finish(tmp_path / "other", replace(sweep_run(), seed=1)) != whole[0]


def test_killed_at_any_instant(whole: tuple[str, float], tmp_path: Path) -> None:
    """SIGKILL at instants uniform over the wall time of the run."""
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    instants = np.random.default_rng(seed).uniform(0.0, whole[1], KILLS)
    print(
        f"\nPOSTTRAIN_SWEEP_SEED={seed}; kills at (s): {', '.join(f'{t:.2f}' for t in sorted(instants))} of"
        f" {whole[1]:.2f}"
    )
    for i, instant in enumerate(instants):
        folder = tmp_path / f"run{i}"
        pid = child(start(folder, sweep_run()))
        time.sleep(float(instant))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert finish(folder, sweep_run()) == whole[0], f"killed after {instant:.3f} s, resumed, and differs"


@pytest.mark.parametrize("call", range(1, INSIDE + 1))
def test_killed_inside_a_checkpoint_write(whole: tuple[str, float], tmp_path: Path, call: int) -> None:
    """SIGKILL in the middle of the n-th checkpoint: after its weights, before its optimizer state is whole."""
    folder = tmp_path / "run"

    def work() -> None:
        calls = 0
        original = weights.save_file

        def dies(tensors: object, path: Path) -> None:
            nonlocal calls
            if path.name == weights.OPTIMIZER:
                calls += 1
                if calls == call:
                    path.write_bytes(b"half a file")
                    os.kill(os.getpid(), signal.SIGKILL)
            original(tensors, path)  # type: ignore[arg-type]

        weights.save_file = dies  # type: ignore[assignment]
        start(folder, sweep_run())()

    _, status = os.waitpid(child(work), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the kill inside the checkpoint never came"
    assert finish(folder, sweep_run()) == whole[0]


def test_killed_twice(whole: tuple[str, float], tmp_path: Path) -> None:
    """A resumed run that is killed again."""
    folder = tmp_path / "run"
    for share in (0.45, 0.3):
        pid = child(resume(folder, sweep_run()))
        time.sleep(share * whole[1])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert finish(folder, sweep_run()) == whole[0]


def test_state_that_only_some_algorithms_have(tmp_path: Path) -> None:
    """A moving baseline and a value head survive the kill too."""
    for algorithm in (replace(GRPO, baseline=Ema(), scale="one", pull=None, name="ema"), PPO):
        run = tiny_run(algorithm=algorithm, steps=4, checkpoint_every=1)
        reference = tmp_path / f"{algorithm.name}-whole"
        expected = finish(reference, run)
        folder = tmp_path / algorithm.name

        def work(run: Run = run, folder: Path = folder) -> None:
            original, calls = weights.save_file, 0

            def dies(tensors: object, path: Path) -> None:
                nonlocal calls
                calls += path.name == weights.OPTIMIZER
                if calls == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(tensors, path)  # type: ignore[arg-type]

            weights.save_file = dies  # type: ignore[assignment]
            start(folder, run)()

        _, status = os.waitpid(child(work), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert finish(folder, run) == expected
