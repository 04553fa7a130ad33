"""Runs whose teacher is shown more than the policy: real parts, and the faults that their checks find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import posttrain
from posttrain.core import reader
from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.ladder import OPD, SDFT, SDPO
from posttrain.core.pieces.hint import Hint
from posttrain.core.run import Optimizer, Run, Supervised
from posttrain.faults import FAULTS
from posttrain.recipe.recipes import recipe
from tests.tiny import tiny_run

HINTED = [n for n, f in FAULTS.items() if f.twin.__module__ == "posttrain.faults.hints"]


def run(algorithm: Algorithm, **rl: object) -> Run:
    """Sums of two small numbers, taught well enough that some answers are right."""
    made = tiny_run(algorithm=algorithm, siblings=6, prompts=6, steps=3, checkpoint_every=0, **rl)
    sft, stage = made.stages
    assert isinstance(sft, Supervised)
    taught = replace(sft, steps=60, batch=32, optimizer=Optimizer(lr=5e-3, warmup=2), checkpoint_every=0)
    return replace(made, stages=(taught, stage))


@pytest.mark.parametrize(
    "algorithm",
    [SDPO, SDFT, patch(OPD, "opsd", "-", hint=Hint(of="answer")), patch(SDFT, "live", "-", hint=Hint(of="answer"))],
    ids=lambda a: a.name,
)
def test_runs_learn_from_a_teacher_with_a_hint(algorithm: Algorithm, tmp_path: Path) -> None:
    """Nothing trips; an answer without a hint is recorded with its reason, and is in no batch."""
    assert algorithm.hint is not None
    folder = posttrain.run(run(algorithm), out=tmp_path / "run", quiet=True).folder
    steps = [s for s in reader.steps(folder) if s.stage == "rl"]
    assert len(steps) == 3
    shares = [s.gauges["teacher/hinted"].mean for s in steps]
    rows = [r for s in steps for r in reader.episodes(folder, "rl", s.index)]
    dropped = [r for r in rows if r.dropped]
    assert sum(s.gauges["teacher/hinted"].sum for s in steps) == len(rows) - len(dropped)
    if algorithm.hint.of == "answer":
        assert shares == [1, 1, 1] and not dropped
    else:
        assert 0 < sum(shares) < 3 and {r.dropped for r in dropped} == {"no other answer of its group is right"}
    assert all(s.gauges["canary/teacher_gap"].mean < 1e-3 for s in steps)


@pytest.mark.parametrize("name", HINTED)
def test_the_checks_find_what_goes_wrong_with_hints(name: str, tmp_path: Path) -> None:
    a = SDPO if FAULTS[name].shows == ("algorithm=sdpo",) else replace(SDFT, hint=Hint(of="answer"))
    with pytest.raises(PosttrainError):
        posttrain.run(run(a), f"fault={name}", out=tmp_path / "run", quiet=True, allow_fault=True)


def test_an_environment_without_hints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes no hints"):
        posttrain.run(recipe("calculator"), "algorithm=sdpo", out=tmp_path / "run", quiet=True)
