"""The first hour of a new user, in a fresh environment from the wheel: every command and every program of README, of
the pages, of the examples and of the notebooks, in order. At toy sizes; as printed where POSTTRAIN_FIRST_HOUR is
`whole`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.first_hour.play import play, prepare, told
from tests.first_hour.words import pages

pytestmark = pytest.mark.prove
ROOT = Path(__file__).parents[2]


def test_the_first_hour(tmp_path: Path) -> None:
    hour = prepare(ROOT, tmp_path / "hour", os.environ.get("POSTTRAIN_FIRST_HOUR") == "whole")
    played = play(hour, pages(ROOT), jobs=2)
    wrong = [told(p) for p in played if p.wrong]
    assert not wrong, "\n".join(wrong)
    assert len([p for p in played if not p.skipped]) > 120
