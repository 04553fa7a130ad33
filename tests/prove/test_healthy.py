"""No check stops a run that nothing is wrong with: runs drawn at random, by a seed that is printed, so that a failure
repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import command_matrix, healthy_preferences
from benchmarks.healthy import draw, line, many
from benchmarks.healthy_learner import draws_learner

pytestmark = pytest.mark.prove

SEED = int(os.environ.get("POSTTRAIN_SEED", "0"))
COUNT = int(os.environ.get("POSTTRAIN_HEALTHY", "40"))


def test_a_run_is_a_function_of_its_seed_and_number() -> None:
    assert draw(SEED, 3) == draw(SEED, 3) != draw(SEED, 4)
    assert len({draw(SEED, i).words for i in range(200)}) == 200
    learners = [i for i in range(200) if draws_learner(SEED, i)]
    assert 25 < len(learners) < 95, "most runs draw nothing of the learner"
    assert all(draw(SEED, i).words != draw(SEED, i, attempt=1).words for i in learners[:5])


def test_no_healthy_run_is_stopped() -> None:
    """One process after another in this test's own; the workers of the test run are enough."""
    print(f"seed {SEED}, {COUNT} runs: python -m benchmarks.healthy --seed {SEED} --only N plays one again")
    outcomes = many(SEED, range(COUNT), jobs=int(os.environ.get("POSTTRAIN_HEALTHY_JOBS", "2")))
    assert not [line(o, o.index, COUNT) for o in outcomes if o.stopped and o.healthy]
    assert not [line(o, o.index, COUNT) for o in outcomes if o.refused], "what is drawn is a configuration that starts"
    assert len(outcomes) == COUNT and sum(o.steps for o in outcomes) >= 9 * sum(not o.stopped for o in outcomes)


def test_no_healthy_run_that_asks_ahead_is_stopped() -> None:
    """A third as many, each with `staleness`, some of them resumed."""
    count = -(-COUNT // 3)
    print(f"seed {SEED}, {count} runs: python -m benchmarks.healthy --ahead --seed {SEED} --only N plays one again")
    outcomes = many(SEED, range(count), jobs=int(os.environ.get("POSTTRAIN_HEALTHY_JOBS", "2")), ahead=True)
    assert not [line(o, o.index, count) for o in outcomes if o.refused or (o.stopped and o.healthy)]
    assert len(outcomes) == count and sum(o.steps for o in outcomes) >= 9 * sum(not o.stopped for o in outcomes)


def test_no_healthy_run_that_learns_from_judgements_is_stopped() -> None:
    """A third as many."""
    count = -(-COUNT // 3)
    print(f"seed {SEED}, {count} runs: python -m benchmarks.healthy_preferences --seed {SEED} --only N plays one again")
    assert len({healthy_preferences.draw(SEED, i).words for i in range(200)}) == 200
    outcomes = healthy_preferences.many(SEED, range(count), jobs=int(os.environ.get("POSTTRAIN_HEALTHY_JOBS", "2")))
    assert not [line(o, o.index, count) for o in outcomes if o.refused or (o.stopped and o.healthy)]
    assert len(outcomes) == count and sum(o.steps for o in outcomes) >= 10 * sum(not o.stopped for o in outcomes)


def test_every_command_answers_over_runs_of_kinds_that_are_drawn(tmp_path: Path) -> None:
    """Right, or refused with the sentence that is expected. All kinds: python -m benchmarks.command_matrix."""
    kinds = command_matrix.drawn(SEED, int(os.environ.get("POSTTRAIN_KINDS", "3")))
    print(f"seed {SEED}: python -m benchmarks.command_matrix --dry --kinds {','.join(kinds)} plays these again")
    cells = [*command_matrix.many(kinds, [*command_matrix.COMMANDS], 2, tmp_path)]
    assert not [c for c in cells if c.state == "wrong"]
    assert {c.kind for c in cells} == {*kinds} and len(cells) == len(kinds) * (1 + len(command_matrix.COMMANDS))
