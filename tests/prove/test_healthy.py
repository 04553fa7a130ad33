"""No check stops a run that nothing is wrong with: runs drawn at random, by a seed that is printed, so that a failure
repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.trust import command_matrix, healthy_kinds, healthy_preferences
from benchmarks.trust.healthy import draw, line
from benchmarks.trust.healthy_learner import draws_learner

pytestmark = pytest.mark.prove

SEED = int(os.environ.get("POSTTRAIN_SEED", "0"))
COUNT = int(os.environ.get("POSTTRAIN_HEALTHY", "40"))


def test_a_run_is_a_function_of_its_seed_and_number() -> None:
    assert draw(SEED, 3) == draw(SEED, 3) != draw(SEED, 4)
    assert len({draw(SEED, i).words for i in range(200)}) == 200
    learners = [i for i in range(200) if draws_learner(SEED, i)]
    assert 25 < len(learners) < 95, "most runs draw nothing of the learner"
    assert all(draw(SEED, i).words != draw(SEED, i, attempt=1).words for i in learners[:5])
    assert len({healthy_preferences.draw(SEED, i).words for i in range(200)}) == 200
    kinds = [healthy_kinds.kind_of(SEED, i) for i in range(200)]
    assert {*kinds} == healthy_kinds.KINDS.keys()
    assert healthy_kinds.draw(SEED, 3) == healthy_kinds.draw(SEED, 3) != healthy_kinds.draw(SEED, 3, attempt=1)


def test_no_healthy_run_is_stopped() -> None:
    """Of any kind. One process after another in this test's own; the workers of the test run are enough."""
    print(f"seed {SEED}, {COUNT} runs: python -m benchmarks.trust.healthy_kinds --seed {SEED} --only N plays one again")
    rows = healthy_kinds.many(SEED, range(COUNT), jobs=int(os.environ.get("POSTTRAIN_HEALTHY_JOBS", "2")))
    told = [f"[{kind}] {line(o, o.index, COUNT)}" for kind, o in rows if o.refused or (o.stopped and o.healthy)]
    assert not told, "what is drawn is a configuration that starts, and nothing stops it"
    assert len(rows) == COUNT and all(o.steps > 0 for _, o in rows if not o.stopped)


def test_every_command_answers_over_runs_of_kinds_that_are_drawn(tmp_path: Path) -> None:
    """Right, or refused with the sentence that is expected. All kinds: python -m benchmarks.trust.command_matrix."""
    kinds = command_matrix.drawn(SEED, int(os.environ.get("POSTTRAIN_KINDS", "3")))
    print(f"seed {SEED}: python -m benchmarks.trust.command_matrix --dry --kinds {','.join(kinds)} plays these again")
    cells = [*command_matrix.many(kinds, [*command_matrix.COMMANDS], 2, tmp_path)]
    assert not [c for c in cells if c.state == "wrong"]
    assert {c.kind for c in cells} == {*kinds} and len(cells) == len(kinds) * (1 + len(command_matrix.COMMANDS))
