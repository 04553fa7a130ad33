"""`posttrain new env NAME`: writes a working environment to change, and a test of it."""

from __future__ import annotations

import keyword
import shlex
from pathlib import Path

from posttrain.core.errors import ConfigError
from posttrain.core.shell import command_line, python, with_reasons

DATA = Path(__file__).parent / "data"


def new_env(name: str, folder: Path | str = ".") -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py into a folder; returns both paths. A missing folder is made.

    Raises:
        ConfigError: NAME is not a name for a Python file, or one of the files exists.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            f"{name!r} cannot name a Python file: use lower-case letters, digits and _, for example sort_letters"
        )
    if name.startswith("test_"):
        raise ConfigError(f"{name!r} would be taken for a test: leave out test_")
    files = {Path(folder) / f"{name}.py": "new_env.txt", Path(folder) / f"test_{name}.py": "new_env_test.txt"}
    if there := [str(p) for p in files if p.exists()]:
        raise ConfigError(
            f"{' and '.join(there)} exist{'s' if len(there) == 1 else ''}: nothing is overwritten. Choose another name"
            " or --folder"
        )
    words = {"__NAME__": name, "__CLASS__": class_name(name), "__WORDS__": name.replace("_", " ").capitalize()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        text = (DATA / template).read_text(encoding="utf-8")
        for mark, word in words.items():
            text = text.replace(mark, word)
        path.write_text(text, encoding="utf-8")
    one, two = files
    return one, two


def class_name(name: str) -> str:
    """A file's name as a class name.

    >>> class_name("sort_letters")
    'SortLetters'
    """
    return "".join(part.capitalize() for part in name.split("_"))


def next_steps(path: Path, test: Path, cls: str) -> list[str]:
    """Commands to try next, one per line."""
    env = f"{path}:{cls}"
    steps = [
        (command_line("check", env), "try it and its verifier"),
        (f"{python()} {shlex.quote(str(test))}", "its own test (or: pytest)"),
        (command_line("run", "arithmetic", f"env={env}", "sft.style=answer"), "train a small model from scratch on it"),
        (command_line("run", "grpo", "model=MODEL", f"env={env}"), "train a model that you have"),
    ]
    return with_reasons(steps)
