"""A step that is stopped is in the record: which step, which episodes, and why. What is written has the user's
umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import posttrain
from posttrain.cli import main
from posttrain.record import run_reader
from tests.engine.run_parts import SMALL, mine

HUGE = """
def reward(task, text):
    return 1e45 * (sum(map(ord, text)) % 2) if task.answer in {wanted} else float(len(text) % 3)
"""


def stopped(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 3) -> str:
    """A run that must end with this exit code; what it said last."""
    capsys.readouterr()
    assert main(["run", *words, "--out", str(folder)]) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.prove
def test_a_gradient_that_is_no_number_names_step_and_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards that overflow float32 in some groups: the message names their episodes and no others, and the step is
    recorded with them."""
    prompts = {str(a) for a in range(0, 20, 2)}
    words = mine(tmp_path, reward=HUGE.replace("{wanted}", repr(prompts)))
    said = stopped(tmp_path / "run", capsys, *words, "algorithm=dr_grpo", "seed=3")
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert f"(rl step {steps[-1].index})" in said and "at optimizer step" in said
    assert steps[-1].notes[-1].removeprefix("stopped: ") in said.removeprefix("posttrain: ")
    assert steps[-1].gauges["rollout/reward"].count == 12
    records = run_reader.episodes(tmp_path / "run", "rl", steps[-1].index)
    guilty = {
        r.episode.task.id
        for r in records
        if r.episode.task.answer in prompts and r.advantage is not None and abs(r.advantage[0]).max() > 1e40
    }
    innocent = {r.episode.task.id for r in records} - guilty
    assert guilty and innocent, "choose another seed: this one asks only one kind of prompt"
    assert any(f"task {i!r}" in said for i in guilty) and not any(f"task {i!r}" in said for i in innocent)
    assert "3 of the 9 episodes of the batch make it" in said


@pytest.mark.prove
def test_weights_that_run_away_are_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that breaks the weights: every episode makes it, and supervised steps are recorded too."""
    said = stopped(
        tmp_path / "rl", capsys, *mine(tmp_path), *("rl.optimizer.lr=1e30", "rl.optimizer.warmup=0", "rl.minibatches=2")
    )
    assert "(rl step 1)" in said and "Every one of the batch's" in said
    assert [s.index for s in run_reader.steps(tmp_path / "rl")] == [1] and run_reader.episodes(tmp_path / "rl", "rl", 1)
    said = stopped(
        tmp_path / "sft",
        capsys,
        "arithmetic",
        *SMALL,
        "sft.steps=4",
        "sft.batch=6",
        "sft.optimizer.lr=1e30",
        "env.heldout=0",
    )
    assert "(sft step 2)" in said and "demonstration 0" in said
    last = run_reader.steps(tmp_path / "sft")[-1]
    assert (last.stage, last.index) == ("sft", 2) and last.notes[0].startswith("stopped: the gradient norm is nan")


BROKEN = "def reward(task, text):\n    raise OSError('no answer from the judge')\n"


@pytest.mark.prove
def test_a_step_too_few_could_judge_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdicts that stopped the run can be read with `posttrain show`."""
    said = stopped(tmp_path / "held", capsys, *mine(tmp_path, reward=BROKEN), code=7)
    assert "held-out samples before the first step could not be judged" in said
    records = run_reader.episodes(tmp_path / "held", "rl", 0, "eval")
    assert len(records) == 4 and all(r.episode.verdicts[0].verdict.kind == "raised" for r in records)
    said = stopped(tmp_path / "run", capsys, *mine(tmp_path, reward=BROKEN), "rl.eval=false", code=7)
    (step,) = run_reader.steps(tmp_path / "run")
    assert "could not be judged" in said and step.notes[-1].startswith("stopped: 12 of 12 samples")
    records = run_reader.episodes(tmp_path / "run", "rl", 1)
    assert len(records) == 12 and all(r.episode.verdicts[0].verdict.kind == "raised" for r in records)


@pytest.mark.parametrize("mask", [0o027, *(pytest.param(x, marks=pytest.mark.prove) for x in (0o022, 0o077))])
def test_what_is_written_has_the_users_umask(tmp_path: Path, mask: int) -> None:
    """Weights of checkpoints and exports can be read by whom the user lets read, and by nobody else."""
    before = os.umask(mask)
    try:
        assert main(["run", *mine(tmp_path), "--out", str(tmp_path / "run")]) == 0
        posttrain.export(tmp_path / "run", tmp_path / "model")
    finally:
        os.umask(before)
    files = [p for d in ("run", "model") for p in (tmp_path / d).rglob("*") if p.is_file()]
    assert any(p.suffix == ".safetensors" for p in files)
    wrong = {
        str(p.relative_to(tmp_path)): oct(stat.S_IMODE(p.stat().st_mode))
        for p in files
        if stat.S_IMODE(p.stat().st_mode) & mask
    }
    assert not wrong
    private = {p.name for p in files if not stat.S_IMODE(p.stat().st_mode) & 0o040} if mask != 0o077 else set()
    assert not private
