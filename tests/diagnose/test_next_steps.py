"""The commands at the end of a run carry the user's settings and work as printed."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.cli import main
from posttrain.diagnose.next_steps import next_steps
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record.run_reader import SCHEMA, run_file
from posttrain.system.dataclass_json import to_plain
from tests.engine.run_parts import forget

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


@pytest.mark.prove
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


@pytest.mark.prove
def test_a_run_without_words_names_none(tmp_path: Path) -> None:
    from posttrain import run
    from posttrain.config.overrides import apply
    from posttrain.recipe.recipes import recipe

    result = run(apply(recipe("grpo"), SMALL), out=tmp_path / "r", quiet=True)
    assert [c[0] for c in commands(result.folder)] == ["show", "eval", "export", "run"]


@pytest.mark.prove
def test_an_algorithm_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
from dataclasses import dataclass
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import GRPO
from posttrain.ladder.pieces.shape import Shaping

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


@pytest.mark.parametrize(
    ("recipe", "overrides", "shown"),
    [
        ("grpo", ["seed=1", "env.rewards=a b"], 6),
        ("grpo", ["--trust"], 4),
        ("grpo", ["verifiable"], 4),
        ("--resume=x", [], 4),
        (7, [], 4),
        ("grpo", "seed=1", 4),
        ("grpo", ["env.rewards=a\ntouch owned"], 6),
        (
            "x\r\x1b[2Jy; touch owned",
            ["env.args.a=1\u202e\n# hidden", "a=';touch owned;' $(touch owned) `touch owned`"],
            6,
        ),
        ("\x00\x07'", ["a='\n touch owned #"], 6),
    ],
)
def test_words_of_somebody_else_make_no_command_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Any, overrides: Any, shown: int
) -> None:
    """Each line is one command of ours; an option or a second recipe among the recorded words is no setting."""
    asked = {"recipe": recipe, "overrides": overrides}
    plain = {"schema": SCHEMA, "run": to_plain(shipped("grpo")), "lineages": {}, "asked": asked}
    (tmp_path / "run.json").write_text(json.dumps(plain))
    monkeypatch.setattr("posttrain.system.shell.program", lambda: "printf '<%s>'")
    lines = [x for x in next_steps(run_file(tmp_path).run, tmp_path) if not x.startswith("# ")]
    assert len(lines) == shown and all(x.isprintable() for x in lines)
    assert not any("--trust" in x or "--resume=x" in x for x in lines)
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and not (tmp_path / "owned").exists()
    assert done.stdout.count("<run>") == shown - 3 and done.stdout.count("<show>") == 1


@pytest.mark.prove
def test_a_run_that_was_cut_goes_on_first_and_a_worse_one_is_not_handed_out(tmp_path: Path) -> None:
    from posttrain import run
    from posttrain.config.overrides import apply
    from posttrain.recipe.recipes import recipe

    folder = run(apply(recipe("grpo"), SMALL), out=tmp_path / "r", quiet=True).folder
    settings = run_file(folder).run
    cut = next_steps(settings, folder, finished=False)
    assert f"run --resume {folder}" in "".join(cut) and not any("export" in x for x in cut)
    assert not any("export" in x or "--resume" in x for x in next_steps(settings, folder, worse=True))


@pytest.mark.prove
def test_a_run_with_a_planted_fault_is_told_to_run_without_it(tmp_path: Path) -> None:
    """Another seed with the fault means as little, and is refused without --allow-fault."""
    assert main(["run", "grpo", *SMALL, "fault=top_p_one_side", "--allow-fault", "--out", str(tmp_path / "r")]) == 0
    assert commands(tmp_path / "r") == [["show", str(tmp_path / "r")], ["run", "grpo", *SMALL]]
    book = tmp_path / "r" / "run.json"
    book.write_text(book.read_text().replace("top_p_one_side", "fault_of_another_version"))
    posttrain.summarize(tmp_path / "r")


@pytest.mark.prove
def test_a_learning_rate_that_ends_with_the_stage_is_not_told_to_go_on(tmp_path: Path) -> None:
    falls = ("rl.optimizer.schedule=linear", "rl.optimizer.horizon=1", "rl.optimizer.warmup=0", "rl.optimizer.floor=0")
    assert main(["run", "grpo", *SMALL, *falls, "--out", str(tmp_path / "r")]) == 0
    assert not any("--resume" in c for c in commands(tmp_path / "r"))


@pytest.mark.prove
def test_what_a_program_handed_is_asked_for_in_python(tmp_path: Path) -> None:
    from posttrain import run

    run("grpo", *SMALL, rewards=[lambda task, text: float(len(text))], out=tmp_path / "r", quiet=True)
    lines = next_steps(run_file(tmp_path / "r").run, tmp_path / "r")
    assert "posttrain.evaluate" in lines[-1] and not any("--resume" in x or " eval " in x for x in lines[:-1])
