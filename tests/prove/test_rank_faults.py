"""Faults that are planted in every process of a whole run over ranks stop it by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.api import main, ranked
from posttrain.core.errors import InvariantError
from posttrain.engine.rank_orders import RankLost
from tests import rank_faults
from tests.over_ranks import drawn, run_of

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("name", drawn(rank_faults.FAULTS, 2))
def test_a_planted_fault_stops_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rank sees it first, before the run ends."""
    monkeypatch.setattr(ranked, "WORKER", rank_faults.__name__)
    monkeypatch.setenv(rank_faults.PLANTED, name)
    sft = replace(run_of(steps=1).stages[0], batch=7)  # an odd number of units over two ranks
    with rank_faults.planted(name, 0), pytest.raises((InvariantError, RankLost)) as found:
        main.run(replace(run_of(), stages=(sft,)), out=tmp_path / "run", quiet=True, nproc=2, rank_timeout=30.0)
    print(found.value)
    assert rank_faults.FAULTS[name][1] in str(found.value)
