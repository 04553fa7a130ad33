"""Lists the measurements: `python -m benchmarks`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SHELVES = ("speed", "parity", "trust", "learning", "miniatures")
SIDES = re.compile(r"(posttrain's|TRL's|transformers'|vLLM's|One) sides? of |One configuration of ")
"""How the description of a program begins that another one starts."""


def summary(path: Path) -> str:
    """The first sentence of a module's description."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")


def programs(shelf: str) -> Iterator[tuple[str, str]]:
    """(name for `python -m`, what it measures) of the programs of a shelf; of the miniatures the one that plays all."""
    folder = HERE / shelf
    if (folder / "__main__.py").is_file():
        yield f"benchmarks.{shelf}", summary(folder / "__main__.py")
        return
    for path in sorted(folder.glob("*.py")):
        what = summary(path)
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and not SIDES.match(what):
            yield f"benchmarks.{shelf}.{path.stem}", what


def main() -> None:
    for shelf in SHELVES:
        print(f"\n{shelf}: {summary(HERE / shelf / '__init__.py')}")
        for name, what in programs(shelf):
            print(f"  {name:<42} {what}")


if __name__ == "__main__":
    main()
