"""The commands at the end of a run carry the user's settings and work as printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from run_parts import forget

from posttrain.api.next_steps import next_steps
from posttrain.cli import main
from posttrain.core.reader import run_file

SMALL = [
    "rl.steps=1",
    "rl.prompts=2",
    "rl.siblings=2",
    "sampling.max_tokens=8",
    "evaluation.samples=1",
    "env.heldout=2",
]


def commands(folder: Path) -> list[list[str]]:
    """What stands behind `posttrain` in each line."""
    out: list[list[str]] = []
    for line in next_steps(run_file(folder).run, folder):
        if line.startswith("# "):
            continue
        words = shlex.split(line.partition("  #")[0])
        at = next(i for i, w in enumerate(words) if Path(w).name == "posttrain")
        out.append(words[at + 1 :])
    return out


def test_each_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rewards.py").write_text("def good(task, text):\n    return float(len(text) % 2)\n")
    given = [*SMALL, "env.rewards=my rewards.py:good", "seed=4", "clip.high=0.3", "algorithm=dapo", "rl.refill=1"]
    assert main(["run", "grpo", *given, "--out", "runs/a b"]) == 0
    found = commands(Path("runs/a b"))
    assert [c[0] for c in found] == ["show", "eval", "export", "run", "run", "run"]
    seed, algorithm = found[-2:]
    assert seed == ["run", "grpo", *(w for w in given if w != "seed=4"), "seed=5"]
    assert "env.rewards=my rewards.py:good" in algorithm and "seed=4" in algorithm
    assert algorithm[-1] == "algorithm=grpo" and "clip.high=0.3" not in algorithm
    for command in found:
        assert main(command) == 0, command
    assert commands(Path("runs/a b"))[2][-1] == "my-model-2"


def test_a_run_without_words_names_none(tmp_path: Path) -> None:
    from posttrain import run
    from posttrain.api.overrides import apply
    from posttrain.recipe.recipes import recipe

    result = run(apply(recipe("grpo"), SMALL), out=tmp_path / "r", quiet=True)
    assert [c[0] for c in commands(result.folder)] == ["show", "eval", "export", "run"]


def test_an_algorithm_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
from dataclasses import dataclass
from posttrain.core.algorithm import patch
from posttrain.core.ladder import GRPO
from posttrain.core.pieces.shape import Shaping

@dataclass(frozen=True, kw_only=True)
class HalvedReward(Shaping):
    factor: float = 0.5
    def words(self) -> str:
        return f"{self.factor:g} r"

mine = patch(GRPO, "mine", "me", clip=None, ratio="one", anchor="behaviour")

def with_piece():
    return patch(GRPO, "halved", "me", shape=(HalvedReward(),))
"""
    (tmp_path / "mine.py").write_text(text)
    assert main(["run", "grpo", *SMALL, "algorithm=mine.py:mine", "--out", "a"]) == 0
    assert run_file(Path("a")).run.stage("rl").algorithm.name == "mine"  # type: ignore[attr-defined]
    assert main(["run", "--resume", "a", "rl.steps=2"]) == 0
    for word, says in (("mine.py:mien", "did you mean 'mine'"), ("no.py:mine", "there is no file no.py")):
        assert main(["run", "grpo", f"algorithm={word}"]) == 2
        assert says in capsys.readouterr().err
    assert main(["run", "--resume", "a", "rl.steps=3", "algorithm=mine.py:with_piece"]) == 2
    assert "is not the one that the run was begun with" in capsys.readouterr().err
    forget()
    assert [c[0] for c in commands(Path("a"))] == ["show", "eval", "export", "run", "run", "run"]
    assert commands(Path("a"))[3] == ["run", "--resume", "a", "rl.steps=4"], "the run knows its file"


def test_a_run_that_was_cut_goes_on_first_and_a_worse_one_is_not_handed_out(tmp_path: Path) -> None:
    from posttrain import run
    from posttrain.api.overrides import apply
    from posttrain.recipe.recipes import recipe

    folder = run(apply(recipe("grpo"), SMALL), out=tmp_path / "r", quiet=True).folder
    settings = run_file(folder).run
    cut = next_steps(settings, folder, finished=False)
    assert f"run --resume {folder}" in "".join(cut) and not any("export" in x for x in cut)
    assert not any("export" in x or "--resume" in x for x in next_steps(settings, folder, worse=True))
