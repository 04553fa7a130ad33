"""The command line: starts at once, says what is wrong in one line, ends with the documented code, and is readable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.api.endpoint import EndpointOptions
from posttrain.api.session import RunOptions
from posttrain.cli import main
from posttrain.cli.ladder import one
from posttrain.cli.parser import split_overrides
from posttrain.cli.show import ShowOptions, lines, visible
from posttrain.core import shell, tree
from posttrain.core.algorithm import CHOICES, Algorithm
from posttrain.core.book import Book
from posttrain.core.errors import ConfigError, DataError, RewardError
from posttrain.core.formula import formula, formulas
from posttrain.core.ladder import LADDER
from posttrain.core.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, EpisodeCredit, GroupCredit, Scored
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, Said, Stop, Task
from posttrain.core.verdict import Judged, Verdict

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
        ["run", "ladder", "--help"],
    ],
)
def test_light_commands_import_no_torch(words: list[str]) -> None:
    code = f"""
import sys, time
begun = time.perf_counter()
from posttrain.cli import main
from posttrain.cli.ladder import one
try: main({words!r})
except SystemExit: pass
print(sorted(m for m in sys.modules if m in ("torch", "transformers", "tokenizers", "safetensors", "rich") or m == \
"numpy" and {"run" not in words}), time.perf_counter() - begun, file=sys.stderr)
"""
    done = python(code)
    modules, seconds = done.stderr.rsplit(" ", 1)
    assert modules == "[]", modules
    assert float(seconds) < 3.0 and len(done.stdout) > 200


@pytest.mark.parametrize("command", ["run", "ladder", "eval", "check", "new", "show", "export"])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as done:
        code = done.code
    text = capsys.readouterr().out
    assert code == 0 and f"posttrain {command}" in text and "example:" in text and "exit codes:" in text


def test_help_of_a_recipe_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ladder", "rl.steps=7", "--help"]) == 0
    text = capsys.readouterr().out
    assert "rl.steps=7 " in text and "rl.algorithm.scale=one" in text and "one of one, group_std" in text


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
    def open_session(*a: Any) -> Iterator[SimpleNamespace]:
        calls["run"] = a
        yield SimpleNamespace(play=play)

    put(monkeypatch, "main", SimpleNamespace(**{name: remember(name) for name in ("evaluate", "export")}))
    put(monkeypatch, "session", SimpleNamespace(RunOptions=RunOptions, open_session=open_session))
    return calls


def put(monkeypatch: pytest.MonkeyPatch, name: str, fake: SimpleNamespace) -> None:
    """A module of `posttrain.api`, replaced."""
    import posttrain.api

    monkeypatch.setitem(sys.modules, f"posttrain.api.{name}", fake)
    monkeypatch.setattr(posttrain.api, name, fake, raising=False)


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
            "remote": EndpointOptions(),
        },
    )
    assert main(["eval", "http://h/v1", "--tokenizer", "t", "--key-env", "K", "--api", "completions"]) == 0
    assert called["evaluate"][1]["remote"] == EndpointOptions(tokenizer="t", key_env="K", api="completions")
    assert main(["export", "runs/x", "out", "--checkpoint", "best"]) == 0
    assert called["export"] == (("runs/x", "out", "best", False), {}) and "wrote somewhere" in capsys.readouterr().out


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def open_session(*_: Any) -> None:
        raise error

    put(monkeypatch, "session", SimpleNamespace(RunOptions=RunOptions, open_session=open_session))
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_outside_a_run_end_with_their_code(number: signal.Signals) -> None:
    code = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background hands down that Ctrl-C is ignored
fake = types.ModuleType("posttrain.api.session")
def open_session(*a):
    print("ready", flush=True); time.sleep(60)
fake.RunOptions, fake.open_session = dict, open_session
import posttrain.api; posttrain.api.session = fake; sys.modules["posttrain.api.session"] = fake
from posttrain.cli import main
from posttrain.cli.ladder import one
sys.exit(main(["run", "ladder"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(number)
        _, error = child.communicate(timeout=30)
    assert child.returncode == 128 + number and "Traceback" not in error


def test_usage_errors_are_code_2() -> None:
    for words in (["nonsense"], ["eval"], ["show"], ["ladder", "--nope"]):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 2


# --- ladder -----------------------------------------------------------------------------------------------------------


def test_ladder_prints_tree_one_and_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


# --- show -------------------------------------------------------------------------------------------------------------


def a_group(task: Task, rewards: list[float | None]) -> Group:
    episodes: list[Episode] = []
    for i, reward in enumerate(rewards):
        t = Transcript(Sampling(stop_ids=(9,)))
        t.see([1, 2, 3])
        t.say(Said(np.int32([4, 9]), np.float32([-0.1, -3.0]), np.int32([5, 5]), Stop.SAID))
        verdict = Verdict.failed("outage", "down") if reward is None else Verdict.value(reward, "", "as expected")
        brief = Judged("brief", 0.1, Verdict.value(1.0))
        episodes.append(
            Episode(
                task, 0, i, (t.segment(),), Stop.SAID, (Judged("sum", 1.0, verdict), brief), f"it is \x1b[31m{i}", ""
            )
        )
    return Group(task, 0, tuple(episodes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    group = a_group(Task("t0", "2+2=", 4), [1.0, 0.0, None])
    signs = [1.5, -0.5]
    credits = tuple(
        EpisodeCredit(Scored(e), s, tuple(np.full(x.spoken, s) for x in e.segments))
        for e, s in zip(group.judged, signs, strict=True)
    )
    with Book.create(tmp_path / "run", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}) as book:
        book.write_evaluation("rl", 0, [group])
        for step in (1, 2):
            book.write_episodes("rl", step, Credit((GroupCredit(group, credits, False),), 0.0))
    (tmp_path / "run" / "tokenizer").mkdir()
    vocabulary = {f"<{i}>": i for i in range(10)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path / "run"


def text(folder: Path, colour: bool = False, **wanted: Any) -> str:
    return "\n".join(lines(folder, ShowOptions(**wanted), colour))


def test_show_lists_the_last_training_step(folder: Path) -> None:
    shown = text(folder)
    assert shown.startswith("rl step 2: 3 episodes, mean reward 0.600, 1 not judged")
    assert len([x for x in shown.splitlines() if "2+2= -> it is \\x1b[31m" in x]) == 3
    assert f"posttrain show {folder} --stage rl --step 2 --episode 0" in shown and "\x1b" not in shown


def test_show_filters_and_orders(folder: Path) -> None:
    assert [x.split()[0] for x in text(folder, wrong=True).splitlines()[2:-1]] == ["1"]
    assert [x.split()[0] for x in text(folder, best=True).splitlines()[2:-1]] == ["0", "1"]
    assert "2 more; --limit 0 shows all" in text(folder, limit=1)
    assert "held-out evaluation" in text(folder, kind="eval")


def test_show_one_episode_token_by_token(folder: Path) -> None:
    rows = text(folder, step=1, episode=1).splitlines()
    assert rows[0] == "rl step 1" and "task t0, visit 0, sibling 1, stop stop" in rows[1]
    assert "  sum (weight 1): 0.000  as expected" in rows
    world, first, last = rows[-4:-1]
    assert world.split() == ["0-2", "world", "0", "-", "-", "-", "-", "<1>", "<2>", "<3>"]
    assert first.split() == ["3", "said", "1", "5", "-0.100", "0.905", "-0.500", "<4>"]
    assert last.split() == ["4", "said", "1", "5", "-3.000", "0.050", "-0.500", "<9>"]
    assert "\x1b[31m" in text(folder, colour=True, step=1, episode=1)


def test_show_without_tokenizer_or_episodes_says_so(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert "#4" in text(folder, episode=0) and "token ids are shown" in text(folder, episode=0)
    Book.create(tmp_path / "empty", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}).close()
    assert (
        text(tmp_path / "empty")
        == f"no episodes in {tmp_path / 'empty'} yet: they appear after its first step or evaluation"
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"stage": "rll"}, "did you mean 'rl'"),
        ({"step": 9}, "the nearest is 2 (from 1 to 2)"),
        ({"episode": 9}, "has episodes 0 to 2"),
    ],
)
def test_show_says_what_there_is(folder: Path, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        text(folder, **wanted)
    assert message in str(error.value)


def test_show_of_something_else_is_code_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 5
    assert "is not a run folder" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    shown = subprocess.run(
        f"{' '.join(PYTHON)} show {folder} | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in shown.stderr and "rl step 2" in shown.stdout


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[2Jb\nc\u202ed") == "a\\x1b[2Jb\\nc\\u202ed" and visible("größe 数") == "größe 数"


def test_start_up_is_quick() -> None:
    begun = time.perf_counter()
    subprocess.run([*PYTHON, "ladder"], capture_output=True, check=True, env={**os.environ})
    assert time.perf_counter() - begun < 5
