"""The recipe that takes your prompts shows what RL adds: on held-out prompts, on three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

import posttrain
from posttrain.diagnose.learning_verdict import learned
from posttrain.diagnose.run_outcome import read_outcome
from posttrain.record import run_reader

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_gains_on_held_out_prompts(seed: int, tmp_path: Path) -> None:
    """The lower end of the paired gain's interval is far above 0, no held-out prompt was trained on, and the sentence
    says that it learned."""
    folder = posttrain.run("verifiable", f"seed={seed}", out=tmp_path / "run", quiet=True).folder
    of = read_outcome(folder)
    rl = of.stages[-1]
    assert rl.accuracy is not None and rl.accuracy.prompts == 100
    assert rl.accuracy.low > 0.2 and rl.accuracy.after > 0.75, rl.accuracy
    trained = {
        str(r.episode.task.prompt)
        for f in run_reader.episode_files(folder)
        if f.kind == "train"
        for r in run_reader.read_episodes(f.path)
    }
    held_out = {str(r.episode.task.prompt) for r in run_reader.episodes(folder, "rl", 60, "eval")}
    assert len(held_out) == 100 and not trained & held_out
    assert learned(of).word == "learned" and "](summary.svg)" in (folder / "summary.md").read_text()
