"""A run that goes on longer is the run it would have been from the beginning; what may change is in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import posttrain
from posttrain.build.request import run_request
from posttrain.build.request.extend import ALLOWED, REFUSED, check_changes, extension
from posttrain.config.overrides import apply
from posttrain.config.placement import Processes, Ray
from posttrain.recipe.recipes import RECIPES, recipe
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.record.external_access import values
from posttrain.record.run_folder import AMENDED, RunFolder
from posttrain.system import files
from posttrain.system.errors import ConfigError, RunFolderError
from tests.engine.run_parts import REWARD, SMALL, mine, model_at

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
    return run_reader.record_digest(folder), last.state["weights"], files.digest(last.folder / "optimizer.safetensors")


def test_a_finished_run_that_goes_on_is_the_longer_run_bit_for_bit(copy: Path, tmp_path: Path) -> None:
    """With an evaluation due at its old end, which a longer run has in its record there."""
    posttrain.run(*WORDS, "rl.steps=7", out=tmp_path / "whole", quiet=True)
    done = posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert digest(copy) == digest(tmp_path / "whole") and not (copy / AMENDED).exists()
    assert [s.steps for s in done.stages] == [2, 7]
    found = run_reader.run_file(copy)
    assert found.run.stage("rl").steps == 7 and not found.edited
    (entry,) = found.facts["history"]
    assert (entry["stage"], entry["step"], entry["changed"]) == ("rl", 4, {"rl.steps": [4, 7]})


def test_a_run_can_go_on_twice_and_from_the_middle(copy: Path, tmp_path: Path) -> None:
    posttrain.run("rl.steps=5", resume=copy, quiet=True)
    posttrain.run("rl.steps=6", "rl.eval_every=3", resume=copy, quiet=True)
    assert [h["step"] for h in run_reader.run_file(copy).facts["history"]] == [4, 5]
    assert [s.index for s in run_reader.steps(copy) if s.stage == "rl"] == [1, 2, 3, 4, 5, 6]
    middle = next(c for c in scan(copy) if c.state["running"])
    posttrain.run("rl.steps=8", resume=middle.folder, quiet=True)
    assert [s.index for s in run_reader.steps(copy) if s.stage == "rl"][-1] == 8


@pytest.mark.parametrize("after", ["amended", "checkpoint"])
def test_a_kill_while_a_run_is_reopened_loses_nothing(copy: Path, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is finished as before, or goes on."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    before = (copy / "steps.jsonl").read_bytes()
    with monkeypatch.context() as m:
        if after == "amended":
            m.setattr("posttrain.record.checkpoint.Checkpoints.replace", killed)
        else:
            m.setattr("posttrain.record.checkpoint.Checkpoints.let_go", killed)
        with pytest.raises(KeyboardInterrupt):
            posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert (copy / AMENDED).exists() and (copy / "steps.jsonl").read_bytes() == before
    book, checkpoint = RunFolder.open_for_resume(copy)
    book.close()
    assert checkpoint is not None and not (copy / AMENDED).exists()
    assert ((copy / "steps.jsonl").read_bytes() == before) == (after == "amended")
    done = posttrain.run("rl.steps=7", resume=copy, quiet=True)
    assert [s.steps for s in done.stages] == [2, 7]


REFUSALS: dict[tuple[str, ...], str] = {
    ("rl.steps=3",): "4 steps are taken already. Give more, or go back to .*checkpoints/[0-9]+-rl-000003 rl.steps=3$",
    ("rl.steps=2",): "4 steps are taken already. Give more, or start a new run: no checkpoint that is left has as few",
    ("sft.steps=9",): "sft is over, and a later stage has begun",
    (
        "rl.optimizer.lr=1e-3",
    ): "rl.optimizer.lr=1e-3 cannot change.*learning rates so far.*(?s:.)*model=.*sft=none rl.optimizer.lr=1e-3",
    ("clip.high=0.3",): "clip.high=0.3 cannot change in a run that goes on: the steps so far",
    ("seed=4",): "seed=4 cannot change",
    ("rl.steps=9", "seed=4"): "seed=4 cannot change.*(?s:.)*model=.*sft=none rl.steps=9 seed=4",
    ("rl.steps=9", "rl.staleness=1"): "rl.staleness=1 cannot change.*(?s:.)*sft=none rl.steps=9 rl.staleness=1",
    ("rl.steps=9", "clip=none"): "clip=none cannot change.*(?s:.)*sft=none rl.steps=9 clip=none",
    ("sft=none",): "goes on with the stages it was begun with",
    ("rl.stepz=4",): "did you mean 'steps'",
}


@pytest.mark.parametrize("words", REFUSALS, ids=" ".join)
def test_what_would_change_the_past_is_refused_with_the_way(copy: Path, words: tuple[str, ...]) -> None:
    before, kept = (copy / "run.json").read_bytes(), [c.name for c in scan(copy)]
    with pytest.raises(ConfigError, match=REFUSALS[words]):
        posttrain.run(*words, resume=copy, quiet=True)
    assert (copy / "run.json").read_bytes() == before and [c.name for c in scan(copy)] == kept


def test_what_is_refused_at_an_earlier_checkpoint_removes_no_later_one(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("a package is missing")

    middle = next(c for c in scan(copy) if c.state["running"])
    before = [c.name for c in scan(copy)]
    with pytest.raises(ConfigError, match="3 steps are taken already. Give more, or start a new run"):
        posttrain.run("rl.steps=1", resume=middle.folder, quiet=True)
    monkeypatch.setattr(run_request, "check_early", refuse)  # what is checked after the folder was opened
    with pytest.raises(ConfigError, match="a package is missing"):
        posttrain.run("rl.steps=3", resume=middle.folder, quiet=True)
    monkeypatch.undo()
    assert [c.name for c in scan(copy)] == before and run_reader.steps(copy)[-1].index == 4
    done = posttrain.run("rl.steps=3", resume=middle.folder, quiet=True)
    assert [s.steps for s in done.stages] == [2, 3]


def test_a_target_that_ended_a_run_has_to_change_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    posttrain.run(*WORDS, "rl.steps=6", "rl.target=0.0", out=folder, quiet=True)
    assert [s.index for s in run_reader.steps(folder)][-1] == 2
    with pytest.raises(ConfigError, match="target 0 reached at step 2: give a higher rl.target too, or none"):
        posttrain.run("rl.steps=8", resume=folder, quiet=True)
    posttrain.run("rl.target=none", resume=folder, quiet=True)
    assert [s.index for s in run_reader.steps(folder)][-1] == 6


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


# --- what it learns from ----------------------------------------------------------------------------------------------

MORE: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "sft": ("sft.steps=2", "sft.batch=4"),
    "dpo": ("sft=none", "env.rewards=none", "dpo.steps=2", "dpo.batch=4"),
    "reward_model": ("reward_model.steps=2", "reward_model.batch=4"),
    "reject": (
        *("env=prompts", "sft=none", "reject.prompts=4", "reject.siblings=2", "reject.batch=4", "reject.steps=2"),
        *("reject.rounds=1", "reject.sampling.max_tokens=4"),
    ),
}
"""Further words of a run of each kind of stage that reads data."""
LONGER = {"grpo": "rl.steps=3", "reject": "reject.rounds=2 reject.steps=4"}
HELPED = "from extend_helper import factor\n" + REWARD.replace("return ", "return factor() * ")


def reads_files(folder: Path, recipe: str) -> tuple[str, ...]:
    """Words of a run that learns from `mine.jsonl`, and of rewards in `mine.py`, which imports a module beside it."""
    words = mine(folder, reward=HELPED)
    (folder / "extend_helper.py").write_text("def factor():\n    return 1.0\n")
    rows = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    if recipe in ("dpo", "reward_model"):
        rows = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": r["answer"] + "9"} for r in rows]
    (folder / "mine.jsonl").write_text("".join(json.dumps({**r, "level": i % 3}) + "\n" for i, r in enumerate(rows)))
    own = [w for w in words[2:] if recipe == "grpo" or not w.startswith("rl.")]
    judged = recipe in ("dpo", "reward_model")
    return (recipe, *[w for w in own if not judged or "env.rewards" not in w], *MORE[recipe])


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


def cut(folder: Path) -> None:
    lines = (folder / "mine.jsonl").read_text().splitlines(keepends=True)
    (folder / "mine.jsonl").write_text("".join(lines[:14]))


INPUTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "column": ("grpo", replaced("mine.jsonl", '"level": 1', '"level": 2'), "env.prompts: .*mine.jsonl was changed"),
    "reward": ("grpo", replaced("mine.py", "return ", "return -"), "env.rewards.0.function: .*mine.py was changed"),
    "module": ("grpo", replaced("extend_helper.py", "1.0", "-1.0"), "extend_helper.py was changed"),
    "deleted": ("grpo", lambda f: (f / "mine.jsonl").unlink(), "env.prompts names .*mine.jsonl, and it is gone"),
    "imitated": ("sft", replaced("mine.jsonl", '"completion": "1', '"completion": "2'), "mine.jsonl was changed"),
    "pairs": ("dpo", cut, "mine.jsonl was changed"),
    "judged": ("reward_model", cut, "mine.jsonl was changed"),
    "kept": ("reject", replaced("mine.py", "return ", "return -"), "mine.py was changed"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_a_run_reads_is_compared_before_it_goes_on(name: str, tmp_path: Path) -> None:
    """Refused with the file's name, and nothing in the folder is changed; put back, it goes on without a word."""
    recipe, change, says = INPUTS[name]
    posttrain.run(*reads_files(tmp_path, recipe), out=tmp_path / "run", quiet=True)
    saved = {n: (tmp_path / n).read_bytes() for n in ("mine.jsonl", "mine.py", "extend_helper.py")}
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    change(tmp_path)
    longer = LONGER.get(recipe, f"{recipe}.steps=3").split()
    with pytest.raises(RunFolderError, match=says):
        posttrain.run(*longer, resume=tmp_path / "run", quiet=True)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    for file, data in saved.items():
        (tmp_path / file).write_bytes(data)
    posttrain.run(*longer, resume=tmp_path / "run", quiet=True)
    assert "inputs" not in run_reader.run_file(tmp_path / "run").facts["history"][-1]


def test_an_accepted_change_is_recorded_and_then_compared_with(tmp_path: Path) -> None:
    posttrain.run(*reads_files(tmp_path, "grpo"), out=tmp_path / "run", quiet=True)
    replaced("mine.jsonl", '"level": 1', '"level": 2')(tmp_path)
    posttrain.run("rl.steps=3", resume=tmp_path / "run", accept_changed=True, quiet=True)
    (entry,) = run_reader.run_file(tmp_path / "run").facts["history"]
    assert entry["inputs"].keys() == {"env.prompts", "tasks of rl"} and entry["step"] == 2
    posttrain.run("rl.steps=4", resume=tmp_path / "run", quiet=True)
    cut(tmp_path)
    with pytest.raises(RunFolderError, match="env.prompts: .*mine.jsonl was changed"):
        posttrain.run("rl.steps=5", resume=tmp_path / "run", quiet=True)


def test_models_that_a_run_reads_are_compared(tmp_path: Path) -> None:
    """The policy's own, a reference, and a reward model that went on meanwhile."""
    model, rm = model_at(tmp_path / "model"), tmp_path / "rm"
    (tmp_path / "data").mkdir()
    data = [w for w in reads_files(tmp_path / "data", "reward_model") if not w.startswith("model.")]
    posttrain.run(*data, f"model={model}", out=rm, quiet=True)
    words = [w for w in reads_files(tmp_path, "grpo") if "rewards" not in w and not w.startswith("model.")]
    more = (f"model={model}", f"rl.reference={model}", "rl.algorithm.pull.coef=0.1", f"env.rewards=model:{rm}")
    posttrain.run(*words, *more, out=tmp_path / "run", quiet=True)
    (model / "README.md").write_text("not read by a model")
    posttrain.run("rl.steps=3", resume=tmp_path / "run", quiet=True)
    held = (model / "config.json").read_text()
    (model / "config.json").write_text(held.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    with pytest.raises(RunFolderError, match=r"model.path: .*config.json was changed \(and 1 more\)"):
        posttrain.run("rl.steps=4", resume=tmp_path / "run", quiet=True)
    (model / "config.json").write_text(held)
    posttrain.run("reward_model.steps=3", resume=rm, quiet=True)
    with pytest.raises(RunFolderError, match=r"env.rewards.0.function: .*rm was changed"):
        posttrain.run("rl.steps=4", resume=tmp_path / "run", quiet=True)


def test_a_folder_of_an_older_version_goes_on_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    posttrain.run(*reads_files(tmp_path, "grpo"), out=tmp_path / "run", quiet=True)
    data = json.loads((tmp_path / "run" / "run.json").read_text())
    del data["began_with"]["inputs"]
    data["digests"] = run_reader.digests({k: v for k, v in data.items() if k != "digests"})
    (tmp_path / "run" / "run.json").write_text(json.dumps(data))
    replaced("mine.jsonl", '"level": 1', '"level": 2')(tmp_path)
    posttrain.run("rl.steps=3", resume=tmp_path / "run")
    assert "has no digests of the files that it reads" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("ended", "word"), [("all 2 rounds", "reject.rounds=4"), ("waited", "reject.patience=9")])
def test_what_ended_a_stage_can_be_all_that_changes(ended: str, word: str) -> None:
    old = apply(recipe("reject"), ["reject.rounds=2", "reject.patience=2", "reject.eval_every=1"])
    done = {"stage": len(old.stages) - 1, "running": {"step": 5, "ended": ended, "waited": 2}}
    state = {"stage": len(old.stages), "reopening": {"progress": done, "gauges": {}}}
    book: Any = SimpleNamespace(folder=Path("runs/mine"), run=old)
    found = extension(book, cast("Any", SimpleNamespace(folder=book.folder, state=state)), apply(old, [word]))
    assert found.state is not None and found.state["running"] == {"step": 5, "ended": "", "waited": 0}
