"""What a page tells its reader to do: the commands and the Python blocks of Markdown and of notebooks, in order.

A command is a line of a code block (fenced or indented) that begins with one of `PROGRAMS`; a line that ends with a
backslash goes on. A fenced block of another language is no command. A fenced block whose first line is a comment with
the name of a file (`# mine.py`) is that file. What running text says in backquotes, after one of `PROGRAMS`, is a
mention.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = (
    "posttrain",
    "python",
    "python3",
    "pip",
    "make",
    "export",
    "cd",
    "curl",
    "jupyter",
    ".",
    "source",
    "tensorboard",
    "hf",
    "torchrun",
    "trackio",
    "wandb",
)
SHELLS = ("", "sh", "bash", "shell", "console", "text")
ONLY_COMMANDS = ("sh", "bash", "shell")
"""Languages of blocks that hold nothing but commands."""
OTHERS = re.compile(
    r"(?:(?:accelerate|apt|apt-get|bash|conda|docker|env|git|huggingface-cli|kubectl|nvidia-smi|poetry"
    r"|pytest|ray|sbatch|sh|srun|sudo|trl|uv|verl)(?: +[\w./-]|$))"
)
"""How lines of other programs begin, which would not be found: they are no commands to whoever plays the page."""
SET = re.compile(r"^(?:[A-Z][A-Z_]*=\S+ )+")
"""Variables that are set for one command."""
MENTION = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})\s*(?P<language>[\w+-]*).*$")
NAMED = re.compile(r"^# ([\w./-]+\.(?:py|yaml|yml|jsonl))$")


@dataclass(frozen=True)
class Step:
    """One thing to do: `kind` is "command" (a line for a shell), "python" (a block) or "file" (`name` is written)."""

    page: str
    line: int
    kind: str
    text: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text if self.kind == 'command' else f'{self.kind} {self.name}'.strip()}"


def steps(path: Path, root: Path) -> list[Step]:
    """The steps of one page, in its order."""
    page = str(path.relative_to(root))
    if path.suffix == ".ipynb":
        return list(_notebook(page, json.loads(path.read_text(encoding="utf-8"))))
    return [
        s
        for line, language, block in _blocks(path.read_text(encoding="utf-8"))
        for s in _of(page, line, language, block)
    ]


def mentions(path: Path, root: Path) -> list[Step]:
    """What the running text of a page says to type, each text once; tables are running text, headings and code are
    not."""
    page, found = str(path.relative_to(root)), dict[str, Step]()
    for line, text in _mentioned(path) if path.suffix != ".ipynb" else ():
        if SET.sub("", text).split(" ")[0] in PROGRAMS and " " in text:
            found.setdefault(text, Step(page, line, "command", text))
    return list(found.values())


def _mentioned(path: Path) -> Iterator[tuple[int, str]]:
    """(number of its line, text) of what stands in backquotes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for first, _, block in _blocks("\n".join(lines)):
        lines[first - 1 : first - 1 + len(block)] = [""] * len(block)
    prose = "\n".join("" if re.match(r"#|<!--|    | *`{3}", x) else x for x in lines)
    for said in MENTION.finditer(prose):
        if "\n\n" not in said[1]:
            yield prose.count("\n", 0, said.start()) + 1, " ".join(said[1].split())


def overlooked(path: Path, root: Path) -> list[str]:
    """Commands to a reader, in code blocks and in running text, that `steps` and `mentions` do not find."""
    if path.suffix == ".ipynb":
        return []
    out = [
        f"{path.relative_to(root)}:{n}: {x}" for n, x in _mentioned(path) if " " in x and OTHERS.match(SET.sub("", x))
    ]
    for first, language, block in _blocks(path.read_text(encoding="utf-8")):
        if language not in SHELLS or (block and NAMED.match(block[0])):
            continue
        found, goes_on = {n for n, _ in _commands(block)}, False
        for n, line in enumerate(block):
            bare = line.strip().removeprefix("$ ")
            typed = language in ONLY_COMMANDS or line.strip().startswith("$ ") or OTHERS.match(SET.sub("", bare))
            if bare and typed and not (goes_on or n in found or bare.startswith("#")):
                out.append(f"{path.relative_to(root)}:{first + n}: {bare}")
            goes_on = line.rstrip().endswith("\\")
    return out


def _blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """(number of its first line, language, lines) of each code block; an indented one has the language ''."""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        if fence := FENCE.match(lines[i]):
            end = i + 1
            while end < len(lines) and lines[end].strip() != fence["mark"]:
                end += 1
            yield i + 2, fence["language"], [x.removeprefix(fence["indent"]) for x in lines[i + 1 : end]]
            i = end + 1
        elif lines[i].startswith("    ") and (i == 0 or not lines[i - 1].strip()):
            end = i
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield i + 1, "", [x[4:] for x in lines[i:end]]
            i = end
        else:
            i += 1


def _of(page: str, first: int, language: str, block: list[str]) -> Iterator[Step]:
    if block and (named := NAMED.match(block[0])):
        yield Step(page, first, "file", "\n".join(block) + "\n", named[1])
    elif language == "python":
        yield Step(page, first, "python", "\n".join(block) + "\n")
    elif language in SHELLS:
        yield from (Step(page, first + n, "command", line) for n, line in _commands(block))


def _commands(block: list[str]) -> Iterator[tuple[int, str]]:
    i = 0
    while i < len(block):
        begun, line = i, block[i].strip().removeprefix("$ ")
        while line.endswith("\\") and i + 1 < len(block):
            i += 1
            line = line[:-1].rstrip() + " " + block[i].strip()
        i += 1
        word = SET.sub("", line).split(" ")[0]
        if word in PROGRAMS or word.endswith(("bin/posttrain", "bin/python", "bin/pip")):
            yield begun, line


def _notebook(page: str, content: dict) -> Iterator[Step]:
    """The cells of code; a line that begins with `!` or `%pip` is a command."""
    for number, cell in enumerate(content["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        for line in lines:
            if line.startswith(("!", "%pip")):
                yield Step(page, number, "command", line[1:])
        code = "\n".join("" if line.startswith(("!", "%")) else line for line in lines)
        if code.strip():
            yield Step(page, number, "python", code + "\n")
