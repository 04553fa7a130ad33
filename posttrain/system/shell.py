"""Commands that are printed for the user to type next. Each works as printed in the shell that started this program."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from posttrain.system.terminal_output import visible

NAME = "posttrain"


def command_line(*words: str | os.PathLike[str]) -> str:
    """`posttrain` with these words, quoted where a shell needs it.

    >>> command_line("show", "runs/my run").endswith("posttrain show 'runs/my run'")
    True
    """
    return " ".join([program(), *(_quoted(os.fspath(w)) for w in words)])


def _quoted(word: str) -> str:
    """A word quoted for a shell. Characters that cannot be printed are written out, so the command stays on a line."""
    if word.isprintable():
        return shlex.quote(word)
    # The form $'...' of bash and zsh, in which escapes are read.
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{''.join(map(_escaped, plain))}'"


def _escaped(character: str) -> str:
    """A character inside $'...'. One beyond ASCII is written byte by byte, since a shell reads `\\xa0` as one byte."""
    if character.isprintable() or character.isascii():
        return visible(character)
    # A byte of a file's name that is no UTF-8 is one of these characters in Python, and becomes that byte again. Other
    # halves of surrogate pairs stand for no byte.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", errors))


def with_reasons(rows: Iterable[tuple[str, str]], width: int | None = None) -> list[str]:
    """Commands one below the other, each followed by its purpose as a comment. If a line would be wider than `width`,
    all comments stand above their commands.

    >>> with_reasons([("ls", "files"), ("pwd", "this folder")])
    ['ls   # files', 'pwd  # this folder']
    """
    pairs = list(rows)
    beside = max((len(command) for command, _ in pairs), default=0)
    if width is not None and any(beside + len(why) + 4 > width for _, why in pairs):
        return [line for command, why in pairs for line in (f"# {why}", command)]
    return [f"{command:<{beside}}  # {why}" for command, why in pairs]


def wrapped(text: str, width: int) -> list[str]:
    """Text in lines of at most `width` columns, where the rest of a wrapped line is indented. A line with a command
    stays whole, so that it can be copied, and so does a path.

    >>> wrapped("rl: " + "x " * 21, 40)[1]
    '  x x x'
    """
    out: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width or f"{program()} " in line:
            out.append(line)
            continue
        lead = line[: len(line) - len(line.lstrip())]
        out += textwrap.wrap(
            line.strip(),
            max(width, 40),
            initial_indent=lead,
            subsequent_indent=f"{lead}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return out


def program() -> str:
    """The command that calls this program from here: `posttrain` where that is found on the PATH and is of this
    environment, else the path of its script (`.venv/bin/posttrain`), else `python -m posttrain`."""
    # With `python -m`, `sys.argv[0]` is the path of a `__main__.py`; with an installed command it is its script's.
    started = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    if started.name == "__main__.py" and started.parent.name in (NAME, "cli"):
        return f"{python()} -m {NAME}"
    script = started if started.name == NAME and started.is_file() else Path(sys.executable).parent / NAME
    if not script.is_file():
        return f"{python()} -m {NAME}"
    return NAME if _found(NAME, script) else shlex.quote(_near(script))


def python() -> str:
    """The shortest name under which the shell finds this interpreter."""
    interpreter = Path(sys.executable)
    return next((n for n in ("python", "python3") if _found(n, interpreter)), shlex.quote(_near(interpreter)))


def _found(name: str, file: Path) -> bool:
    """Returns whether the shell finds this very file under the name. Links are not followed: the Python of a virtual
    environment is a link to another one, which knows none of its packages."""
    path = shutil.which(name)
    return path is not None and os.path.abspath(path) == os.path.abspath(file)


def _near(file: Path) -> str:
    """The path relative to the current folder for a file inside it; else the whole path."""
    whole = os.path.abspath(file)
    near = os.path.relpath(whole)
    # A bare name would be looked for on the PATH, so a file in the current folder gets `./`.
    return whole if near.startswith(os.pardir) else near if os.sep in near else os.path.join(os.curdir, near)
