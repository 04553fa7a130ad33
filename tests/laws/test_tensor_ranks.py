"""Over columns and rows of the layers, the check of every run finds a gradient that is not the gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
from law_ranks import over_ranks
from tensor_tasks import FAULTS, Reaches

pytestmark = pytest.mark.prove


def test_wrong_sums_are_found_and_right_ones_are_not_disturbed(tmp_path: Path) -> None:
    for rank, found in enumerate(over_ranks({"reaches": Reaches()}, tmp_path, world=2)):
        assert not isinstance(found["reaches"], str), found["reaches"]
        for word, (_, says) in FAULTS.items():
            said = found["reaches"][word]
            assert (says in said) if says else said == "", (rank, word, said)
