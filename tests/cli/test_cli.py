"""The command line: starts at once, says what is wrong in one line, ends with the documented code, and is readable."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain.build.request.run_request import RunOptions
from posttrain.cli import main
from posttrain.cli.ladder_tables import diff, one
from posttrain.cli.parser import COMMANDS, split_overrides
from posttrain.evaluation.evaluate_endpoint import EndpointOptions
from posttrain.ladder.algorithm import CHOICES, Algorithm
from posttrain.ladder.formula import formula, formulas
from posttrain.ladder.policy_rows import LADDER
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.recipe.recipes import RECIPES
from posttrain.system import dataclass_json as tree
from posttrain.system import shell
from posttrain.system.errors import ConfigError, DataError, RewardError

PYTHON = (sys.executable, "-m", "posttrain.cli")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["ladder"],
        ["ladder", "grpo"],
        ["ladder", "--table"],
        ["ladder", "--diff", "grpo", "dapo"],
        ["ladder", "simpo"],
        ["ladder", "--diff", "dpo", "simpo"],
        ["run", "ladder", "--help"],
    ],
)
def test_light_commands_import_no_torch(words: list[str]) -> None:
    code = f"""
import sys, time
begun = time.process_time()
from posttrain.cli import main
from posttrain.cli.ladder_tables import diff, one
try: main({words!r})
except SystemExit: pass
print(sorted(m for m in sys.modules if m in ("torch", "transformers", "tokenizers", "safetensors", "rich") or m == \
"numpy" and {"run" not in words}), time.process_time() - begun, file=sys.stderr)
"""
    done = python(code)
    modules, seconds = done.stderr.rsplit(" ", 1)
    assert modules == "[]", modules
    assert float(seconds) < 3.0 and len(done.stdout) > 150


def test_one_function_writes_the_tables_of_all_commands() -> None:
    package = Path(posttrain.__file__).parent
    made = {
        str(p.relative_to(package)) for p in package.rglob("*.py") if re.search(r"(?<![.\w])Table\(", p.read_text())
    }
    assert {p for p in made if not p.startswith("lab/")} == {"report/console.py"}


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2].removesuffix("_command") for c in COMMANDS])
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = {"evaluate": "eval"}.get(command, command)
    try:
        code = main([command, "--help"])
    except SystemExit as done:
        code = done.code
    text = capsys.readouterr().out
    assert code == 0 and f"posttrain {command}" in text and "example:" in text and "exit codes:" in text
    assert max(map(len, text.splitlines())) <= 80 and not re.search(r"\b[A-E]\d\d\b", text)


def test_help_of_a_recipe_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ladder", "rl.steps=7", "--help"]) == 0
    text = capsys.readouterr().out
    assert "rl.steps = 7 " in text and "rl.algorithm = dr_grpo" in text and "reinforce_ema" not in text


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_a_recipe_keep_to_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a path of the machine may be longer than a line."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run", name, "--help"]) == 0
    assert not [x for x in capsys.readouterr().out.splitlines() if len(x) > 80 and "/" not in x]


# --- words ------------------------------------------------------------------------------------------------------------


def test_overrides_stand_anywhere() -> None:
    assert split_overrides(["run", "ladder", "a=1", "--out", "x", "b.c=2"]) == (
        ["run", "ladder", "--out", "x"],
        ["a=1", "b.c=2"],
    )
    assert split_overrides(["run", "--out", "a=b", "ladder"]) == (["run", "--out", "a=b", "ladder"], [])
    assert split_overrides(["show", "a=b"]) == (["show", "a=b"], [])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions behind the commands, replaced by ones that remember their arguments."""
    calls: dict[str, Any] = {}

    def remember(name: str) -> Any:
        return lambda *a, **k: calls.__setitem__(name, (a, k)) or "somewhere"

    async def play() -> None:
        calls["played"] = True

    @contextmanager
    def requested(*a: Any) -> Iterator[str]:
        calls["run"] = a
        yield "request"

    @contextmanager
    def open_session(request: str) -> Iterator[SimpleNamespace]:
        assert request == "request"
        yield SimpleNamespace(play=play)

    def certified_export(*a: Any) -> tuple[str, SimpleNamespace]:
        calls["export"] = a
        return "somewhere", SimpleNamespace(line="certified")

    measure = SimpleNamespace(evaluate=remember("evaluate"), certified_export=certified_export)
    put(monkeypatch, "posttrain.api.main", measure)
    put(monkeypatch, "posttrain.build.request.run_request", SimpleNamespace(RunOptions=RunOptions, requested=requested))
    put(monkeypatch, "posttrain.api.session", SimpleNamespace(open_session=open_session))
    return calls


def put(monkeypatch: pytest.MonkeyPatch, name: str, fake: SimpleNamespace) -> None:
    """A module of the package, replaced."""
    room, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(importlib.import_module(room), last, fake, raising=False)


def test_commands_reach_their_functions(called: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ladder", "--out", "x", "seed=1", "clip.high=0.3"]) == 0
    assert called.pop("played") and called["run"] == (
        "ladder",
        ["seed=1", "clip.high=0.3"],
        RunOptions(out="x"),
    )
    assert main(["run", "--resume", "runs/x"]) == 0
    assert called["run"] == ("", [], RunOptions(resume="runs/x"))
    assert main(["eval", "runs/x", "env.args.terms=4", "--samples", "3", "--temperature", "0.5"]) == 0
    assert called["evaluate"] == (
        ("runs/x", "env.args.terms=4"),
        {
            "samples": 3,
            "checkpoint": "last",
            "max_tokens": None,
            "temperature": 0.5,
            "trust": False,
            "ema": False,
            "remote": EndpointOptions(),
        },
    )
    assert main(["eval", "http://h/v1", "--tokenizer", "t", "--key-env", "K", "--api", "completions"]) == 0
    assert called["evaluate"][1]["remote"] == EndpointOptions(tokenizer="t", key_env="K", api="completions")
    assert main(["export", "runs/x", "out", "--checkpoint", "best"]) == 0
    assert called["export"] == ("runs/x", "out", "best", False, False, False, False)
    assert "wrote somewhere\ncertified" in capsys.readouterr().out


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def requested(*_: Any) -> None:
        raise error

    put(monkeypatch, "posttrain.build.request.run_request", SimpleNamespace(RunOptions=RunOptions, requested=requested))
    return main(["run", "ladder"])


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (DataError("no"), 4), (RewardError("no"), 7)])
def test_errors_are_one_line_with_their_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(error, monkeypatch) == code
    assert capsys.readouterr().err == "posttrain: no\n"


def test_a_bug_keeps_its_traceback_and_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError(), monkeypatch)
    assert raising(KeyboardInterrupt(), monkeypatch) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_outside_a_run_end_with_their_code(number: signal.Signals) -> None:
    code = """
import signal, sys, time, types
# A parent in the background hands down that Ctrl-C is ignored, `nohup` that SIGHUP is.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fake = types.ModuleType("posttrain.build.request.run_request")
def requested(*a):
    print("ready", flush=True); time.sleep(60)
fake.RunOptions, fake.requested = dict, requested
import posttrain.build.request; posttrain.build.request.run_request = fake
sys.modules["posttrain.build.request.run_request"] = fake
from posttrain.cli import main
sys.exit(main(["run", "ladder"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(number)
        _, error = child.communicate(timeout=30)
    assert child.returncode == 128 + number and "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_heard_before_the_commands_are_imported(number: signal.Signals) -> None:
    """And a SIGHUP that `nohup` ignores does nothing."""
    code = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "posttrain.cli.parser":
            print("ready", flush=True); time.sleep(60 if "nohup" not in sys.argv else 1); sys.exit(7)
sys.meta_path.insert(0, Slow())
from posttrain.cli import main
sys.exit(main([]))
"""
    for how in ("", "nohup"):
        with subprocess.Popen(
            [sys.executable, "-c", code, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(number)
            _, error = child.communicate(timeout=30)
        ignored = how == "nohup" and number == signal.SIGHUP
        assert child.returncode == (7 if ignored else 128 + number), error
        assert error == ("" if ignored else "posttrain: terminated\n")


def test_usage_errors_are_code_2() -> None:
    for words in (["nonsense"], ["eval"], ["show"], ["ladder", "--nope"]):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 2


# --- ladder -----------------------------------------------------------------------------------------------------------


def test_ladder_prints_tree_one_and_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(shell, "program", lambda: "posttrain")
    assert main(["ladder"]) == 0
    text = capsys.readouterr().out
    assert set(LADDER) <= set(text.split()) and "2402.03300" in text and "Williams 1992" in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["ladder", "--table"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [r.split()[0] for r in rows[1 : len(LADDER) + 1]] == list(LADDER) and max(map(len, rows)) <= 100
    assert main(["ladder", "--diff", "grpo", "dapo"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [r.split()[0] for r in rows] == ["grpo", "clip", "aggregate", "pull", "filter", "shape"]
    assert main(["ladder", "grpo"]) == 0
    text = capsys.readouterr().out
    assert "biased" in text and "a copy of the weights" in text and "ddof 1" in text
    assert main(["ladder", "--diff", "grpo", "grpo"]) == 0
    assert main(["ladder", "grop"]) == 2 and "did you mean 'grpo'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_difference_of_two_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for pair in (("grpo", "dapo"), ("reinforce", "vapo"), ("ppo", "luffy")):
        shown = diff(*pair)
        assert max(map(len, shown.splitlines())) <= columns, pair
    assert ("clip(low=0.2, high=0.28, cap=none)" in diff("grpo", "dapo")) == (columns == 200)
    assert max(len(line) for line in one("vapo").splitlines()) <= max(columns, 100)


def test_ladder_prints_the_preference_algorithms_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder"]) == 0
    tree = capsys.readouterr().out
    assert all(f" {name} " in tree or f"\n{name} " in tree for name in PREFERENCES)
    assert main(["ladder", "--diff", "dpo", "simpo"]) == 0
    assert "fixedmargin(gamma=1.375)" in capsys.readouterr().out
    for name in PREFERENCES:
        assert main(["ladder", name]) == 0
        told = capsys.readouterr().out
        assert "lineage:" in told and "loss  " in told
    assert main(["ladder", "--diff", "dpo", "grpo"]) == 2
    assert "two ladders" in capsys.readouterr().err


def test_every_choice_of_the_ladder_has_a_formula() -> None:
    for a in LADDER.values():
        rows = formulas(a)
        assert [name for name, _ in rows][:3] == ["r", "A", "push"] and all(
            text and "None" not in text for _, text in rows
        )
        assert max(map(len, one(a.name).splitlines())) <= 100
        for choice in CHOICES:
            text = formula(choice, getattr(a, choice))
            assert text and "{" not in text and "None" not in text and text != getattr(a, choice)


def test_every_piece_and_word_of_every_choice_has_a_formula() -> None:
    seen = 0
    for choice in CHOICES:
        declared = tree.hints(Algorithm)[choice]
        item = tree.tuple_item(declared)
        values = [made() for made in tree.pieces(item or declared).values()] or list(tree.choices(declared))
        values = [(v,) for v in values] + [()] if item else values + [None] * (type(None) in tree.members(declared))
        for value in values:
            assert formula(choice, value), (choice, value)
        texts = [formula(choice, value) for value in values]
        assert len(set(texts)) == len(texts), f"two of {choice} have one formula"
        seen += len(values)
    assert seen > 80


def test_start_up_is_quick() -> None:
    begun = time.perf_counter()
    subprocess.run([*PYTHON, "ladder"], capture_output=True, check=True, env={**os.environ})
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shwo", "x"], "there is no command shwo; did you mean 'show'?"),
        (["run", "verifiable", "--resum", "x"], "did you mean --resume?"),
        (["sft", "model=x"], "there is no command sft; posttrain run sft starts it"),
        (["run", "sft", "--model", "my-model"], "a setting has no dashes: model=my-model; posttrain run --help lists"),
        (["run", "sft", "--rl.steps=3"], "a setting has no dashes: rl.steps=3; posttrain run --help lists"),
        (["run", "verifiable", "seed", "1"], "a setting is one word, key=value, such as seed=1"),
    ],
)
def test_a_wrong_word_is_answered_with_what_was_meant(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert says in capsys.readouterr().err
