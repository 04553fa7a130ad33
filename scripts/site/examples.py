"""What the examples print: `python -m scripts.site.examples [NAME ...]` runs the commands of each example in a copy of
its folder, as printed, and writes what they said to the end of its page. It needs posttrain, and takes some minutes."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.site.notebooks import plain
from scripts.site.pictures import printed
from tests.first_hour.pages import steps
from tests.first_hour.words import exempt

ROOT = Path(__file__).parents[2]
TITLE = "## What it prints"
SAID = (
    "Written by `python -m scripts.site.examples` on two shared cores. Seconds differ from machine to machine, and"
    " other processors\nround other last digits. Long output is cut."
)
LEFT_OUT = re.compile(r"posttrain serve|python ask\.py|curl|pip ")
"""Commands that need another terminal, or the network."""
FIRST, LAST = 8, 22
"""Lines of a command's output that are kept."""


def section(path: Path) -> str:
    """The last section of an example's page: its commands with what they print."""
    out = [TITLE, "", SAID, "", "```output"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / path.parent.name
        shutil.copytree(path.parent, folder)
        for step in steps(path, ROOT):
            if step.kind == "command" and not LEFT_OUT.match(step.text) and not exempt(step.page, step.text):
                out += [f"$ {step.text}", *cut(plain(printed(step.text, folder)).replace(made, "..."))]
    return "\n".join([*out, "```", ""])


def cut(text: str) -> list[str]:
    lines = [line for line in text.split("\n") if line.strip()]
    return lines if len(lines) <= FIRST + LAST else [*lines[:FIRST], "...", *lines[-LAST:]]


def main() -> None:
    chosen = sys.argv[1:]
    for path in sorted((ROOT / "examples").glob("*/README.md")):
        if chosen and path.parent.name not in chosen:
            continue
        said = section(path)
        if "\n$ " in said:
            before = path.read_text(encoding="utf-8").partition(f"\n{TITLE}\n")[0].rstrip("\n")
            path.write_text(f"{before}\n\n{said}", encoding="utf-8")
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
