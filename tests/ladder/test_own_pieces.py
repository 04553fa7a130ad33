"""Algorithms with pieces that a user wrote: they are trained with, read without their file, and go on with it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.build.request.algorithm_file import algorithm_of, without_algorithm
from posttrain.build.request.own_pieces import own_classes
from posttrain.build.request.user_objects import UserObjects
from posttrain.cli import main
from posttrain.config.run import Reinforce
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.shape import Shaping
from posttrain.ladder.pieces.trust_region import TrustRegion
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.system import files
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError, UntrustedError
from posttrain.system.subclass_registry import alternatives
from tests.engine.run_parts import forget, mine, model_at

prove = pytest.mark.prove
DAMAGED, UNTRUSTED = RunFolderError.exit_code, UntrustedError.exit_code
OWN = '''
from dataclasses import dataclass

import torch

from posttrain.algorithm.credit.baseline_values import centred
from posttrain.algorithm.credit.reward_shaping import shape
from posttrain.algorithm.loss.push_factor import Push, pushed
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import GRPO
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.shape import Shaping
from posttrain.ladder.pieces.trust_region import TrustRegion


@dataclass(frozen=True, kw_only=True)
class Written(TrustRegion):
    """What PPO's clip does, written again."""

    room: float = 0.2

    def words(self):
        return f"rho, 0 outside 1 +- {self.room:g}"


@pushed.register
def _(region: Written, inputs):
    r_M, a_M = inputs.ratio_M, inputs.advantage_M
    low_M, high_M = (a_M < 0) & (r_M < 1 - region.room), (a_M > 0) & (r_M > 1 + region.room)
    return Push(r_M.masked_fill(low_M | high_M, 0.0), low_M, high_M)


@dataclass(frozen=True, kw_only=True)
class Middle(Baseline):
    """The middle between the best and the worst."""

    relative = True

    def words(self):
        return "r - (max + min of the group) / 2"


@centred.register
def _(b: Middle, siblings):
    rewards = siblings.rewards
    return rewards - (rewards.max() + rewards.min()) / 2, siblings.ema


@dataclass(frozen=True, kw_only=True)
class Scaled(Shaping):
    """A multiple of the reward."""

    factor: float = 0.5

    def words(self):
        return f"{self.factor:g} r"


@shape.register
def _(piece: Scaled, rewards, episodes, max_tokens):
    return piece.factor * rewards


LOSS = patch(GRPO, "loss", "-", clip=Written())


def whole():
    return patch(GRPO, "whole", "-", clip=Written(room=0.05), baseline=Middle(), shape=(Scaled(),))
'''
TINY = ("rl.steps=3", "rl.minibatches=2", "rl.optimizer.lr=0.02", "rl.optimizer.warmup=0", "deterministic=true")
"""With two minibatches of large steps, so that ratios leave the bounds of a clip."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget()


def words(folder: Path, *more: str) -> tuple[str, ...]:
    """A tiny run, beside the user's file `own.py`."""
    settings = dict(w.partition("=")[::2] for w in (*mine(folder)[1:], *TINY, *more))
    (folder / "own.py").write_text(OWN)
    return ("verifiable", *(f"{name}={value}" for name, value in settings.items()))


@dataclass(frozen=True)
class Made:
    folder: Path
    file: Path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `a` of `own.py:whole`, made from the command line."""
    here = tmp_path_factory.mktemp("own")
    assert main(["run", *words(here), f"algorithm={here / 'own.py'}:whole", "--out", str(here / "a")]) == 0
    forget()
    return here


@pytest.fixture
def made(first: Path) -> Iterator[Made]:
    """That run, whose folder and file a test may change."""
    kept, file = first.parent / "kept", first / "own.py"
    shutil.copytree(first, kept)
    yield Made(first / "a", file)
    shutil.rmtree(first)
    kept.rename(first)


def digest(folder: Path) -> tuple[str, str, str]:
    """Of the record, of the weights and of the optimizer."""
    last = find(folder)
    return run_reader.record_digest(folder), last.state["weights"], files.digest(last.folder / "optimizer.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "run.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


# --- trained ----------------------------------------------------------------------------------------------------------


@prove
def test_a_loss_of_ones_own_is_the_mathematics_that_it_writes(tmp_path: Path) -> None:
    """PPO's clip written again gives GRPO's run bit for bit, from the command line and from Python; other numbers do
    not."""
    given = words(tmp_path)
    loss = f"algorithm={tmp_path / 'own.py'}:LOSS"
    posttrain.run(*given, "algorithm=grpo", out=tmp_path / "grpo", quiet=True)
    assert main(["run", *given, loss, "--out", str(tmp_path / "cli")]) == 0
    posttrain.run(*given, algorithm=algorithm_of(loss.partition("=")[2]), out=tmp_path / "python", quiet=True)
    posttrain.run(*given, loss, "clip.room=0.001", out=tmp_path / "other", quiet=True)
    assert any(s.gauges["policy/clip_high"].sum for s in run_reader.steps(tmp_path / "grpo")), "the clip is at work"
    right = digest(tmp_path / "grpo")[1:]
    assert digest(tmp_path / "cli")[1:] == right and digest(tmp_path / "python")[1:] == right
    assert digest(tmp_path / "other")[1:] != right
    stage = run_reader.run_file(tmp_path / "other").run.stage("rl")
    assert isinstance(stage, Reinforce) and stage.algorithm.clip.room == 0.001  # type: ignore[union-attr]


@prove
def test_credit_and_shaping_of_ones_own_are_the_numbers_that_they_write(first: Path) -> None:
    groups: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for step in (1, 2, 3):
        for row in run_reader.episodes(first / "a", "rl", step):
            groups[step, row.episode.task.id].append(row)
    spread = 0
    for rows in groups.values():
        rewards = np.array([r.episode.reward for r in rows])
        shaped = np.array([r.shaped for r in rows])
        assert np.array_equal(shaped, 0.5 * rewards)
        if np.ptp(shaped) == 0:
            continue
        spread += 1
        right = (shaped - (shaped.max() + shaped.min()) / 2) / shaped.std(ddof=1)
        for row, a in zip(rows, right, strict=True):
            for tokens in row.advantage:
                assert tokens == pytest.approx(a, abs=1e-12)
    assert spread >= 6


# --- read without the file --------------------------------------------------------------------------------------------


@prove
def test_such_a_run_is_read_without_its_file(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made.folder, made.folder.with_name("b"))
    made.file.unlink()
    found, again = run_reader.run_file(made.folder), run_reader.run_file(made.folder)
    assert sorted(p.name for p in found.absent) == ["Middle", "Scaled", "Written"]
    assert found.run == again.run, "two readings are equal, so that compare finds nothing between them"
    a, b = str(made.folder), str(made.folder.with_name("b"))
    out = made.folder.parent / "export"
    for command in (
        *(["show", a], ["summary", a], ["plot", a, "--out", str(out.with_suffix(".svg"))], ["compare", a, b]),
        *(["eval", a, "--samples", "1"], ["export", a, str(out)]),
    ):
        assert main(command) == 0, command
    said = capsys.readouterr().out
    assert "whole" in said and "settings that differ" not in said
    assert "of a file that was not imported" in (out / "README.md").read_text() or "whole" in said
    assert main(["ladder", "--on", a, "--against", "rloo"]) == 2
    assert "own.py, and that file is not there. Put it back as it was" in capsys.readouterr().err


def test_the_ladder_shows_an_algorithm_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    assert main(["ladder", "--diff", "grpo", "own.py:whole"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["baseline", "groupmean", "middle"] in rows and ["shape", "none", "scaled(factor=0.5)"] in rows
    assert main(["ladder", "--diff", "own.py:LOSS", "own.py:LOSS"]) == 0
    assert "loss and loss make the same choices" in capsys.readouterr().out
    assert main(["ladder", "own.py:whole"]) == 0
    assert "push     rho, 0 outside 1 +- 0.05" in capsys.readouterr().out
    assert main(["ladder", "own.py:LOS"]) == 2
    assert "did you mean 'LOSS'?" in capsys.readouterr().err


@prove
def test_the_ladder_holds_it_against_a_run(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(made.folder)
    assert main(["ladder", "--on", a, "--against", f"{made.file}:LOSS,grpo", "--step", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {r["algorithm"]: r for r in json.loads(json.dumps(told))["rows"]} if "rows" in told else {}
    assert not rows or rows["loss"]["norm"] == pytest.approx(rows["grpo"]["norm"])
    forget()
    made.file.write_text(OWN.replace("rewards.min()", "rewards.mean()"))
    assert main(["ladder", "--on", a, "--against", f"{made.file}:LOSS", "--step", "1"]) == 0
    assert "piece 'Middle' is not as it was when the run was begun (the text of its file differs)" in (
        capsys.readouterr().err
    )


# --- going on ---------------------------------------------------------------------------------------------------------


@prove
def test_it_goes_on_with_the_unchanged_file_alone(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["run", "--resume", str(made.folder), "rl.steps=4"]
    made.file.write_text(OWN.replace("rewards.min()", "rewards.mean()"))
    assert main(on) == 2
    said = capsys.readouterr().err
    assert "was changed since the run was begun. Put it back as it was" in said
    assert f"algorithm={made.file}:NAME" in said and "Traceback" not in said
    made.file.unlink()
    assert main(on) == 2 and "is not there. Put it back as it was" in capsys.readouterr().err
    other = made.file.with_name("moved.py")
    other.write_text(OWN)
    assert main([*on, f"algorithm={other}:LOSS"]) == 2
    assert "is not the one that the run was begun with (whole)" in capsys.readouterr().err
    assert main([*on, f"algorithm={other}:whole"]) == 0
    assert "is not as it was" not in " ".join(capsys.readouterr().out.split()), "the same text at another place"
    forget()
    made.file.write_text(OWN)
    assert main([*on[:-1], "rl.steps=5"]) == 0, "without algorithm=, as the next steps print it"
    assert [s.index for s in run_reader.steps(made.folder) if s.stage == "rl"] == [1, 2, 3, 4, 5]


@prove
def test_it_goes_on_with_a_changed_file_that_is_named_and_says_so(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    made.file.write_text(OWN.replace("rewards.min()", "rewards.mean()"))
    assert main(["run", "--resume", str(made.folder), "rl.steps=4", f"algorithm={made.file}:whole"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "piece 'Middle' is not as it was when the run was begun (the text of its file differs)" in said
    forget()
    renamed = re.sub(r"\bfactor\b", "times", OWN)
    made.file.write_text(renamed)
    assert main(["run", "--resume", str(made.folder), "rl.steps=5", f"algorithm={made.file}:whole"]) == DAMAGED
    said = capsys.readouterr().err
    assert "Scaled has no such field" in said and "give it as it was" in said


@prove
def test_killed_and_resumed_it_is_the_straight_run(made: Made, tmp_path: Path) -> None:
    given = (*words(tmp_path, "rl.steps=5"), f"algorithm={tmp_path / 'own.py'}:whole")
    posttrain.run(*given, out=tmp_path / "straight", quiet=True)
    forget()
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "posttrain", "run", *given, "--out", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    steps, deadline = folder / "steps.jsonl", time.monotonic() + 90
    while not (steps.is_file() and steps.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    posttrain.run(resume=folder, quiet=True)
    assert digest(folder) == digest(tmp_path / "straight")
    middle = next(c for c in scan(folder) if c.state["running"])
    forget()
    posttrain.run(resume=middle.folder, quiet=True)
    assert digest(folder) == digest(tmp_path / "straight")


@prove
def test_a_class_of_a_notebook_is_handed_again(tmp_path: Path) -> None:
    from posttrain.algorithm.credit.reward_shaping import shape

    @dataclass(frozen=True, kw_only=True)
    class Noted(Shaping):
        def words(self) -> str:
            return "3 r"

    Noted.__module__ = "__main__"  # as a cell of a notebook defines it
    shape.register(Noted, lambda piece, rewards, episodes, most: 3 * rewards)
    noted = patch(GRPO, "noted", "-", shape=(Noted(),))
    folder = tmp_path / "a"
    posttrain.run(*words(tmp_path), algorithm=noted, out=folder, quiet=True)
    forget()
    assert [(p.name, p.file) for p in run_reader.run_file(folder).absent] == [("Noted", "")]
    with pytest.raises(ConfigError, match=r"Noted, whose class was defined in a notebook .* Define it again and hand"):
        posttrain.run("rl.steps=4", resume=folder, quiet=True)
    Noted.offer()
    posttrain.run("rl.steps=4", resume=folder, algorithm=noted, quiet=True)
    assert len([s for s in run_reader.steps(folder) if s.stage == "rl"]) == 4


# --- of somebody else -------------------------------------------------------------------------------------------------


@prove
def test_a_folder_of_somebody_else_imports_nothing_unless_it_is_allowed(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # a user without notes of the run
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w').close()\n{OWN}"
    made.file.write_text(text)
    edit(
        made.folder,
        lambda d: [o["files"].update({str(made.file): files_digest(text)}) for o in d["objects"] if "files" in o],
    )
    a = str(made.folder)
    for command in (["run", "--resume", a, "rl.steps=4"], ["ladder", "--on", a, "--against", "rloo"]):
        assert main(command) == UNTRUSTED
        said = capsys.readouterr().err
        assert f"runs the Python file {made.file}" in said and "--trust" in said and not mark.exists()
    for command in (["show", a], ["summary", a], ["eval", a, "--samples", "1", "--trust"]):
        assert main(command) == 0 and not mark.exists()
    capsys.readouterr()
    assert main(["run", "--resume", a, "rl.steps=4", "--trust"]) == 0
    assert f"runs the Python file {made.file}" in capsys.readouterr().err and mark.exists()


def files_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def rl_algorithm(data: dict[str, Any]) -> dict[str, Any]:
    return data["run"]["stages"][-1]["algorithm"]


def listed(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(o for o in data["objects"] if o["name"] == name)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a name of control characters": (
        lambda d: (listed(d, "Written").update(name="\x1b[31m"), rl_algorithm(d)["clip"].update(type="\x1b[31m")),
        "is damaged",
    ),
    "a shipped name": (lambda d: rl_algorithm(d)["clip"].update(type="Clip"), "Clip has no such field"),
    "a shipped name in another case": (
        lambda d: (listed(d, "Written").update(name="CLIP"), rl_algorithm(d)["clip"].update(type="CLIP")),
        "overrides would not tell it from",
    ),
    "a huge name": (
        lambda d: (listed(d, "Written").update(name="W" * 10**6), rl_algorithm(d)["clip"].update(type="W" * 10**6)),
        "a name of 1000000 letters",
    ),
    "many fields": (lambda d: rl_algorithm(d)["clip"].update({f"f{i}": 0 for i in range(10**4)}), "fields and a name"),
    "a field that is a method": (lambda d: rl_algorithm(d)["clip"].update(refuses=1), "it has a field 'refuses'"),
    "a field of Python's": (lambda d: rl_algorithm(d)["clip"].update(__class__=1), "it has a field '__class__'"),
    "a field that is no name": (lambda d: rl_algorithm(d)["clip"].update({"a b; import os": 1}), "is damaged"),
    "a field that is a word of Python": (lambda d: rl_algorithm(d)["clip"].update({"lambda": 1}), "is damaged"),
    "the mark of a record": (lambda d: rl_algorithm(d)["clip"].update(absent=False), "it has a field 'absent'"),
    "thousands of pieces": (
        lambda d: d["objects"].extend({"kind": "piece", "name": f"P{i}"} for i in range(10**4)),
        "at most 100 are read",
    ),
    "not listed": (lambda d: d.update(objects=[]), "did you mean"),
}


DEAD = OWN.replace("r_M.masked_fill(low_M | high_M, 0.0)", "r_M * (CONDITION)")


@pytest.mark.parametrize("condition", ["(r_M - 1).abs() > 1e-3", "(a_M > 9) | (r_M < 0.99)", "0 * r_M"])
def test_a_trust_region_that_is_0_where_every_step_begins_trains_nothing(
    condition: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(DEAD.replace("CONDITION", condition))
    algorithm = f"algorithm={tmp_path / 'own.py'}:LOSS"
    code = main(["run", *mine(tmp_path / "data"), algorithm, "--out", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().err.split())
    forget()
    assert code == InvariantError.exit_code and "is 0 at a ratio of 1, where every step begins" in said


@prove
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_strange_record_is_damage(made: Made, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, says = HOSTILE[name]
    before = {c: alternatives(c) for c in (TrustRegion, Baseline, Shaping)}
    edit(made.folder, change)
    begun = time.monotonic()
    if name == "not listed":
        says = "If a file of your own defines it, give that too: algorithm=path.py:NAME"
    with pytest.raises(RunFolderError) as caught:
        run_reader.run_file(made.folder)
    assert says in str(caught.value) and time.monotonic() - begun < 5
    assert {c: alternatives(c) for c in before} == before
    assert main(["show", str(made.folder)]) == DAMAGED
    said = capsys.readouterr().err
    assert "\x1b" not in said and "Traceback" not in said and len(said) < 3000


@prove
@pytest.mark.parametrize("value", ["x" * 10**6, [1] * 10**5, {"a": {"b": [None]}}, "\x1b]0;title\x07", None])
def test_a_strange_number_is_only_shown(made: Made, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    edit(made.folder, lambda d: rl_algorithm(d)["clip"].update(room=value))
    stage = run_reader.run_file(made.folder).run.stage("rl")
    assert isinstance(stage, Reinforce) and stage.algorithm.clip is not None
    assert len(stage.algorithm.clip.words()) < 200
    for command in ("show", "summary"):
        assert main([command, str(made.folder)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@prove
@pytest.mark.parametrize(
    "record",
    [
        {"file": "own.py", "files": {"own.py": "0" * 32}},
        {"file": "/etc/passwd", "files": {}},
        {"file": "/etc/passwd", "files": {"/etc/hosts": "0" * 32}},
        {"file": "/dev/zero", "files": {"/dev/zero": "0" * 32}},
        {"file": "\x1b[31m/x.py", "files": {"\x1b[31m/x.py": "0" * 32}},
        {"file": 7, "files": [1]},
        {"file": "/x.py\0y", "files": {"/x.py\0y": "0" * 32}},
    ],
)
def test_a_strange_file_is_never_imported(
    made: Made, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(made.folder, lambda d: [o.update(record) for o in d["objects"] if o["kind"] == "piece"])
    assert main(["show", str(made.folder)]) == 0
    resume = ["run", "--resume", str(made.folder), "rl.steps=4"]
    assert main(resume) == UNTRUSTED and main([*resume, "--trust"]) != 0
    said = capsys.readouterr()
    assert "\x1b" not in said.err and "Traceback" not in said.err
    assert "damaged" in said.err or "is not there" in said.err


# --- from a YAML file -------------------------------------------------------------------------------------------------


@prove
def test_a_yaml_file_names_it_and_runs_with_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_at(tmp_path / "model")
    small = [w for w in words(tmp_path) if not w.startswith("model.")]
    given = [*small, f"model={model}", "algorithm=own.py:whole", "clip.room=0.3"]
    assert main(["run", *given, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "algorithm:\n      base: own.py:whole\n      clip:\n        type: Written\n        room: 0.3\n" in text
    forget()
    at_the_stage = [w.replace("algorithm=", "rl.algorithm=") for w in given]
    assert main(["run", *at_the_stage, "--dry-run"]) == 0
    assert capsys.readouterr().out == text, "as the help of rl.algorithm says"
    assert main(["run", *at_the_stage, "sft.algorithm=own.py:whole", "--dry-run"]) == 2
    assert "Name one of them" in capsys.readouterr().err
    forget()
    Path("my.yaml").write_text(text)
    assert main(["run", "my.yaml", "--out", "a"]) == 0
    assert "my.yaml asks for this:\n  code     algorithm: runs whole of the Python file" in capsys.readouterr().err
    assert main(["run", *given, "--out", "b"]) == 0
    assert digest(Path("a"))[1:] == digest(Path("b"))[1:]
    forget()
    assert main(["run", "--resume", "a", "rl.steps=4"]) == 0
    Path("my.yaml").write_text(text.replace("own.py:whole", "own.py:hole"))
    capsys.readouterr()
    assert main(["run", "my.yaml"]) == 2
    assert "\nposttrain: my.yaml:" in capsys.readouterr().err, "the line is named"


def test_two_pieces_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    whole = algorithm_of(f"{tmp_path / 'own.py'}:whole")
    twin = type("Middle", (Shaping,), {"words": lambda self: "r", "__module__": "elsewhere"})  # type: ignore[misc]
    run = recipe("grpo")
    stages = tuple(replace(s, algorithm=patch(whole, "twice", "-", shape=(twin(),))) for s in run.stages)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="two pieces of the run's algorithms are called Middle"):
        own_classes(replace(run, stages=stages))


def test_pieces_of_two_files_are_each_imported_from_their_own(tmp_path: Path) -> None:
    piece = (
        "class {0}(Shaping):\n    def words(self):\n        return 'r'\nOWN = patch(GRPO, '{0}', '-', shape=({0}(),))\n"
    )
    imports = "from posttrain.ladder.algorithm import patch\nfrom posttrain.ladder.policy_rows import GRPO\n"
    imports += "from posttrain.ladder.pieces.shape import Shaping\n"
    for name in ("One", "Two"):
        (tmp_path / f"{name}.py").write_text(imports + piece.format(name))
    run = recipe("grpo")
    run = replace(run, stages=(*run.stages, replace(run.stage("rl"), name="again")))
    words = [f"{stage}.algorithm={tmp_path / name}.py:OWN" for stage, name in (("rl", "One"), ("again", "Two"))]
    _, objects = without_algorithm(words, UserObjects())[1].place(run)
    assert {n.name: Path(n.file).name for n in objects.notes()} == {"One": "One.py", "Two": "Two.py"}
