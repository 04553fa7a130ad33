"""`model=runs/X`: a run that begins with another one's weights, and goes on where that one is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import posttrain
from posttrain.cli import main
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.system.errors import RunFolderError
from tests.engine.run_parts import SMALL

pytestmark = pytest.mark.prove

TASKS = ("arithmetic", "env.heldout=4", "slots=16", "threads=1", "evaluation.samples=1")
RL = ("rl.prompts=2", "rl.siblings=4", "rl.eval_every=0", "rl.checkpoint_every=1", "rl.sampling.max_tokens=6")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "source"
    posttrain.run(*TASKS, *SMALL[3:], *RL, "sft.steps=2", "sft.batch=8", "rl.steps=2", out=folder, quiet=True)
    return folder


def start(folder: Path) -> str:
    """Digest of the weights that a run began with."""
    return (folder / "kept" / "start" / "weights.safetensors").read_bytes().hex()


@pytest.mark.parametrize("which", ["last", "middle"])
def test_a_branch_begins_with_the_weights_and_says_whose(
    source: Path, tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = find(source) if which == "last" else scan(source)[0]
    path = source if which == "last" else checkpoint.folder
    done = posttrain.run(*TASKS, *RL, f"model={path}", "sft=none", "rl.steps=1", out=tmp_path / "branch")
    assert start(done.folder) == (checkpoint.folder / "weights.safetensors").read_bytes().hex()
    found = run_reader.run_file(done.folder)
    origin = found.facts["branched_from"]
    assert (origin["checkpoint"], origin["identity"]) == (checkpoint.name, run_reader.run_file(source).identity)
    assert found.run.model.path == str(source / "checkpoints" / checkpoint.name)
    assert found.run.stage("rl").optimizer.lr == 5e-4, "a model that a recipe built keeps the recipe's settings"
    assert "settings: those of the recipe" in capsys.readouterr().out


def test_a_branch_goes_on_where_its_source_is_gone(source: Path, tmp_path: Path) -> None:
    """Resumed from a checkpoint and from none, evaluated and exported."""
    moved = tmp_path / "source"
    shutil.copytree(source, moved)
    done = posttrain.run(*TASKS, *RL, f"model={moved}", "sft=none", "rl.steps=1", out=tmp_path / "branch", quiet=True)
    began = start(done.folder)
    shutil.rmtree(moved)
    assert [s.steps for s in posttrain.run("rl.steps=2", resume=done.folder, quiet=True).stages] == [2]
    assert main(["eval", str(done.folder), "--samples", "1"]) == 0
    assert main(["export", str(done.folder), str(tmp_path / "model")]) == 0
    shutil.rmtree(done.folder / "checkpoints")
    posttrain.run(resume=done.folder, quiet=True)
    assert start(done.folder) == began and (tmp_path / "model" / "config.json").exists()


def test_a_branch_of_a_branch_knows_both(source: Path, tmp_path: Path) -> None:
    one = posttrain.run(*TASKS, *RL, f"model={source}", "sft=none", "rl.steps=1", out=tmp_path / "one", quiet=True)
    two = posttrain.run(*TASKS, *RL, f"model={one.folder}", "sft=none", "rl.steps=1", out=tmp_path / "two", quiet=True)
    origin = run_reader.run_file(two.folder).facts["branched_from"]
    assert origin["run"] == str(one.folder) and origin["before"]["run"] == str(source)


def test_checkpoints_are_evaluated_and_compared_with(source: Path, tmp_path: Path) -> None:
    middle = scan(source)[0]
    assert main(["eval", str(middle.folder), "--samples", "1"]) == 0
    reference = (f"rl.reference={source}", f"model={middle.folder}", "pull=kl")
    done = posttrain.run(*TASKS, *RL, *reference, "sft=none", "rl.steps=1", out=tmp_path / "run", quiet=True)
    assert run_reader.steps(done.folder)


def test_what_is_not_there_is_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", *TASKS, *RL, "sft=none", "rl.steps=1", "--out", str(tmp_path / "run"))
    assert main([*words, f"model={source}/checkpoints/nope"]) == 5
    assert "has no checkpoint 'nope'" in capsys.readouterr().err and not (tmp_path / "run").exists()
    empty = tmp_path / "empty"
    shutil.copytree(source, empty)
    shutil.rmtree(empty / "checkpoints")
    with pytest.raises(RunFolderError, match="no checkpoint yet"):
        posttrain.run(*TASKS, *RL, "sft=none", f"model={empty}", out=tmp_path / "run", quiet=True)
    assert main(["eval", str(scan(source)[0].folder), "--checkpoint", "best"]) == 2
    assert "names another" in capsys.readouterr().err
