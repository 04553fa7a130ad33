"""A run that goes on longer is the run it would have been from the beginning; what may change is in one table."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from run_parts import SMALL

import posttrain
from posttrain.api.extend import ALLOWED, REFUSED, check_changes
from posttrain.core import files, reader
from posttrain.core.asks import values
from posttrain.core.book import AMENDED, Book
from posttrain.core.checkpoint import find, scan
from posttrain.core.errors import ConfigError
from posttrain.core.placement import Processes, Ray
from posttrain.recipe.recipes import RECIPES

pytestmark = pytest.mark.prove

WORDS = (
    *("arithmetic", *SMALL, "deterministic=true", "env.heldout=6", "sft.steps=2", "sft.batch=8"),
    *("rl.prompts=4", "rl.siblings=4", "rl.eval_every=2", "rl.checkpoint_every=3", "rl.sampling.max_tokens=6"),
)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 steps."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    posttrain.run(*WORDS, "rl.steps=4", out=folder, quiet=True)
    return folder


@pytest.fixture
def copy(short: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short, tmp_path / "run"))


def digest(folder: Path) -> tuple[str, str, str]:
    """Of the record, of the weights and of the optimizer."""
    last = find(folder)
    return reader.record_digest(folder), last.state["weights"], files.digest(last.folder / "optimizer.safetensors")


def test_a_finished_run_that_goes_on_is_the_longer_run_bit_for_bit(copy: Path, tmp_path: Path) -> None:
    """With an evaluation due at its old end, which a longer run has in its record there."""
    posttrain.run(*WORDS, "rl.steps=7", out=tmp_path / "whole", quiet=True)
    done = posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert digest(copy) == digest(tmp_path / "whole") and not (copy / AMENDED).exists()
    assert [s.steps for s in done.stages] == [2, 7]
    found = reader.run_file(copy)
    assert found.run.stage("rl").steps == 7 and not found.edited
    (entry,) = found.facts["history"]
    assert (entry["stage"], entry["step"], entry["changed"]) == ("rl", 4, {"rl.steps": [4, 7]})


def test_a_run_can_go_on_twice_and_from_the_middle(copy: Path, tmp_path: Path) -> None:
    posttrain.run("rl.steps=5", resume=copy, quiet=True)
    posttrain.run("rl.steps=6", "rl.eval_every=3", resume=copy, quiet=True)
    assert [h["step"] for h in reader.run_file(copy).facts["history"]] == [4, 5]
    assert [s.index for s in reader.steps(copy) if s.stage == "rl"] == [1, 2, 3, 4, 5, 6]
    middle = next(c for c in scan(copy) if c.state["running"])
    posttrain.run("rl.steps=8", resume=middle.folder, quiet=True)
    assert [s.index for s in reader.steps(copy) if s.stage == "rl"][-1] == 8


@pytest.mark.parametrize("after", ["amended", "checkpoint"])
def test_a_kill_while_a_run_is_reopened_loses_nothing(copy: Path, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is finished as before, or goes on."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    before = (copy / "steps.jsonl").read_bytes()
    with monkeypatch.context() as m:
        if after == "amended":
            m.setattr("posttrain.core.checkpoint.Checkpoints.replace", killed)
        else:
            m.setattr("posttrain.core.checkpoint.Checkpoints.let_go", killed)
        with pytest.raises(KeyboardInterrupt):
            posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert (copy / AMENDED).exists() and (copy / "steps.jsonl").read_bytes() == before
    book, checkpoint = Book.open_for_resume(copy)
    book.close()
    assert checkpoint is not None and not (copy / AMENDED).exists()
    assert ((copy / "steps.jsonl").read_bytes() == before) == (after == "amended")
    done = posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert [s.steps for s in done.stages] == [2, 7]


REFUSALS: dict[tuple[str, ...], str] = {
    ("rl.steps=3",): "4 steps are taken already",
    ("sft.steps=9",): "sft is over, and a later stage has begun",
    (
        "rl.optimizer.lr=1e-3",
    ): "rl.optimizer.lr=1e-3 cannot change.*learning rates so far.*(?s:.)*model=.*sft=none rl.optimizer.lr=1e-3",
    ("clip.high=0.3",): "clip.high=0.3 cannot change in a run that goes on: the steps so far",
    ("seed=4",): "seed=4 cannot change",
    ("sft=none",): "goes on with the stages it was begun with",
    ("rl.stepz=4",): "did you mean 'steps'",
}


@pytest.mark.parametrize("words", REFUSALS, ids=" ".join)
def test_what_would_change_the_past_is_refused_with_the_way(copy: Path, words: tuple[str, ...]) -> None:
    before = (copy / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=REFUSALS[words]):
        posttrain.run(*words, resume=copy, quiet=True)
    assert (copy / "run.json").read_bytes() == before and len(scan(copy)) == len(scan(copy))


def test_a_target_that_ended_a_run_has_to_change_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    posttrain.run(*WORDS, "rl.steps=6", "rl.target=0.0", out=folder, quiet=True)
    assert [s.index for s in reader.steps(folder)][-1] == 2
    with pytest.raises(ConfigError, match="target 0 reached at step 2: give a higher rl.target too, or none"):
        posttrain.run("rl.steps=8", resume=folder, quiet=True)
    posttrain.run("rl.target=none", resume=folder, quiet=True)
    assert [s.index for s in reader.steps(folder)][-1] == 6


def test_the_table_names_fields_that_exist() -> None:
    trees = [r.build() for r in RECIPES.values()]
    trees += [replace(trees[0], placement=placement) for placement in (Processes(), Ray())]
    known = {key for tree in trees for key, _ in values(tree).values()}
    assert {k for k in known if k.startswith(("Processes.", "Ray."))} <= set(ALLOWED), "a run may go on elsewhere"
    assert set(ALLOWED) <= known and not set(ALLOWED) & set(REFUSED)
    assert {f.partition(".")[0] for f in REFUSED} <= {k.partition(".")[0] for k in known}


@pytest.mark.parametrize("placement", [Processes(), Ray()], ids=["processes", "ray"])
def test_a_run_may_go_on_at_any_other_place(placement: Processes) -> None:
    """`placement` changes no result, so none of its settings is refused."""
    old = RECIPES["arithmetic"].build()
    made = check_changes(Path("runs/mine"), old, replace(old, placement=placement))
    assert {c.field for c in made} > {f"Processes.{f.name}" for f in fields(Processes)} - {"Processes.folder"}


def test_going_on_without_changes_says_how_to_go_on_longer(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    posttrain.run(resume=copy)
    said = capsys.readouterr().out
    assert "nothing is left to do. Longer: " in said and "rl.steps=8" in said
    assert "history" not in json.loads((copy / "run.json").read_text())


def test_a_run_that_learns_again_goes_on(tmp_path: Path) -> None:
    """What the replay buffer held is in the last checkpoint too."""
    words = (*WORDS, "rl.replay.size=8", "rl.replay.groups=1")
    posttrain.run(*words, "rl.steps=4", out=tmp_path / "run", quiet=True)
    posttrain.run(*words, "rl.steps=6", out=tmp_path / "whole", quiet=True)
    posttrain.run("rl.steps=6", resume=tmp_path / "run", quiet=True)
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
