"""Every planted fault of runs over ranks stops a whole run by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import posttrain
from posttrain.record import run_reader
from tests.faulty import catch, smallest
from tests.mutants import FAULTS
from tests.over_ranks import drawn

pytestmark = pytest.mark.prove

FIRST_STEP = "the first optimizer step is not the configured one"
SAYS = {
    "rank_left_out_of_norm": FIRST_STEP,
    "rank_clips_by_own_norm": FIRST_STEP,
    "gradients_averaged_over_ranks": "lacks a rank's part",
    "gradients_reduced_twice": "summed twice",
    "rank_not_in_the_sum": "lacks a rank's part",
    "rank_rows_never_updated": "did not move in an optimizer step",
    "rank_has_own_learning_rate": FIRST_STEP,
    "rank_leaves_out_update": "left out an update",
    "rank_has_own_denominator": "normalised by its own tokens",
    "uneven_units_dropped": "on no rank",
    "rank_has_another_minibatch": "do not have the same minibatch",
    "rank_sends_old_version": "version of the weights",
}
"""Words of what the run says when it stops, whatever rank sees it first."""


def test_all_of_them_are_here() -> None:
    assert [n for n, f in FAULTS.items() if f.needs == "ranks"] == list(SAYS)


@pytest.mark.parametrize("name", drawn(SAYS, 2))
def test_a_planted_fault_stops_the_run(name: str, tmp_path: Path) -> None:
    found = catch(FAULTS[name], tmp_path / "no model is read", tmp_path)
    assert found is not None
    print(f"{name}: {found.detector}, step {found.step}: {found.message[:200]}")
    assert SAYS[name] in found.message


def test_the_run_they_are_planted_in_is_healthy_without_them(tmp_path: Path) -> None:
    run = smallest(FAULTS["uneven_units_dropped"], tmp_path / "no model is read", tmp_path)
    posttrain.run(run, out=tmp_path / "healthy", quiet=True, nproc=2)
    steps = run_reader.steps(tmp_path / "healthy")
    assert [s.index for s in steps] == [1, 2, 3, 1, 2]
    assert not [n for s in steps for n in s.notes if n.startswith(("rule ", "stopped"))]
