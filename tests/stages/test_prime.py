"""PRIME end to end: a model that learns outcomes beside the policy, on real parts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import posttrain
from posttrain.config.run import Run
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.baseline import Others
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.policy_rows import PRIME
from posttrain.record import run_reader
from posttrain.system.errors import DataError
from tests.tiny import tiny_run

PLAIN = patch(PRIME, "prime_without_process", "-", baseline=Others())
SILENT = patch(PRIME, "prime_beta_0", "-", baseline=ImplicitOthers(beta=0.0))
LOUD = patch(PRIME, "prime_beta_1", "-", baseline=ImplicitOthers(beta=1.0))


def prime_run(algorithm: Any = LOUD, **rl: Any) -> Run:
    """Sums of one digit after a little imitation, so that some answers are right."""
    base = tiny_run(algorithm=algorithm, **{"prompts": 6, "steps": 3, "refill": 2} | rl)
    stages = (replace(base.stages[0], steps=40), *base.stages[1:])
    return replace(base, stages=stages, deterministic=True, keep_checkpoints=20)


def weights(folder: Path, name: str = "weights.safetensors") -> dict[str, np.ndarray]:
    last = sorted((folder / "checkpoints").glob("*-rl-*"))[-1]
    return dict(load_file(last / name))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prime") / "run"
    posttrain.run(prime_run(), out=folder, quiet=True)
    return folder


@pytest.mark.prove
def test_without_beta_a_run_is_the_one_without_the_model(loud: Path, tmp_path: Path) -> None:
    """beta = 0 trains the same weights as leave-one-out of the outcome, bit for bit; another beta does not."""
    for name, a in (("silent", SILENT), ("plain", PLAIN)):
        posttrain.run(prime_run(a), out=tmp_path / name, quiet=True)
    assert same(weights(tmp_path / "silent"), weights(tmp_path / "plain"))
    assert not same(weights(loud), weights(tmp_path / "plain"))


@pytest.mark.prove
def test_the_model_learns_and_the_first_step_does_not_know_it(loud: Path) -> None:
    steps = [s for s in run_reader.steps(loud) if s.stage == "rl"]
    losses = [s.gauges["implicit/loss"].mean for s in steps]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6), "phi is the reference before the first step"
    assert all(s.gauges["implicit/answers"].sum == 24 for s in steps if s.gauges["rollout/groups"].sum == 6)
    first, later = (list(run_reader.episodes(loud, "rl", i)) for i in (1, 3))
    constant = [len(set(np.concatenate(e.advantage).tolist())) == 1 for e in first if e.advantage is not None]
    assert all(constant), "before it has learned, all tokens of an answer have the outcome's credit"
    told = [np.concatenate(e.advantage) for e in later if e.advantage is not None]
    assert any(len(set(x.tolist())) > 1 for x in told)
    held = load_file(sorted((loud / "checkpoints").glob("*-rl-*"))[-1] / "implicit" / "weights.safetensors")
    assert any(not np.array_equal(held[n], x) for n, x in weights(loud).items())


@pytest.mark.prove
def test_killed_and_resumed_is_never_killed(loud: Path, tmp_path: Path) -> None:
    """The model and its optimizer come back from a checkpoint inside the stage."""
    copy = tmp_path / "copy"
    shutil.copytree(loud, copy)
    second = next(p for p in sorted((copy / "checkpoints").iterdir()) if p.name.endswith("-rl-000002"))
    posttrain.run(resume=second, quiet=True)
    assert same(weights(copy), weights(loud))
    assert same(weights(copy, "implicit/weights.safetensors"), weights(loud, "implicit/weights.safetensors"))
    assert same(weights(copy, "implicit/optimizer.safetensors"), weights(loud, "implicit/optimizer.safetensors"))


@pytest.mark.prove
def test_a_run_is_made_longer(loud: Path, tmp_path: Path) -> None:
    """The model goes on from the last checkpoint of the run."""
    copy = tmp_path / "copy"
    shutil.copytree(loud, copy)
    posttrain.run("rl.steps=4", resume=copy, quiet=True)
    losses = [s.gauges["implicit/loss"].mean for s in run_reader.steps(copy) if s.stage == "rl"]
    assert len(losses) == 4 and losses[3] != pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.prove
@pytest.mark.parametrize("words", [("model.lora.rank=2",), ("model.dtype=bfloat16",)], ids=" ".join)
def test_other_learners(words: tuple[str, ...], tmp_path: Path) -> None:
    """With an adapter phi has an adapter of its own; in another dtype the checks allow its rounding."""
    run = prime_run(patch(LOUD, "unfiltered", "-", filter=None), steps=2)
    posttrain.run(run, *words, "deterministic=false", out=tmp_path / "run", quiet=True)
    losses = [s.gauges["implicit/loss"].mean for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[1] != losses[0]


@pytest.mark.prove
def test_outcomes_that_are_no_chance_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text("def twice(task, text):\n    return 2.0\n", encoding="utf-8")
    run = prime_run(patch(LOUD, "unfiltered", "-", filter=None))
    with pytest.raises(DataError, match=r"outcomes lie in 0\.\.1"):
        posttrain.run(run, f"env.rewards={path}:twice", "env.measured=true", out=tmp_path / "run", quiet=True)
