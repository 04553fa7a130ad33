"""What somebody else wrote is shown as text: no command lets it steer a terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from posttrain.build.trackers import _readable
from posttrain.cli import main
from posttrain.cli.ablation_tables import ProgressLine
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record import run_reader
from posttrain.report.console import PlainConsole
from posttrain.report.live.live_terminal import Terminal
from posttrain.system.terminal_output import coloured_lines, guard_logs, tell, visible, visible_lines
from tests.engine.run_parts import RL, SMALL, model_at, play

ROOT = Path(__file__).parents[2] / "posttrain"
ESCAPES = "\x1b[2J\x1b[31m\x9b5A\x1b]8;;http://there\x1b\\here\x1b]8;;\x1b\\\x1b]0;title\x07\r\x08\x7f\u202eright\u2066left\u200b\u2028"
MARKUP = "[red]r[/red][link=http://there]l[/link][/]:boom:"
HOSTILE = ESCAPES + MARKUP


def steering(text: str) -> set[str]:
    """Characters that no line of ours holds: controls of both ranges but the line break, and invisible formatting."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co")}


# --- the one function -------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_every_character_that_is_not_text_is_written_out() -> None:
    odd = [c for c in map(chr, range(0x110000)) if not c.isprintable()]
    assert {*"\x00\n\r\x1b\x7f\x9b\u202e\u2066\u200b\u2028\ud800\ue000"} <= set(odd)
    assert visible("".join(odd)).isprintable() and len(visible("".join(odd))) >= 4 * len(odd)
    even = "".join(c for c in map(chr, range(0x110000)) if c.isprintable())
    assert visible(even) is even
    assert visible("a\nb") == "a\\nb" and visible_lines("a\nb\r") == "a\nb\\r"
    assert not steering(visible(HOSTILE)) and "\\x1b[2J" in visible(HOSTILE) and "\\u202e" in visible(HOSTILE)


def test_our_colours_pass_and_nothing_like_them() -> None:
    ours = "\x1b[31mred\x1b[0m"
    assert coloured_lines(ours) == ours
    assert coloured_lines("\x1b[31;5mx\x1b[38;2;1;2;3my\x1b[2Jz") == "\\x1b[31;5mx\\x1b[38;2;1;2;3my\\x1b[2Jz"


def test_lines_are_told_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    tell(HOSTILE)
    tell(HOSTILE, file=sys.stderr, coloured=False)
    out = capsys.readouterr()
    assert not steering(out.out + out.err) and MARKUP in out.out


def test_the_live_line_holds_one_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Live(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", live := Live())
    teller = ProgressLine()
    teller.say(f"a\n{HOSTILE}")
    teller.close()
    assert not steering(live.getvalue().replace("\r\x1b[K", "")) and "\n" not in live.getvalue()


# --- rich -------------------------------------------------------------------------------------------------------------

OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|\d?[AK]|2K)")
"""Colours and the moves of a live line, which rich writes."""


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_lines_and_bars_show_text_as_text(terminal: bool) -> None:
    console = PlainConsole(file=io.StringIO(), force_terminal=terminal, width=400)
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    console.print(table)
    console.print(HOSTILE)
    console.print(Text(HOSTILE), HOSTILE, style="bold red")
    with console.status(Text(HOSTILE)):
        console.print(HOSTILE)
    out: Any = console.file
    text = out.getvalue()
    assert not steering(OURS.sub("", text).replace("\r", "" if terminal else "\r")) and "]8;id=" not in text
    assert text.count("[red]r[/red][link=http://there]l[/link][/]:boom:") >= 7


def test_the_bar_of_a_run_reads_no_markup() -> None:
    run = shipped("arithmetic")
    terminal_stage = run.stages[0]
    terminal = Terminal(run, PlainConsole(file=io.StringIO(), force_terminal=True, width=300))
    terminal.run = type("Named", (), {"stage": lambda self, name: terminal_stage})()  # type: ignore[assignment]
    terminal._open(type("Step", (), {"stage": HOSTILE, "index": 1})())  # type: ignore[arg-type]
    assert isinstance(terminal._bar, Progress) and terminal._task is not None
    terminal._bar.update(terminal._task, facts=HOSTILE)
    terminal._bar.refresh()
    terminal.say(HOSTILE)
    out: Any = terminal.console.file
    assert (
        not steering(OURS.sub("", out.getvalue()).replace("\r", ""))
        and MARKUP in out.getvalue()
        and "]8;id=" not in out.getvalue()
    )


# --- nothing else prints ----------------------------------------------------------------------------------------------

INSIDE = {
    "sandbox/cell/cells.py": "prints inside the sandbox, into what is captured",
    "sandbox/cell/program.py": "prints inside the sandbox, into what is captured",
}
"""Files that may print, and why."""
DOORS = ("system/terminal_output.py", "report/console.py")


def printing(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every call that writes to a terminal by another door than `tell` and `PlainConsole`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "") in (
            "rich",
            "rich.console",
            "rich.pretty",
            "rich.traceback",
        ):
            yield from (
                (node.lineno, f"rich {a.name}")
                for a in node.names
                if a.name not in ("RenderableType", "ConsoleOptions")
            )
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in ("print", "pprint", "pprint.pprint", "traceback.print_exc", "input") or re.search(
            r"std(out|err)\.(write|buffer)", called
        ):
            yield node.lineno, called
        if (
            called.split(".")[-1] in ("Console", "from_markup", "from_ansi", "Markdown")
            or keywords.get("markup") == "True"
        ):
            yield node.lineno, called
        if called.split(".")[-1] == "TextColumn" and keywords.get("markup") != "False":
            yield node.lineno, called
        if called.split(".")[-1] in ("status",) and node.args and not isinstance(node.args[0], ast.Constant):
            yield node.lineno, called


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_everything_is_printed_through_one_door(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = [f"{name}:{line} {what}" for line, what in printing(path.read_text())]
    assert not found or name in DOORS or name in INSIDE, (
        f"print by core.visible.tell, or by recipe.console.PlainConsole: {found}"
    )


def test_the_test_itself_sees_every_way_to_print() -> None:
    text = (
        "print(1)\nsys.stdout.write('')\nfrom rich.console import"
        " Console\nConsole()\nText.from_markup('')\nTextColumn('')\nc.print(x, markup=True)\n"
    )
    assert {line for line, _ in printing(text)} == set(range(1, 8))


# --- every command on a run whose every foreign string is hostile -----------------------------------------------------

REWARD = """
from posttrain.core.verdict import Verdict
HOSTILE = {hostile!r}
count = 0
def judge(task, text):
    global count
    count += 1
    if count % 5 == 0:
        raise ValueError(HOSTILE)
    if count % 7 == 0:
        return Verdict.failed(HOSTILE, HOSTILE)
    return Verdict.value(float(len(text) % 3), HOSTILE, HOSTILE)
globals()[HOSTILE] = judge
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run whose folder, tasks, answers, reward source, verdicts, reasons and exceptions hold escapes; and what it
    printed."""
    base = tmp_path_factory.mktemp("h") / visible_name()
    base.mkdir()
    rows = [
        {"id": f"{i} {HOSTILE}", "prompt": f"{i} {HOSTILE}", "answer": f"{i} {HOSTILE}", HOSTILE: HOSTILE}
        for i in range(20)
    ]
    (base / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (base / "r.py").write_text(REWARD.format(hostile=HOSTILE.replace(":", "").replace("/", "")))
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        source = f"{base}/r.py:{HOSTILE.replace(':', '').replace('/', '')}"
        words = (
            *(w for w in SMALL if not w.startswith("env")),
            *RL,
            f"env.prompts={base}/p.jsonl",
            "env.heldout=2",
            "rl.max_failed=1",
        )
        play(base / "run", "verifiable", "sft=none", *words, f"env.rewards={source}")
    except AssertionError:
        raise AssertionError(out.getvalue() + err.getvalue()) from None
    finally:
        sys.stdout, sys.stderr = before
    yield base / "run", out.getvalue() + err.getvalue()


def visible_name() -> str:
    """As much of it as a file may be named."""
    return HOSTILE.replace("/", "").replace("\n", "")[:100]


def clean(text: str) -> None:
    assert not steering(text), sorted(map(repr, steering(text)))


@pytest.mark.prove
def test_a_run_prints_text(hostile: tuple[Path, str]) -> None:
    clean(hostile[1])
    assert "\\x1b[2J" in hostile[1]


COMMANDS: dict[str, tuple[int, list[str]]] = {
    "show": (0, ["show", "RUN"]),
    "episode": (0, ["show", "RUN", "--episode", "0"]),
    "evaluation": (0, ["show", "RUN", "--eval"]),
    "eval": (0, ["eval", "RUN", "--samples", "1"]),
    "export": (0, ["export", "RUN", "NEW"]),
    "ladder": (0, ["ladder", "--on", "RUN", "--against", "rloo"]),
    "ladder as JSON": (0, ["ladder", "--on", "RUN", "--against", "rloo", "--json"]),
    "resume": (0, ["run", "--resume", "RUN"]),
    "no checkpoint": (5, ["eval", "RUN", "--checkpoint", HOSTILE]),
    "no stage": (2, ["show", "RUN", "--stage", HOSTILE]),
    "no step": (2, ["show", "RUN", "--step", "77"]),
    "no folder": (5, ["show", HOSTILE]),
    "no model": (2, ["eval", HOSTILE, "env=arithmetic"]),
    "no environment": (2, ["check", HOSTILE]),
    "no setting": (2, ["run", "arithmetic", f"{HOSTILE}=1".replace("=http", "http")]),
    "no fault": (2, ["faults", HOSTILE]),
    "no algorithm": (2, ["ladder", HOSTILE]),
    "exists": (5, ["run", "arithmetic", "--out", "RUN", f"env={HOSTILE}"]),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_every_command_prints_text(
    what: str, hostile: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, words = COMMANDS[what]
    at = {"RUN": str(hostile[0]), "NEW": str(tmp_path / visible_name())}
    words = [at.get(w, w) for w in words]
    try:
        assert main(words) == code, capfd.readouterr().err
    except SystemExit as ended:  # argparse
        assert ended.code == code
    said = capfd.readouterr()
    clean(said.out + said.err)
    assert "\\x1b[2J" in said.out + said.err or what in ("ladder as JSON", "eval", "no step")


@pytest.mark.prove
def test_check_prints_text(hostile: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["check", str(hostile[0]), "--tasks", "4"], ["check", str(hostile[0]), "--tasks", "4", "--json"]):
        assert main(words) in (0, 1)
        said = capfd.readouterr()
        clean(said.out + said.err)
        assert "x1b[2J" in said.out or "u001b[2J" in said.out


def test_what_a_folder_asks_for_is_listed_as_text(
    hostile: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for flags, code in (([], 5), (["--trust"], 0)):
        assert main(["run", "--resume", str(hostile[0]), *flags]) == code
        said = capfd.readouterr()
        clean(said.out + said.err)
        assert "\\x1b[2J" in said.err


def test_every_text_of_a_run_file_and_its_record_is_shown_as_text(
    hostile: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names of algorithms, papers, recipes, notes, reasons of what was dropped: whatever text there is in the files is
    replaced."""
    folder = Path(shutil.copytree(hostile[0], tmp_path / "run"))
    data = json.loads((folder / "run.json").read_text())
    data["run"]["recipe"] = HOSTILE
    for key in ("name", "paper", "note"):
        data["run"]["stages"][0]["algorithm"][key] = HOSTILE
    (folder / "run.json").write_text(json.dumps({**data, HOSTILE: HOSTILE, "argv": [HOSTILE]}))
    lines = [json.loads(x) for x in (folder / "steps.jsonl").read_text().splitlines()]
    (folder / "steps.jsonl").write_text("".join(json.dumps({**x, "notes": [HOSTILE]}) + "\n" for x in lines))
    for words in (["show"], ["ladder", "--against", "rloo", "--on"], ["eval", "--samples", "1"], ["run", "--resume"]):
        main([*words, str(folder)])
        said = capfd.readouterr()
        clean(said.out + said.err)
    for line in _readable(run_reader.run_file(folder).run):  # what TensorBoard shows
        clean(line)
        assert "\n" not in line


def test_a_damaged_file_is_named_as_text(
    hostile: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(hostile[0], tmp_path / "run"))
    path = folder / "run.json"
    whole = json.loads(path.read_text())
    for change in (
        {"run": {**whole["run"], HOSTILE: 1}},
        {"schema": HOSTILE},
        {"run": {**whole["run"], "seed": HOSTILE}},
    ):
        path.write_text(json.dumps({**whole, **change}))
        assert main(["show", str(folder)]) in (2, 5)
        clean(capfd.readouterr().err)


@pytest.mark.prove
def test_a_model_with_hostile_words_is_described_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its template raises with escapes, its stop token is one, its configuration has entries of that name."""
    model = model_at(tmp_path / visible_name())
    (model / "chat_template.jinja").write_text("{{ raise_exception(" + json.dumps(HOSTILE) + ") }}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(
            {**config, HOSTILE: HOSTILE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, HOSTILE: 1}}
        )
    )
    capfd.readouterr()  # bars of what wrote the model
    main(["eval", str(model), "env=arithmetic", "env.heldout=2", "--samples", "1", "--max-tokens", "4"])
    said = capfd.readouterr()
    clean(said.out + said.err)
    (model / "config.json").write_text(json.dumps({**config, "model_type": HOSTILE}))
    assert main(["eval", str(model), "env=arithmetic"]) == 4
    said = capfd.readouterr()
    clean(said.out + said.err)
    assert "\\x1b[2J" in said.err


def test_the_banner_and_the_log_of_a_server_are_text(
    hostile: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from posttrain.serve.command import make_served
    from posttrain.serve.listen import banner

    served, facts = make_served(hostile[0], token="t" * 24, name=HOSTILE)
    for line in banner(served, "http://127.0.0.1:1/v1", "127.0.0.1", facts):
        tell(line)
    clean(capsys.readouterr().out)
    named = "\n".join(banner(served, "http://127.0.0.1:1/v1", "127.0.0.1", facts, "MY_TOKEN"))
    assert "t" * 24 not in named and "token: the value of MY_TOKEN" in named
    assert '-H "Authorization: Bearer $MY_TOKEN"' in named


# --- what others print ------------------------------------------------------------------------------------------------


def test_logs_are_text() -> None:
    guard_logs()
    guard_logs()
    stream = io.StringIO()
    log, handler = logging.getLogger("somebody's"), logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        log.warning("%s said %s", "somebody", HOSTILE)
        log.warning(HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("bug in %s", HOSTILE)
    finally:
        log.removeHandler(handler)
    clean(stream.getvalue())
    assert stream.getvalue().count("\\x1b[2J") == 4


def test_a_bug_and_a_warning_are_told_as_text() -> None:
    """At top level, in a thread, and as a warning: in a process of its own, as the program runs."""
    code = f"""
import threading, warnings
from posttrain.cli import main
from posttrain.cli.commands import faults_command
H = {HOSTILE!r}
def bug(o):
    warnings.warn(H)
    t = threading.Thread(target=lambda: 1 / len([]) if False else (_ for _ in ()).throw(ValueError(H)))
    t.start(); t.join()
    raise RuntimeError(H)
faults_command.faults = bug
main(["faults"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    clean(done.stdout + done.stderr)
    assert done.stderr.count("\\x1b[2J") >= 3 and "Traceback" in done.stderr


def test_in_a_terminal_too(hostile: tuple[Path, str]) -> None:
    """`show` in a real one: its colours, and nothing of the run's."""
    first, second = pty.openpty()
    words = [sys.executable, "-m", "posttrain.cli", "show", str(hostile[0]), "--episode", "0"]
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    child = subprocess.Popen(words, stdout=second, stderr=second, env=env)
    os.close(second)
    said = b""
    try:
        while block := os.read(first, 65536):
            said += block
    except OSError:  # the end of a terminal whose program is gone
        pass
    os.close(first)
    assert child.wait() == 0
    text = said.decode().replace("\r\n", "\n")
    assert "\x1b[1m" in text
    clean(re.sub(r"\x1b\[(?:0|1|2|31|32|33|36)m", "", text))
    assert "\x1b[31m\x9b" not in text


def test_warnings_stay_warnings() -> None:
    with pytest.warns(UserWarning, match="x"):
        warnings.warn("x", stacklevel=1)


@pytest.mark.prove
def test_what_libraries_tell_programmers_is_not_printed() -> None:
    """Of a command; a user's own warnings are."""
    program = (
        "import logging, warnings\nfrom posttrain.cli import main\nmain(['ladder'])\nimport torch\n"
        "logging.getLogger('torchao').warning('a part is missing')\n"
        "logging.getLogger('torch.utils._pytree').warning('a name is old')\n"
        "for module in ('transformers.modeling_utils', 'mine'):\n"
        "    warnings.warn_explicit('old', FutureWarning, f'{module}.py', 1, module=module)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stderr == "mine.py:1: FutureWarning: old\n"
