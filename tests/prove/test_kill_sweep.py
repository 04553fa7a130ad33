"""Law 7: a run killed at any instant and resumed equals one never killed, bit for bit, in weights, optimizer and
record.

Where samples may be older than the learner (staleness 1 and 4) work is in flight whenever the kill comes. There the law
holds for `deterministic` runs; a free-running one promises counts: nothing lost, nothing doubled, none too old.

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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from posttrain.api import main
from posttrain.config.run import Run
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.baseline import Ema
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.policy_rows import DAPO, GRPO, PPO
from posttrain.record import checkpoint as checkpoints
from posttrain.record.run_reader import record_digest
from posttrain.role.weights import saved_weights
from tests.late import late_run, nothing_lost_or_doubled, rl_steps
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove

KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "20"))
INSIDE = (2, 5)
"""Which checkpoints are cut: one of the imitation, one of the reinforcement."""


def sweep_run(staleness: int = 0) -> Run:
    """SFT, then RL with a reference that is refreshed, coefficients that adapt, several minibatches and epochs,
    evaluation. With staleness a tool works for a time that no seed decides, and groups are refused by a filter."""
    if staleness:
        filtered = patch(DAPO, "filtered", "-", shape=())
        return late_run(staleness, algorithm=filtered, minibatches=2, epochs=2, eval_every=2)
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
    for name in (saved_weights.WEIGHTS, saved_weights.OPTIMIZER):
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


@dataclass(frozen=True)
class Whole:
    """A run never killed."""

    staleness: int
    run: Run
    digest: str
    seconds: float


@pytest.fixture(scope="module", params=[0, 1, 4], ids="staleness{}".format)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run never killed, by staleness."""
    run, folder = sweep_run(request.param), tmp_path_factory.mktemp("sweep") / "whole"
    begun = time.monotonic()
    _, status = os.waitpid(child(start(folder, run)), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return Whole(request.param, run, digest(folder), time.monotonic() - begun)


def instants(seconds: float, count: int) -> list[float]:
    """Uniform over the wall time of a run, from a seed that is printed."""
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    drawn = sorted(float(t) for t in np.random.default_rng(seed).uniform(0.0, seconds, count))
    print(f"\nPOSTTRAIN_SWEEP_SEED={seed}; kills at (s): {', '.join(f'{t:.2f}' for t in drawn)} of {seconds:.2f}")
    return drawn


def kill_after(seconds: float, work: Callable[[], object]) -> None:
    """Begin the work in a child and kill it."""
    pid = child(work)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_twice_the_same(whole: Whole, tmp_path: Path) -> None:
    """The comparison means something: two runs never killed agree, and a run of another seed does not."""
    assert finish(tmp_path / "again", whole.run) == whole.digest
    assert finish(tmp_path / "other", replace(whole.run, seed=1)) != whole.digest


def test_killed_at_any_instant(whole: Whole, tmp_path: Path) -> None:
    """SIGKILL at instants uniform over the wall time of the run."""
    count = max(1, KILLS // 10) if whole.staleness else KILLS
    for i, instant in enumerate(instants(whole.seconds, count)):
        kill_after(instant, start(tmp_path / f"run{i}", whole.run))
        again = finish(tmp_path / f"run{i}", whole.run)
        assert again == whole.digest, f"killed after {instant:.3f} s, resumed, and differs"


@pytest.mark.parametrize("staleness", [4])
def test_a_free_run_killed_at_any_instant_loses_and_doubles_nothing(staleness: int, tmp_path: Path) -> None:
    run = late_run(staleness, deterministic=False, steps=8)
    begun = time.monotonic()
    finish(tmp_path / "whole", run)
    for i, instant in enumerate(instants(time.monotonic() - begun, max(1, KILLS // 10))):
        kill_after(instant, start(tmp_path / f"run{i}", run))
        finish(tmp_path / f"run{i}", run)
        nothing_lost_or_doubled(tmp_path / f"run{i}", run)
        behind = [s.gauges["rollout/most_behind"].sum for s in rl_steps(tmp_path / f"run{i}")]
        assert max(behind) <= staleness, f"killed after {instant:.3f} s, and a token is older than promised"


@pytest.mark.parametrize("call", INSIDE)
def test_killed_inside_a_checkpoint_write(whole: Whole, tmp_path: Path, call: int) -> None:
    """SIGKILL in the middle of the n-th checkpoint: after its weights, before its optimizer state is whole."""
    folder = tmp_path / "run"

    def work() -> None:
        calls = 0
        original = saved_weights.save_file

        def dies(tensors: object, path: Path) -> None:
            nonlocal calls
            if path.name == saved_weights.OPTIMIZER:
                calls += 1
                if calls == call:
                    path.write_bytes(b"half a file")
                    os.kill(os.getpid(), signal.SIGKILL)
            original(tensors, path)  # type: ignore[arg-type]

        saved_weights.save_file = dies  # type: ignore[assignment]
        start(folder, whole.run)()

    _, status = os.waitpid(child(work), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the kill inside the checkpoint never came"
    assert finish(folder, whole.run) == whole.digest


def test_killed_twice(whole: Whole, tmp_path: Path) -> None:
    """A resumed run that is killed again."""
    folder = tmp_path / "run"
    for share in (0.45, 0.3):
        kill_after(share * whole.seconds, resume(folder, whole.run))
    assert finish(folder, whole.run) == whole.digest


def test_state_that_only_some_algorithms_have(tmp_path: Path) -> None:
    """A moving baseline and a value head survive the kill too."""
    for algorithm in (replace(GRPO, baseline=Ema(), scale="one", pull=None, name="ema"), PPO):
        run = tiny_run(algorithm=algorithm, steps=4, checkpoint_every=1)
        reference = tmp_path / f"{algorithm.name}-whole"
        expected = finish(reference, run)
        folder = tmp_path / algorithm.name

        def work(run: Run = run, folder: Path = folder) -> None:
            original, calls = saved_weights.save_file, 0

            def dies(tensors: object, path: Path) -> None:
                nonlocal calls
                calls += path.name == saved_weights.OPTIMIZER
                if calls == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(tensors, path)  # type: ignore[arg-type]

            saved_weights.save_file = dies  # type: ignore[assignment]
            start(folder, run)()

        _, status = os.waitpid(child(work), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert finish(folder, run) == expected
