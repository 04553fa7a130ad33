"""Pictures of what people see in a terminal: `python -m scripts.site.pictures [NAME ...]` runs each command in a
terminal of its own and draws what it printed into docs/pictures, beside the figures that a command draws itself. It
needs posttrain, and takes some minutes."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
INTO = ROOT / "docs/pictures"
COLUMNS = 92
DARK = (40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194)
LIGHT = (120, 128, 142), *DARK[1:], (255, 255, 255)
THEME = TerminalTheme((30, 33, 39), (220, 223, 228), [*DARK, (220, 223, 228)], list(LIGHT))
FONT = re.compile(r"@font-face \{.*?\}\s*", re.S)
"""rich's pictures ask another host for a font; these take the reader's own."""

WAITING = re.compile(r"[\u2801-\u28ff] ")
"""What a line begins with that only says that something is going on."""


@dataclass(frozen=True)
class Picture:
    """A command, and which of the lines that it prints are drawn."""

    name: str
    command: str
    first: int = 0
    last: int | None = None


BEFORE = (
    "posttrain run ladder --out runs/ladder",
    "posttrain run arithmetic rl.steps=12 --out runs/mine",
)
"""What the pictures show the results of."""
PICTURES = (
    Picture("first-run", "posttrain summary runs/ladder"),
    Picture("diff", "posttrain ladder --diff grpo dapo"),
    Picture("check", "posttrain check arithmetic"),
    Picture("show", "posttrain show runs/mine", last=30),
    Picture("compare", "posttrain ladder --on runs/mine --against dapo,maxrl,cispo"),
)
FIGURES = {"plot.svg": "posttrain plot runs/mine --out plot.svg"}
"""Files that a command draws, by name."""


def environment() -> dict[str, str]:
    """The variables of a terminal of `COLUMNS` columns, in which `posttrain` is that of this Python."""
    size = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    return kept | size | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def printed(command: str, folder: Path) -> str:
    """What a command prints in a terminal of `COLUMNS` columns."""
    ours, theirs = pty.openpty()
    environ = environment()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        out = bytearray()
        try:
            while piece := os.read(ours, 65536):
                out += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    if child.returncode not in (0, 1):
        raise SystemExit(f"{command} ended with {child.returncode}:\n{out.decode(errors='replace')}")
    return out.decode(errors="replace").replace("\r\n", "\n")


def drawn(picture: Picture, said: str) -> str:
    """The picture as SVG, with the command above what it printed."""
    lines = said.rstrip("\n").split("\n")
    shown = lines[picture.first : picture.last]
    if len(shown) < len(lines[picture.first :]):
        shown.append("...")
    texts = [text for line in shown if not WAITING.match((text := Text.from_ansi(line)).plain)]
    wide = max(80, *(text.cell_len for text in texts)) + 1
    console = Console(
        record=True, width=wide, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text(f"$ {picture.command}", style="bold"))
    for text in texts:
        console.print(text, no_wrap=True, overflow="crop")
    svg = console.export_svg(title="", theme=THEME, unique_id=picture.name)
    return FONT.sub("", svg).replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    INTO.mkdir(exist_ok=True)
    kept = os.environ.get("POSTTRAIN_PICTURES")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(kept or made)
        for command in BEFORE:
            if not (folder / command.rpartition(" ")[2]).exists():
                printed(command, folder)
        for picture in [p for p in PICTURES if p.name in sys.argv[1:] or not sys.argv[1:]]:
            svg = drawn(picture, printed(picture.command, folder))
            (INTO / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
            print(f"docs/pictures/{picture.name}.svg", flush=True)
        for name, command in FIGURES.items():
            if name.removesuffix(".svg") in sys.argv[1:] or not sys.argv[1:]:
                printed(command, folder)
                shutil.copyfile(folder / name, INTO / name)
                print(f"docs/pictures/{name}", flush=True)


if __name__ == "__main__":
    main()
