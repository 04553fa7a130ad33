"""A run folder from somebody else: what it names beyond itself is a proposal, whatever command it is given to."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import http.server
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.build.request.run_file import to_yaml
from posttrain.cli import main
from posttrain.config.engines import VLLM, Embedded
from posttrain.config.env import Reward, SandboxSettings
from posttrain.config.placement import Processes, Ray
from posttrain.config.run import Env, Model, Run
from posttrain.config.stages.stage import Stage
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.link import PreferencePiece
from posttrain.ladder.pieces.piece import Piece
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.recipe.recipes import RECIPES
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record import provenance, run_reader
from posttrain.record.checkpoint import find
from posttrain.record.external_access import DECIDED, HARMLESS, Kind, asks, decided, key, values
from posttrain.role.weights.saved_weights import PLACES, WEIGHTS, SavedTensors, part_name
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, RunFolderError, UntrustedError
from posttrain.system.subclass_registry import alternatives
from tests.engine.run_parts import RL, SMALL, model_at, play

PIECES = (Piece, PreferencePiece)
MINE = ("arithmetic", "sft=none", *SMALL, *RL, "env.heldout=8")
CODE = (
    "from pathlib import Path\nPath({mark!r}).write_text('ran')\ndef reward(task, text):\n    return float(len(text) %"
    " 3)\n"
)
WAYS: dict[str, Callable[[Path], list[str]]] = {
    "resume": lambda run: ["run", "--resume", str(run)],
    "eval": lambda run: ["eval", str(run), "--samples", "1"],
    "check": lambda run: ["check", str(run), "--tasks", "2"],
    "ladder": lambda run: ["ladder", "--on", str(run), "--against", "rloo"],
    "serve": lambda run: ["serve", str(run), "--port", "0"],
}
"""The commands that build something from a run folder."""


# --- every field is decided -------------------------------------------------------------------------------------------


def fields(cls: type, seen: set[type]) -> Iterator[tuple[type, str, Any]]:
    """(class, field, declared type) of all dataclasses that the tree of a run can hold."""
    if cls in seen:
        return
    seen.add(cls)
    for name, declared in dataclass_json.hints(cls).items():
        yield cls, name, declared
        for part in parts(declared):
            yield from fields(part, seen)


def parts(declared: Any) -> Iterator[type]:
    yield from dataclass_json.pieces(declared).values()
    inner = (
        dataclass_json.tuple_item(declared),
        dataclass_json.mapping_item(declared),
        *(dataclass_json.fixed_items(declared) or ()),
    )
    for x in inner:
        if x is not None:
            yield from parts(x)


def leaves(declared: Any) -> set[Any]:
    """The scalar types a field can hold, through lists, pairs and mappings; a choice of words counts as text."""
    out: set[Any] = {str} if dataclass_json.choices(declared) else set()
    for m in dataclass_json.members(declared):
        inner = [
            x
            for x in (
                dataclass_json.tuple_item(m),
                dataclass_json.mapping_item(m),
                *(dataclass_json.fixed_items(m) or ()),
            )
            if x is not None
        ]
        out |= set().union(*map(leaves, inner)) if inner else {m} if m in (str, bool, int, float, type(None)) else set()
        assert (
            inner
            or m in (str, bool, int, float, type(None))
            or dataclass_json.choices(m)
            or dataclasses.is_dataclass(m)
        ), f"unknown type {m}"
    return out


def test_every_field_of_the_tree_is_decided() -> None:
    texts = [(cls, name) for cls, name, declared in fields(Run, set()) if leaves(declared) & {str, bool}]
    assert not [key(cls, name) for cls, name in texts if decided(cls, name) is None], (
        "decide in record/external_access.py what these name: code, an address, a secret, a place outside, or nothing"
    )
    named = {key(cls, name) for cls, name in texts}
    assert not (DECIDED.keys() | HARMLESS) - named, "record/external_access.py decides fields that are gone"
    assert not DECIDED.keys() & HARMLESS
    assert not HARMLESS & {key(cls, name) for cls, name in texts if issubclass(cls, PIECES)}, (
        "a piece's fields are decided for all at once"
    )
    for kind in alternatives(Stage):
        assert {*kind.harmless, *kind.models} <= dataclass_json.hints(kind).keys() - dataclass_json.hints(
            Stage
        ).keys(), "a kind decides its own fields"
        assert not {*kind.harmless} & {*kind.models}


def test_pieces_hold_numbers_words_and_switches_alone() -> None:
    """Why a piece's field needs no decision of its own: it names nothing that could be opened, run or asked."""
    for cls, name, declared in (*fields(Algorithm, set()), *fields(PreferenceAlgorithm, set())):
        if issubclass(cls, PIECES):
            assert (
                leaves(declared)
                and not dataclass_json.pieces(declared)
                and dataclass_json.mapping_item(declared) is None
            ), f"{cls.__name__}.{name}"


def test_a_new_field_would_be_found() -> None:
    @dataclasses.dataclass(frozen=True)
    class Hook:
        command: tuple[str, ...] = ()
        tries: int = 3

    found = [(cls, name) for cls, name, declared in fields(Hook, set()) if leaves(declared) & {str, bool}]
    assert found == [(Hook, "command")] and decided(Hook, "command") is None


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_shipped_recipes_ask_for_nothing(name: str) -> None:
    assert asks(shipped(name)) == ()


def rl(run: Run, **changes: Any) -> Run:
    return replace(run, stages=(run.stages[0], replace(run.stages[1], **changes)))


ASKING: dict[str, tuple[Kind, Callable[[Run], Run]]] = {
    "model.path": (Kind.OUTSIDE, lambda r: replace(r, model=Model(path="some/model"))),
    "model.trust_remote_code": (Kind.CODE, lambda r: replace(r, model=Model(trust_remote_code=True))),
    "env.name": (Kind.CODE, lambda r: replace(r, env=Env(name="mine.py:Mine"))),
    "env.args.url": (Kind.CODE, lambda r: replace(r, env=Env(name="verifiers:theirs", args={"url": "http://there"}))),
    "env.prompts": (
        Kind.OUTSIDE,
        lambda r: replace(r, env=Env(name="prompts", prompts="/etc/passwd", rewards=(Reward(function="math"),))),
    ),
    "env.rewards.1.function": (
        Kind.CODE,
        lambda r: replace(r, env=Env(rewards=(Reward(function="exact"), Reward(function="f.py:f")))),
    ),
    "env.sandbox.name": (Kind.ADDRESS, lambda r: replace(r, env=Env(sandbox=SandboxSettings(name="http://there")))),
    "env.sandbox.token": (Kind.SECRET, lambda r: replace(r, env=Env(sandbox=SandboxSettings(token="HF_TOKEN")))),
    "rl.env.args.url": (Kind.CODE, lambda r: rl(r, env=Env(name="verifiers:theirs", args={"url": "http://there"}))),
    "rl.reference": (Kind.OUTSIDE, lambda r: rl(r, reference="some/model")),
    "engine.url": (Kind.ADDRESS, lambda r: replace(r, engine=VLLM(url="http://there"))),
    "engine.key_env": (Kind.SECRET, lambda r: replace(r, engine=VLLM(url="https://there", key_env="HF_TOKEN"))),
    "engine.share": (Kind.OUTSIDE, lambda r: replace(r, engine=VLLM(server=True, share="/home"))),
    "engine.draft": (Kind.OUTSIDE, lambda r: replace(r, engine=Embedded(draft="small"))),
    "placement.transport": (Kind.ADDRESS, lambda r: replace(r, placement=Processes(transport="collective"))),
    "placement.folder": (Kind.OUTSIDE, lambda r: replace(r, placement=Processes(transport="file", folder="/there"))),
    "placement.address": (Kind.ADDRESS, lambda r: replace(r, placement=Ray(address="10.0.0.7:6379"))),
    "trackers": (Kind.ADDRESS, lambda r: replace(r, trackers=("tensorboard", "wandb"))),
}


@pytest.mark.parametrize("path", ASKING)
def test_what_each_field_asks_for(path: str) -> None:
    kind, change = ASKING[path]
    found = {a.path: a.kind for a in asks(change(shipped("arithmetic")))}
    assert found.get(path) == kind


def test_a_sandbox_that_contains_nothing_is_asked_for_and_named_ones_are_not() -> None:
    def wanted(name: str) -> list[Kind]:
        return [
            a.kind
            for a in asks(replace(shipped("programs"), env=Env(name="programs", sandbox=SandboxSettings(name=name))))
        ]

    assert [wanted(n) for n in ("none", "auto", "landlock")] == [[Kind.CODE], [], []]


def test_paths_are_those_that_overrides_use() -> None:
    known = values(shipped("ladder"))
    assert {"rl.reference", "pretrain.style", "env.sandbox.token", "engine.draft", "model.path"} <= known.keys()


# --- every way in -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that asks for nothing; tests copy it and write what they like into its run.json."""
    return play(tmp_path_factory.mktemp("made") / "run", *MINE)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without notes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write run.json anew, digests included, as somebody would who means ill."""
    path = folder / "run.json"
    data = json.loads(path.read_text())
    change(data["run"])
    path.write_text(json.dumps({**data, "digests": run_reader.digests(data)}))
    return folder


def copied(made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None] = lambda run: None) -> Path:
    return edit(Path(shutil.copytree(made, tmp_path / "theirs")), change)


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """An address on this machine, and what was sent to it."""
    got: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_error(500)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", got
    server.shutdown()
    server.server_close()
    thread.join()


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert main(words) == 5
    said = capsys.readouterr().err
    assert "Traceback" not in said and "--trust" in said
    return said


@pytest.mark.parametrize("way", ["resume", "eval", "check"])
@pytest.mark.parametrize("what", ["reward", "environment", "verifiers", "address"])
def test_nothing_is_run_and_nothing_is_sent(
    what: str,
    way: str,
    made: Path,
    tmp_path: Path,
    elsewhere: Path,
    listener: tuple[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code of the folder's choice, and an environment variable of its choice to an address of its choice."""
    address, got = listener
    mark, evil = tmp_path / "mark", tmp_path / "evil.py"
    evil.write_text(CODE.format(mark=str(mark)))
    monkeypatch.setenv("MY_SECRET_KEY", "a very secret value")

    def change(run: dict[str, Any]) -> None:
        env = run["env"]
        if what == "reward":
            env["rewards"] = [{"function": f"{evil}:reward"}]
        elif what == "environment":
            env["name"], env["args"] = f"{evil}:Evil", {}
        elif what == "verifiers":
            env["name"], env["args"] = f"verifiers:{evil}", {}
        else:
            env["name"], env["args"], env["sandbox"] = "programs", {}, {"name": address, "token": "MY_SECRET_KEY"}

    said = refused(capsys, WAYS[way](copied(made, tmp_path, change)))
    assert not mark.exists() and not got
    if what == "address":
        assert f"address  env.sandbox.name: sends programs, and the token of the sandbox, to {address}" in said
        assert "secret   env.sandbox.token: sends the value of the environment variable MY_SECRET_KEY" in said
        assert "a very secret value" not in said
    else:
        assert (
            f"  code     env.{'rewards.0.function' if what == 'reward' else 'name'}: runs " in said
            and str(evil) in said
        )


@pytest.mark.parametrize("way", ["resume", "eval", "serve", "ladder"])
def test_models_elsewhere_and_their_code_are_proposals(
    way: str, made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_at(tmp_path / "model")

    def change(run: dict[str, Any]) -> None:
        run["model"] |= {"path": str(model), "trust_remote_code": True}

    said = refused(capsys, WAYS[way](copied(made, tmp_path, change)))
    assert f"  outside  model.path: loads the model in {model}" in said
    assert "  code     model.trust_remote_code: runs the Python code that comes with the model" in said


@pytest.mark.parametrize("way", ["resume", "eval"])
def test_an_engine_elsewhere_is_a_proposal(
    way: str,
    made: Path,
    tmp_path: Path,
    elsewhere: Path,
    listener: tuple[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, got = listener
    engine = dataclass_json.to_plain(replace(shipped("arithmetic"), engine=VLLM(url=address, key_env="PATH")))["engine"]
    said = refused(capsys, WAYS[way](copied(made, tmp_path, lambda run: run.update(engine=engine))))
    assert (
        not got
        and "engine.url" in said
        and "secret   engine.key_env: sends the value of the environment variable PATH" in said
    )


def a_file(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A run as YAML, as somebody else changed it."""
    data = yaml.safe_load(to_yaml(shipped("programs")))
    change(data)
    (folder / "my.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "my.yaml")


@pytest.mark.parametrize("what", ["executor", "executor, own token", "executor of a stage", "engine", "model's code"])
def test_a_file_of_a_run_sends_no_secret_and_fetches_no_code_unasked(
    what: str,
    tmp_path: Path,
    listener: tuple[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only --trust, or the same words on the command line, let it."""
    address, got = listener
    for name in ("MY_KEY", SandboxSettings().token):
        monkeypatch.setenv(name, "a very secret value")
    box = {"name": address} | ({} if "own" in what else {"token": "MY_KEY"})
    at = "rl.env" if "stage" in what else "env"

    def change(run: dict[str, Any]) -> None:
        if what == "engine":
            run["engine"] = {"type": "VLLM", "url": address, "key_env": "MY_KEY"}
        elif what == "model's code":
            run["model"] |= {"path": "some/model", "trust_remote_code": True}
        elif at == "env":
            run["env"]["sandbox"] = box
        else:
            run["stages"]["rl"]["env"] = {"type": "Env", **copy.deepcopy(run["env"]), "sandbox": box}

    file = a_file(tmp_path, change)
    said = refused(capsys, ["run", file])
    assert not got and said.count(f"{file} asks for this") == 2
    if what == "model's code":
        assert "  code     model.trust_remote_code: runs the Python code that comes with the model" in said
    elif what == "engine":
        assert "  secret   engine.key_env: sends the value of the environment variable MY_KEY" in said
    else:
        words = [f"{at}.sandbox.{name}={value}" for name, value in box.items()]
        assert ("MY_KEY" in said) == ("token" in box)
        if "token" in box:
            refused(capsys, ["run", file, words[0]])
        assert not got
        assert main(["run", file, *words, "--out", str(tmp_path / "out")]) != 5
        assert got[0] == "/v1/about Bearer a very secret value"
        assert main(["run", file, "--trust", "--out", str(tmp_path / "out")]) != 5
        assert "Traceback" not in capsys.readouterr().err


def test_what_a_file_of_a_run_names_is_listed_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("raise ValueError('it ran')\n")
    for change, named in (
        (lambda run: run["stages"]["rl"].update(algorithm=f"{tmp_path}/own.py:mine"), "code     algorithm: runs mine"),
        (lambda run: run["env"].update(rewards=[{"function": f"{tmp_path}/own.py:r"}]), "code     env.rewards.0.func"),
    ):
        assert main(["run", a_file(tmp_path, change), "--dry-run"]) != 0
        said = capsys.readouterr().err
        assert said.index(named) < said.index("it ran")


def test_trackers_post_under_nobodys_account(
    made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, WAYS["resume"](copied(made, tmp_path, lambda run: run.update(trackers=["wandb"]))))
    assert "trackers: sends settings and numbers to Weights & Biases, under your account" in said


def test_from_python_too(made: Path, tmp_path: Path, elsewhere: Path) -> None:
    theirs = copied(made, tmp_path, lambda run: run["env"].update(rewards=[{"function": f"{tmp_path}/f.py:f"}]))
    for call in (
        lambda: posttrain.run(resume=theirs),
        lambda: posttrain.run(resume=find(theirs).folder),
        lambda: posttrain.evaluate(theirs),
        lambda: posttrain.check(theirs),
    ):
        with pytest.raises(UntrustedError, match="f of the Python file"):
            call()
    with pytest.raises(ConfigError, match="--resume RUN"):
        posttrain.run("arithmetic", trust=True)


def test_what_only_reads_needs_no_trust(
    made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`export`, `show`, and the ladder and server of a model that was built: they make nothing of what the environment
    names."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(CODE.format(mark=str(mark)))

    def change(run: dict[str, Any]) -> None:
        run["env"] |= {
            "name": f"{tmp_path}/evil.py:Evil",
            "args": {},
            "rewards": [{"function": f"{tmp_path}/evil.py:reward"}],
        }
        run["trackers"] = ["wandb"]

    theirs = copied(made, tmp_path, change)
    assert main(["show", str(theirs)]) == 0
    assert main(["export", str(theirs), str(tmp_path / "out")]) == 0
    assert main(["ladder", "--on", str(theirs), "--against", "rloo"]) == 0
    from posttrain.serve.command import make_served

    make_served(theirs, token=None)
    assert not mark.exists() and not capsys.readouterr().err.startswith("posttrain:")


def test_export_writes_what_the_run_learned(made: Path, tmp_path: Path) -> None:
    """From the folder alone, also where the model the run began with is gone; its generation config goes along."""
    base = model_at(tmp_path / "base")
    settings = json.loads((base / "generation_config.json").read_text()) | {"do_sample": True, "temperature": 0.7}
    (base / "generation_config.json").write_text(json.dumps(settings))
    words = json.loads((base / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    (base / "tokenizer.json").write_text(json.dumps(words | {"truncation": cut}))
    run = play(
        tmp_path / "run",
        "verifiable",
        "sft=none",
        *(w for w in SMALL if not w.startswith("model.")),
        *RL,
        f"model={base}",
        *prompts(tmp_path),
    )
    shutil.rmtree(base)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    learned, written = load_file(find(run).folder / WEIGHTS), load_file(tmp_path / "out" / "model.safetensors")
    same = [
        n for n in written if n in learned and np.array_equal(learned[n].float().numpy(), written[n].float().numpy())
    ]
    assert same and len(same) == len(written)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7


def prompts(folder: Path) -> tuple[str, ...]:
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "say {a}: ", "answer": "{a}"}}\n' for a in range(20)))
    (folder / "r.py").write_text("def reward(task, text):\n    return float(sum(map(ord, text)) % 7)\n")
    return (f"env.prompts={folder / 'p.jsonl'}", f"env.rewards={folder / 'r.py'}:reward", "env.heldout=2")


def test_trust_lists_what_it_allows_and_does_it(
    made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "r.py").write_text(CODE.format(mark=str(mark)))
    theirs = copied(made, tmp_path, lambda run: run["env"].update(rewards=[{"function": f"{tmp_path}/r.py:reward"}]))
    assert main([*WAYS["eval"](theirs), "--trust"]) == 0
    said = capsys.readouterr()
    assert (
        mark.exists()
        and f"  code     env.rewards.0.function: runs reward of the Python file {tmp_path}/r.py" in said.err
    )
    refused(capsys, WAYS["eval"](theirs))  # it was said for one command


def test_a_value_that_the_user_gives_is_no_proposal(
    made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither where it takes the place of one, nor where there was none; what the folder says beside it still is."""
    (tmp_path / "mine.py").write_text("def reward(task, text):\n    return 1.0\n")
    theirs = copied(
        made,
        tmp_path,
        lambda run: run["env"].update(rewards=[{"function": f"{tmp_path}/evil.py:f"}], sandbox={"token": "HF_TOKEN"}),
    )
    said = refused(capsys, [*WAYS["eval"](theirs), f"env.rewards={tmp_path}/mine.py:reward"])
    assert "rewards" not in said and "env.sandbox.token" in said
    mine = (f"env.rewards={tmp_path}/mine.py:reward", "env.sandbox.token=MINE")
    assert main([*WAYS["eval"](theirs), *mine]) == 0


# --- the maker's note -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this user's that asks for code and data, cut after its first step."""
    folder = tmp_path_factory.mktemp("own")
    words = tuple(w for w in RL if not w.startswith("rl.steps"))
    return play(folder / "run", "verifiable", "sft=none", *SMALL, *words, "rl.steps=1", *prompts(folder))


def more_steps(folder: Path, steps: int) -> Path:
    return edit(folder, lambda run: run["stages"][0].update(steps=steps))


@pytest.mark.prove
def test_a_run_of_ones_own_goes_on_when_copied_moved_and_edited(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Path(shutil.copytree(own, tmp_path / "copy")).rename(tmp_path / "moved")
    assert main(["run", "--resume", str(moved)]) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    data = json.loads((moved / "run.json").read_text())
    data["run"]["seed"] = 5
    (moved / "run.json").write_text(json.dumps(data))
    assert main(["run", "--resume", str(moved)]) == 0
    assert "run.json was edited since the run was made: run.seed." in capsys.readouterr().out
    more_steps(moved, 2)  # with digests written anew
    assert main(["run", "--resume", str(moved)]) == 0
    assert "run.json is not as it was when you made the run" in capsys.readouterr().out


def test_an_edited_run_is_not_trusted_with_more(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = edit(
        Path(shutil.copytree(own, tmp_path / "r")), lambda run: run["env"].update(sandbox={"token": "HF_TOKEN"})
    )
    said = refused(capsys, WAYS["resume"](theirs))
    assert "asks for more than when you made it" in said and "HF_TOKEN" in said and "r.py" not in said


def test_the_same_name_in_another_folder_is_another_file(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    relative = edit(Path(shutil.copytree(own, tmp_path / "r")), lambda run: run["env"].update(prompts="p.jsonl"))
    wanted = {a.path: a.digest for a in asks(run_reader.run_file(relative).run)}
    assert wanted["env.prompts"] in provenance.recall(run_reader.run_file(own).identity).asked  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path)
    assert {a.path: a.digest for a in asks(run_reader.run_file(relative).run)}["env.prompts"] != wanted["env.prompts"]


def test_another_user_has_another_note(own: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "was not made by you on this machine" in refused(capsys, WAYS["eval"](own))


def test_a_note_that_others_can_write_says_nothing(own: Path, elsewhere: Path, notes_of_runs: Path) -> None:
    identity = str(run_reader.run_file(own).identity)
    shutil.copytree(notes_of_runs / "posttrain", elsewhere / "posttrain")
    note = elsewhere / "posttrain" / "runs" / f"{identity}.json"
    assert provenance.recall(identity) is not None and (
        note.stat().st_mode & 0o777,
        note.parent.stat().st_mode & 0o777,
    ) == (0o600, 0o700)
    for path in (note, note.parent):
        before = path.stat().st_mode
        path.chmod(0o777)
        assert provenance.recall(identity) is None
        path.chmod(before)
    note.rename(note.with_name("kept"))
    note.symlink_to("kept")
    assert provenance.recall(identity) is None
    assert provenance.recall("../../x") is None and provenance.recall(None) is None and provenance.recall(["a"]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_note_of_somebody_else_says_nothing(own: Path, elsewhere: Path, notes_of_runs: Path) -> None:
    identity = str(run_reader.run_file(own).identity)
    shutil.copytree(notes_of_runs / "posttrain", elsewhere / "posttrain")
    os.chown(elsewhere / "posttrain" / "runs" / f"{identity}.json", 12345, -1)
    assert provenance.recall(identity) is None


@pytest.mark.prove
def test_a_run_whose_note_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    play(tmp_path / "run", "verifiable", "sft=none", *SMALL, *RL, *prompts(tmp_path))
    assert "note: going on with this run will need --trust" in capsys.readouterr().out


# --- what else lies in a folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "steps.jsonl", "episodes", "checkpoints", "kept", "timeline.json"])
def test_a_link_in_a_folder_is_followed_by_nobody_who_writes(
    name: str, made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link in the place of what a resumed run cuts, locks or removes would be a way to every file of the user's."""
    theirs, victim = copied(made, tmp_path), tmp_path / "victim"
    inside = theirs / name
    if name in ("episodes", "checkpoints", "kept"):
        inside.rename(victim)
        (victim / "mine.npz").write_text("mine")
    else:
        victim.write_text("mine")
        inside.unlink(missing_ok=True)
    inside.symlink_to(victim)
    before = {p: p.read_bytes() for p in sorted([victim, *victim.rglob("*")]) if p.is_file()}
    said = refused(capsys, WAYS["resume"](theirs))
    assert f"  outside  {name}: is a link, and what is written there goes to {victim}" in said
    assert {p: p.read_bytes() for p in sorted([victim, *victim.rglob("*")]) if p.is_file()} == before


@pytest.mark.parametrize("name", ["../../out", "/tmp/x", "a/b", "", ".hidden", "a\x1b[2Jb", "x" * 65])
def test_a_stage_is_named_by_a_plain_word(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the run are named by it."""
    theirs = copied(made, tmp_path, lambda run: run["stages"][0].update(name=name))
    assert main(["show", str(theirs)]) == 5
    assert "stage name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"file": "../../secret.npz"}, {"file": "/etc/passwd"}, {"kind": "../x"}, {"stage": "../rl"}, {"index": "1"}],
)
def test_an_index_names_episode_files_of_the_run_alone(
    change: dict[str, Any], made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = copied(made, tmp_path)
    index = theirs / "episodes" / "index.jsonl"
    row = json.loads(index.read_text().splitlines()[0]) | change
    index.write_text(json.dumps(row) + "\n")
    assert main(["show", str(theirs)]) == 5
    assert "index.jsonl:1" in capsys.readouterr().err


def test_a_missing_episode_file_is_told(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = more_steps(Path(shutil.copytree(own, tmp_path / "r")), 2)
    first = run_reader.episode_files(folder)[0]
    first.path.unlink()
    assert [row.path for row in run_reader.missing_episodes(folder)] == [first.path]
    kind = ["--eval"] if first.kind == "eval" else []
    assert main(["show", str(folder), "--step", str(first.index), *kind]) == 5
    assert f"{first.path} is missing" in capsys.readouterr().err
    with pytest.raises(RunFolderError, match="is missing"):
        run_reader.record_digest(folder)
    assert main(["run", "--resume", str(folder)]) == 0
    assert f"note: 1 episode file is missing from {folder / 'episodes'}: {first.path.name}" in capsys.readouterr().out


def test_code_in_the_tokenizer_and_the_configuration_is_not_run(made: Path, tmp_path: Path, elsewhere: Path) -> None:
    """`auto_map` names classes in files beside it; nothing imports them."""
    theirs, mark = copied(made, tmp_path), tmp_path / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).write_text('ran')\n"
    for folder, file, module in (("tokenizer", "tokenizer_config.json", "words"), ("model", "config.json", "net")):
        path = theirs / folder / file
        names = {"AutoTokenizer": ["words.W", "words.W"], "AutoConfig": "net.C", "AutoModelForCausalLM": "net.M"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names}))
        (theirs / folder / f"{module}.py").write_text(code)
    assert main(["show", str(theirs), "--episode", "0"]) == 0
    main(["export", str(theirs), str(tmp_path / "out")])
    main(["ladder", "--on", str(theirs), "--against", "rloo"])
    main(WAYS["eval"](theirs))
    assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [{"model_type": "mystery"}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}],
)
def test_export_of_a_model_with_code_of_its_own_asks_first(
    change: dict[str, Any], made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the folder is not enough, the model it began with is a proposal like every other; a model that was built
    has no other."""
    theirs, mark = copied(made, tmp_path), tmp_path / "mark"
    path, model = theirs / "model" / "config.json", model_at(tmp_path / "model")
    (model / "net.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).write_text('ran')\n")
    own = json.loads((model / "config.json").read_text()) | {
        "model_type": "mystery",
        "auto_map": {"AutoConfig": "net.C"},
    }
    (model / "config.json").write_text(json.dumps(own))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (path.parent / "digests.json").unlink()  # whoever writes the files can write their digests
    words = ["export", str(theirs), str(tmp_path / "out")]
    assert main(words) == 4
    assert "no model can be made of its config.json alone" in capsys.readouterr().err
    edit(theirs, lambda run: run["model"].update(path=str(model), trust_remote_code=True))
    said = refused(capsys, words)
    assert (
        "no model can be made of its config.json alone" in said
        and "runs the Python code that comes with the model" in said
    )
    assert not mark.exists()
    with contextlib.suppress(AttributeError):  # its code is not finished
        main([*words, "--trust"])
    assert mark.exists()


@pytest.mark.parametrize("way", ["resume", "ladder"])
def test_a_reference_elsewhere_is_a_proposal(
    way: str, made: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(run: dict[str, Any]) -> None:
        run["stages"][0]["reference"] = str(tmp_path)

    assert f"  outside  rl.reference: loads the model in {tmp_path}" in refused(
        capsys, WAYS[way](copied(made, tmp_path, change))
    )


def test_another_tokenizer_in_the_folder_is_found(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = copied(made, tmp_path)
    path = theirs / "tokenizer" / "tokenizer.json"
    data = json.loads(path.read_text())
    words = data["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    path.write_text(json.dumps(data))
    (path.parent / "digests.json").unlink()  # whoever writes the files can write their digests
    for words in (["export", str(theirs), str(tmp_path / "out")], WAYS["ladder"](theirs), WAYS["serve"](theirs)):
        assert main(words) == 5
        assert "is not the tokenizer the run was made with" in capsys.readouterr().err


@pytest.mark.parametrize("place", [[["a"], [0]], [[10**15], [0]], [[4], [-1]], [[4, 1], [0, 0]], [[4], [0.5]]])
def test_weights_in_parts_that_do_not_fit_are_damaged(tmp_path: Path, place: list[object]) -> None:
    """Where the parts say that they lie is somebody else's text."""
    for rank in range(2):
        metadata = {PLACES: json.dumps({"w": place})}
        save_file({"w": torch.zeros(2)}, part_name(tmp_path / WEIGHTS, rank, 2), metadata)
    with pytest.raises(RunFolderError, match="is damaged"):
        SavedTensors(tmp_path / WEIGHTS).whole()
