"""`posttrain new`: writes a working environment or reward function to change, and a test of it."""

from __future__ import annotations

import json
import keyword
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

from posttrain.cli.skeletons.benchmark_files import HELDOUT, benchmark
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line, python

DATA = Path(__file__).parent / "data"
EXAMPLES = tuple((a, b) for a in range(10, 90, 10) for b in range(1, 9))
"""The sums (a, b) in the rows that a new reward function comes with."""
Shape = Literal["env", "tools", "judged", "dialog"]
"""Kinds of environments that are written. env: one question and one answer. tools: with tools and several turns.
judged: answers are judged by a known taste. dialog: a conversation with a simulated user and a persona to keep."""
YOUR_MODEL = "train a model that you have: its path for MODEL"
JUDGE = "judge:http://127.0.0.1:8000/v1"
"""The judge in the commands and files that are written: `posttrain serve`, or another server on this machine."""


def new_env(name: str, folder: Path | str = ".", kind: Shape = "env") -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py into a folder, which is made where it is missing; returns both paths. ConfigError
    where NAME is not a name for a Python file, or one of the files exists."""
    files = {f"{name}.py": f"new_{kind}.txt", f"test_{name}.py": f"new_{kind}_test.txt"}
    rubric = {f"{name}.md": "new_dialog_rubric.txt"} if kind == "dialog" else {}
    program, test, *_ = _write(name, folder, files | rubric)
    return program, test


def new_benchmark(name: str, file: Path | str, folder: Path | str = ".") -> list[Path]:
    """Write the items of a benchmark file as NAME.jsonl, its rubric as NAME.md, the rubric of a judge that is held out
    as NAME_heldout.md, a run with both judges as NAME.py, and test_NAME.py; returns the paths.

    Raises:
        ConfigError: as `new_env`.
        DataError: the file is no benchmark.
    """
    rubric, items = benchmark(file)
    texts = {
        f"{name}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items),
        f"{name}.md": f"{rubric}\n",
        f"{name}_heldout.md": f"{HELDOUT}{rubric}\n",
    }
    written = _write(name, folder, {f"{name}.py": "new_rubric.txt", f"test_{name}.py": "new_rubric_test.txt"}, texts)
    return [*written, *(Path(folder) / file for file in texts)]


def new_reward(name: str, folder: Path | str = ".") -> tuple[Path, Path, Path]:
    """Write NAME.py with a reward function, test_NAME.py, and NAME.jsonl with rows to try it on; returns the paths.

    Raises:
        ConfigError: as `new_env`.
    """
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "completion": str(a + b)} for a, b in EXAMPLES]
    files = {f"{name}.py": "new_reward.txt", f"test_{name}.py": "new_reward_test.txt"}
    program, test = _write(name, folder, files, {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    return program, test, Path(folder) / f"{name}.jsonl"


def _write(
    name: str, folder: Path | str, templates: Mapping[str, str], texts: Mapping[str, str] | None = None
) -> list[Path]:
    """Writes the files of `templates` (file -> template in `DATA`) and `texts` (file -> text); returns the paths of the
    former. ConfigError, before anything is written, where a file exists or `name` cannot name a Python file."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            f"{name!r} cannot name a Python file: use lower-case letters, digits and _, for example sort_letters"
        )
    if name.startswith("test_"):
        raise ConfigError(f"{name!r} would be taken for a test: leave out test_")
    if _is_module(name):
        raise ConfigError(
            f"{name!r} is the name of a module of Python or of a package: a program beside this file would import this"
            f" one. Take another name, such as my_{name}"
        )
    # All files are looked for before the first is written, so that a refusal leaves nothing behind.
    if existing := [str(p) for f in (*templates, *(texts or {})) if (p := Path(folder) / f).exists()]:
        raise ConfigError(
            f"{' and '.join(existing)} exist{'s' if len(existing) == 1 else ''}: nothing is overwritten. Choose another"
            " name or --folder"
        )
    words = {"__NAME__": name, "__CLASS__": class_name(name), "__WORDS__": name.replace("_", " ").capitalize()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, template in templates.items():
        text = (DATA / template).read_text(encoding="utf-8")
        for mark, word in words.items():
            text = text.replace(mark, word)
        (Path(folder) / file).write_text(text, encoding="utf-8")
    for file, text in (texts or {}).items():
        (Path(folder) / file).write_text(text, encoding="utf-8")
    return [Path(folder) / file for file in templates]


def _is_module(name: str) -> bool:
    """Returns whether Python has a module of this name, or a package of this name is installed."""
    try:
        return name in sys.stdlib_module_names or bool(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return False


def class_name(name: str) -> str:
    """A file's name as a class name.

    >>> class_name("sort_letters")
    'SortLetters'
    """
    return "".join(part.capitalize() for part in name.split("_"))


def next_steps(path: Path, test: Path, cls: str, kind: Shape = "env") -> list[str]:
    """Returns the next steps to try with an environment: each command below a line that says what it does."""
    env = f"{path}:{cls}"
    train = {
        "env": ("run", "arithmetic", f"env={env}", "sft.style=answer"),
        "tools": ("run", "shop", f"env={env}"),
        "judged": ("run", "dpo", f"env={env}", "sft.style=answer", "sft.wrong=0.9"),
        "dialog": ("run", "calculator", f"env={env}", "sft.style=answer", "sft.wrong=0.6"),
    }[kind]
    judge = (f"env.rewards={JUDGE}", f"env.rewards.0.judge.rubric={path.with_suffix('.md')}", "env.measured=true")
    # A judged environment is learned by preferences, so its model goes into DPO; the others learn from reward.
    recipe, more = ("dpo", ("sft=none",)) if kind == "judged" else ("grpo", ())
    paid = [(command_line(*train, *judge), "the same, paid by a judge that is served there")]
    return _listed(
        (command_line("check", env), "try it and its verifier"),
        (f"{python()} {shlex.quote(str(test))}", "its own test (or: pytest)"),
        (command_line(*train), "train a small model from scratch on it"),
        *(paid if kind == "dialog" else []),
        (command_line("run", recipe, "model=MODEL", f"env={env}", *more), YOUR_MODEL),
    )


def benchmark_steps(run: Path, test: Path, rows: Path, rubric: Path) -> list[str]:
    """Returns the next steps to try with a benchmark and its judges."""
    paid = (f"env.rewards={JUDGE}", f"env.rewards.0.judge.rubric={rubric}")
    return _listed(
        (f"{python()} {shlex.quote(str(test))}", "its own test, with a scripted judge (or: pytest)"),
        (
            command_line("check", "prompts", f"env.prompts={rows}", *paid),
            "what the judge pays; it must be served there",
        ),
        (
            command_line("run", f"{run}:run", "rl.optimizer.lr=5e-4", "rl.steps=20", "rl.sampling.max_tokens=32"),
            "the whole way on a tiny model that is built, with the judge served there",
        ),
        (command_line("run", f"{run}:run", "model=MODEL"), "train a model that you have: its path for MODEL"),
    )


def reward_steps(path: Path, test: Path, rows: Path, name: str) -> list[str]:
    """Returns the next steps to try with a reward function."""
    data = (f"env.prompts={rows}", f"env.rewards={path}:{name}")
    return _listed(
        (command_line("check", "prompts", *data), "try it on the rows"),
        (f"{python()} {shlex.quote(str(test))}", "its own test (or: pytest)"),
        (
            command_line("run", "verifiable", *data),
            "train a small model from scratch on it: imitation, then the reward",
        ),
        (command_line("run", "grpo", "model=MODEL", *data), YOUR_MODEL),
    )


def _listed(*steps: tuple[str, str]) -> list[str]:
    """Each command below its reason, because together they are longer than a line."""
    return [line for command, why in steps for line in (f"# {why}", command)]
