"""The first hour of a new user, in a fresh environment from the wheel: every command and every program of README, of
the pages, of the examples and of the notebooks, in order. POSTTRAIN_FIRST_HOUR chooses: `drawn`, pages that
POSTTRAIN_SEED draws, at toy sizes; `all` pages at toy sizes; `whole`, all pages as printed. The notebooks have a suite
of their own, so none is drawn."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.first_hour.play import play, prepare, told
from tests.first_hour.typed import drawn, sizes_of
from tests.first_hour.words import pages

pytestmark = pytest.mark.prove
ROOT = Path(__file__).parents[2]
SHARE = 0.4
"""Of all steps of pages, how much is drawn."""


def test_the_first_hour(tmp_path: Path) -> None:
    asked = os.environ.get("POSTTRAIN_FIRST_HOUR", "drawn")
    assert asked in ("drawn", "all", "whole"), f"POSTTRAIN_FIRST_HOUR={asked} is none of drawn, all, whole"
    chosen = pages(ROOT)
    if asked == "drawn":
        seed = int(os.environ.get("POSTTRAIN_SEED") or time.time_ns() % 2**31)
        chosen = drawn(sizes_of(chosen, ROOT), seed, SHARE)
        print(f"\npages drawn with POSTTRAIN_SEED={seed}: {', '.join(p.relative_to(ROOT).as_posix() for p in chosen)}")
    played = play(prepare(ROOT, tmp_path / "hour", asked == "whole"), chosen, jobs=2)
    wrong = [told(p) for p in played if p.wrong]
    assert not wrong, "\n".join(wrong)
    assert len([p for p in played if not p.skipped]) > (60 if asked == "drawn" else 250)
