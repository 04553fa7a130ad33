"""A run whose samples are a step older than its learner, on each engine: while one step learns the next one's turns are
being said, and weights come between them.

Bits are promised of the embedded engine alone; here it is counts, versions and log-probs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import posttrain
from posttrain.config.engines import VLLM, Embedded, Engine
from posttrain.config.run import Run
from posttrain.record import run_reader
from posttrain.role.learning.logprob_tolerance import LEAST
from tests.conformance import subjects
from tests.late import episodes_of, late_run, nothing_lost_or_doubled, rl_steps
from tests.tiny import MODEL, only_rl

ENGINES: dict[str, Engine] = {
    "embedded": Embedded(),
    "vllm": VLLM(eager=True, cache_gib=1 / 16),
    "vllm-server": VLLM(eager=True, cache_gib=1 / 16, server=True),
}


def ahead(engine: Engine) -> Run:
    """Six steps of learning that ask one step ahead. Heads of 32 are the smallest that vLLM for CPU takes."""
    run = only_rl(late_run(1, deterministic=False, eval_every=0, checkpoint_every=0))
    return replace(run, engine=engine, model=replace(MODEL, hidden=64))


@pytest.mark.parametrize("name", [n for n in subjects.ENGINES if n in ENGINES])
def test_asking_a_step_ahead_keeps_its_bound_and_its_log_probs(name: str, tmp_path: Path) -> None:
    run = ahead(ENGINES[name])
    folder = posttrain.run(run, out=tmp_path / "run", quiet=True).folder
    nothing_lost_or_doubled(folder, run)
    steps = rl_steps(folder)
    assert max(s.gauges["rollout/most_behind"].sum for s in steps) == 1, "samples ran ahead, by one step and no more"
    gaps = [s.gauges["canary/logp_gap_worst"].sum for s in steps if "canary/logp_gap_worst" in s.gauges]
    assert gaps and max(gaps) < LEAST["float32"].worst, "under equal weights both sides have the same log-probs"
    for row in run_reader.episode_files(folder):
        if row.stage == "rl" and row.kind == "train":
            said = {int(v) for e in episodes_of(row) for s in e.episode.segments for v in s.version[s.mask]}
            assert said <= {row.index - 1, max(0, row.index - 2)}, f"step {row.index} learns from versions {said}"
    assert np.isfinite([s.gauges["policy/ratio_square"].mean for s in steps if "policy/ratio_square" in s.gauges]).all()
