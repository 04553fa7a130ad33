"""Stages: what a run without held-out tasks does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.core import reader
from posttrain.core.errors import ConfigError
from tests.tiny import play, tiny_parts, tiny_run


def test_training_without_measuring(tmp_path: Path) -> None:
    """env.heldout=0: every step runs, nothing is evaluated, and nothing pretends to have been."""
    run = tiny_run(eval_every=1)
    run = replace(run, env=replace(run.env, heldout=0))
    results = asyncio.run(play(tiny_parts(tmp_path / "run", run)))
    assert [r.steps for r in results] == [6, 3]
    assert all(r.accuracy is None and r.greedy is None and r.pass_at == {} for r in results)
    assert not any("eval/accuracy" in s.gauges for s in reader.steps(tmp_path / "run"))


def test_a_target_needs_something_to_measure() -> None:
    run = tiny_run(target=0.9, eval_every=1)
    with pytest.raises(ConfigError, match="never measured"):
        replace(run, env=replace(run.env, heldout=0))
