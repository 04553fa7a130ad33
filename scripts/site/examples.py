"""What the examples print: `python -m scripts.site.examples [NAME ...]` runs the commands of each example in a copy of
its folder, in their order, and writes what they said to the end of its page. It needs posttrain and many minutes.

What a page takes from the hub, a model or a data set, is stood in for as in tests/first_hour, and the page says so."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from shlex import quote

from scripts.site.notebooks import WARNED, plain
from scripts.site.pictures import environment, printed
from tests.first_hour.pages import Step, steps
from tests.first_hour.play import WRITES
from tests.first_hour.serving import SERVES, Serving
from tests.first_hour.words import exempt, put_in, smaller

ROOT = Path(__file__).parents[2]
TITLE = "## What it prints"
SAID = (
    "Written by `python -m scripts.site.examples` on two shared cores. Seconds differ from machine to machine, and"
    " other processors\nround other last digits. Long output is cut."
)
STANDS = (
    "In place of the model and the data set of the hub stand a tiny model with random weights and generated problems,"
    " and the sizes are small:\neach command is shown with what was run for it. So the accuracies say nothing about"
    " the model; the lines are those that you will see."
)
LEFT_OUT = re.compile(r"curl|pip ")
"""Commands that need the network."""
FIRST, LAST = 8, 24
"""Lines of a command's output that are kept, of its beginning and of its end."""
LISTENS_WITHIN = 120.0


def section(path: Path) -> str:
    """The last section of an example's page: its commands with what they print."""
    out, stood = list[str](), False
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / path.parent.name
        shutil.copytree(path.parent, folder)
        for step, typed, said in played(path, folder):
            stood |= typed != step.text
            out += [f"$ {step.text}", *([f"# run as: {typed}"] if typed != step.text else [])]
            out += cut(WARNED.sub("", f"{plain(said)}\n").replace(made, "..."), 0 if stood else LAST)
    return "\n".join([TITLE, "", SAID, *(["", STANDS] if stood else []), "", "```output", *out, "```", ""])


def played(path: Path, folder: Path) -> Iterator[tuple[Step, str, str]]:
    """Each command with what was typed in its place and what it printed. Variables that are exported stay set, and a
    server goes on until the page ends."""
    found, exported, server = steps(path, ROOT), "", None
    stood_in = any(put_in(s.text, folder) != s.text for s in found)
    if stood_in:
        given(folder)
    try:
        for step in found:
            if step.kind != "command" or LEFT_OUT.match(step.text) or exempt(step.page, step.text):
                continue
            typed = smaller(put_in(step.text, folder / "runs")) if stood_in else step.text
            if (target := WRITES.search(typed)) and (folder / target[1]).is_dir():
                shutil.rmtree(folder / target[1])  # what stood in for the reader's own makes room
            if typed.startswith("export "):
                exported += f"{typed}; "
                yield step, typed, ""
            elif SERVES.match(typed):
                server = Serving(f"bash -c {quote(f'{exported}exec {typed}')}", folder, environment())
                if not server.listens(LISTENS_WITHIN):
                    raise SystemExit(f"{step}: it does not listen:\n{server.said}")
                yield step, typed, server.said
            else:
                yield step, typed, printed(exported + typed, folder)
    finally:
        if server is not None:
            server.end()


def given(folder: Path) -> None:
    """A model and problems in the example's folder, as tests/first_hour takes them for granted."""
    with tempfile.TemporaryDirectory() as made:
        code = [sys.executable, str(ROOT / "tests/first_hour/given.py")]
        subprocess.run(code, cwd=made, env=environment(), check=True, stdout=subprocess.DEVNULL)
        for name in ("my-model", "problems.jsonl"):
            shutil.move(Path(made) / name, folder / name)


def cut(text: str, last: int = LAST) -> list[str]:
    """The first lines, and as many whole paragraphs of the end as `last` lines hold; lines without a word between
    paragraphs go. Of what stands for something else the end says little, so there `last` is 0."""
    parts = [list(p) for filled, p in groupby(text.split("\n"), lambda x: bool(x.strip())) if filled]
    lines = [line for part in parts for line in part]
    if len(lines) <= FIRST + LAST:
        return lines
    kept = list[str]()
    for part in reversed(parts):
        if len(part) + len(kept) > last:
            break
        kept = [*part, *kept]
    return [*lines[:FIRST], "...", *(kept or lines[len(lines) - last :])]


def main() -> None:
    chosen = sys.argv[1:]
    for path in sorted((ROOT / "examples").glob("*/README.md")):
        if chosen and path.parent.name not in chosen:
            continue
        said = section(path)
        before = path.read_text(encoding="utf-8").partition(f"\n{TITLE}\n")[0].rstrip("\n")
        path.write_text(f"{before}\n\n{said}", encoding="utf-8")
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
