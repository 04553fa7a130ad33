"""Runs whose teacher is shown more than the policy: real parts, and the faults that their checks find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import posttrain
from posttrain.config.run import Optimizer, Run, Supervised
from posttrain.core.batch import Packed
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.hint import Hint
from posttrain.ladder.policy_rows import OPD, SDFT, SDPO
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.role.learning.demonstrations import demonstration
from posttrain.role.weights.saved_weights import restore, snapshot
from posttrain.stages.reinforce.teacher_average import AveragePolicy
from posttrain.system.errors import ConfigError, PosttrainError
from tests.mutants import FAULTS
from tests.prove.test_kill_sweep import digest
from tests.tiny import tiny_parts, tiny_run

LONG = pytest.mark.prove
HINTED = [n for n, f in FAULTS.items() if f.twin.__module__ == "tests.mutants.judging.hint_faults"]


def run(algorithm: Algorithm, **rl: object) -> Run:
    """Sums of two small numbers, taught well enough that some answers are right."""
    made = tiny_run(**{"algorithm": algorithm, "prompts": 6, "checkpoint_every": 0, **rl})
    sft, stage = made.stages
    assert isinstance(sft, Supervised)
    taught = replace(sft, steps=24, batch=32, optimizer=Optimizer(lr=5e-3, warmup=2), checkpoint_every=0)
    env = replace(made.env, args={"max_terms": 3, "max_operand": 9}, heldout=20)
    return replace(made, env=env, stages=(taught, stage))


LIVE = patch(SDPO, "sdpo_now", "2601.20802", hint=Hint())
"""The teacher has the weights of now."""


@pytest.mark.prove
@pytest.mark.parametrize(
    "algorithm",
    [
        SDPO,
        *(
            pytest.param(a, marks=LONG)
            for a in (
                LIVE,
                SDFT,
                patch(OPD, "opsd", "-", hint=Hint(of="answer")),
                patch(SDFT, "live", "-", hint=Hint(of="answer")),
            )
        ),
    ],
    ids=lambda a: a.name,
)
def test_runs_learn_from_a_teacher_with_a_hint(algorithm: Algorithm, tmp_path: Path) -> None:
    """Nothing trips; an answer without a hint is recorded with its reason, and is in no batch."""
    assert algorithm.hint is not None
    optimizer = Optimizer(lr=1e-3, ema=0.95 if algorithm.hint.weights == "average" else None)
    folder = posttrain.run(run(algorithm, optimizer=optimizer), out=tmp_path / "run", quiet=True).folder
    steps = [s for s in run_reader.steps(folder) if s.stage == "rl"]
    assert len(steps) == 3
    shares = [s.gauges["teacher/hinted"].mean for s in steps]
    rows = [r for s in steps for r in run_reader.episodes(folder, "rl", s.index)]
    dropped = [r for r in rows if r.dropped]
    assert sum(s.gauges["teacher/hinted"].sum for s in steps) == len(rows) - len(dropped)
    if algorithm.hint.of == "answer":
        assert shares == [1, 1, 1] and not dropped
    else:
        assert 0 < sum(shares) < 3 and {r.dropped for r in dropped} == {"no other answer of its group is right"}
    assert all(s.gauges["canary/teacher_gap"].mean < 1e-3 for s in steps)


@LONG
@pytest.mark.parametrize("name", HINTED)
def test_the_checks_find_what_goes_wrong_with_hints(name: str, tmp_path: Path) -> None:
    a = LIVE if "algorithm=sdpo" in FAULTS[name].shows else replace(SDFT, hint=Hint(of="answer"))
    with pytest.raises(PosttrainError):
        posttrain.run(run(a), f"fault={name}", out=tmp_path / "run", quiet=True, allow_fault=True)


@LONG
@pytest.mark.parametrize(("algorithm", "staleness"), [(SDPO, 0), (LIVE, 1)], ids=["average", "asked_ahead"])
def test_a_resumed_run_is_the_same(algorithm: Algorithm, staleness: int, tmp_path: Path) -> None:
    """The average comes back with the optimizer, and groups that were asked ahead with what their answers said."""
    optimizer = Optimizer(lr=1e-3, ema=None if staleness else 0.95)
    made = run(algorithm, optimizer=optimizer, staleness=staleness, checkpoint_every=1)
    made = replace(made, deterministic=True, keep_checkpoints=9)
    folder = posttrain.run(made, out=tmp_path / "run", quiet=True).folder
    whole = digest(folder)
    posttrain.run(resume=next((folder / "checkpoints").glob("*-rl-000002")), quiet=True)
    assert digest(folder) == whole


def test_an_average_scores_as_its_weights_do_and_moves_none(tmp_path: Path) -> None:
    """After two steps the teacher's weights are .95 (.95 w0 + .05 w1) + .05 w2, and scoring leaves w2 bit for bit."""
    parts = tiny_parts(tmp_path / "run")
    learner, optimizer = parts.learner, parts.optimize(Optimizer(lr=1e-2, warmup=0, ema=0.95))
    segment = demonstration(parts.renderer, parts.environment.train.task(0), "<1+2>", "3", 64)
    packed = Packed.of([segment])
    seen = [snapshot(learner)]
    for _ in range(2):
        (-learner.forward(packed).logp.sum()).backward()
        optimizer.gather()
        optimizer.step()
        seen.append(snapshot(learner))
    found = AveragePolicy(learner, optimizer).score(packed)
    assert all(torch.equal(seen[-1][n], p) for n, p in learner.parameters().items())
    w0, w1, w2 = seen
    restore(learner, {n: 0.95 * (0.95 * w0[n] + 0.05 * w1[n]) + 0.05 * w2[n] for n in w0})
    assert found == pytest.approx(learner.score(packed), abs=1e-5)
    restore(learner, w2)
    assert float(np.abs(found - learner.score(packed)).max()) > 1e-3
    parts.book.close()


def test_an_environment_without_hints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes no hints"):
        posttrain.run(recipe("calculator"), "algorithm=sdft", out=tmp_path / "run", quiet=True)
