"""The table of contents: every lesson below `lessons/`, read from the files without importing them.

A lesson imports the library, and that takes seconds. The map needs titles alone, so they are read as text.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from posttrain.lab.lesson import Lesson
from posttrain.system.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "lessons"
LISTED = ("number", "name", "title", "part", "force", "minutes", "question", "missing", "pace")
PARTS = ("the framework", "the algorithms", "production", "the engineer", "synthesis", "the ladder")
FORCES = {
    "signal": "what says that an answer is good",
    "estimator": "how a gradient is made of it",
    "cost": "the time and the machines that it takes",
}
WAYS = {
    "researcher": ("01", "02", "03", "04", "11", "12", "14", "13", "15", "16", "18", "24"),
    "engineer": ("02", "06", "07", "08", "19", "20", "21", "22b", "22c", "25"),
}
"""Two ways through: the numbers of their pages, in order. A page that is not there yet is left out."""
MAP = ("00", "map")
"""Number and name of the map, which is no lesson."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The map's entry of a lesson."""

    number: str
    name: str
    title: str
    part: str
    force: str
    minutes: int
    question: str
    missing: str = ""
    pace: str = "live"
    module: str

    @property
    def whole(self) -> bool:
        return not self.missing


def _entry(path: Path) -> Entry | None:
    """The entry of a file; None where it has no LESSON."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["LESSON"]:
            assert isinstance(node.value, ast.Call), f"{path.name}: LESSON = Lesson(...)"
            given = {k.arg: ast.literal_eval(k.value) for k in node.value.keywords if k.arg in LISTED}
            parts = path.relative_to(FOLDER.parents[1]).with_suffix("").parts
            return Entry(**given, module=".".join(("posttrain", *parts)))
    return None


def order(number: str) -> tuple[int, int, str]:
    """Returns the key that sorts lesson numbers: 01 to 28 with their letters, then L1 to L6.

    >>> sorted(["L1", "22a", "03", "22"], key=order)
    ['03', '22', '22a', 'L1']
    """
    parts = re.fullmatch(r"(L?)(\d+)(\w*)", number)
    assert parts, number
    return (bool(parts[1]), int(parts[2]), parts[3])


@cache
def entries() -> tuple[Entry, ...]:
    """All lessons, in the order of their numbers."""
    listed = [e for path in sorted(FOLDER.rglob("*.py")) if (e := _entry(path)) is not None]
    return tuple(sorted(listed, key=lambda e: order(e.number)))


def way(name: str) -> tuple[Entry, ...]:
    """The pages of a way, in its order."""
    known = {e.number: e for e in entries()}
    return tuple(known[n] for n in WAYS[name] if n in known)


def find(word: str) -> Entry:
    """The lesson with this number or name. Raises ConfigError with the nearest ones."""
    wanted = word.lower().strip()
    for e in entries():
        if wanted in (e.number.lower(), e.number.lower().lstrip("0"), e.name):
            return e
    known = [w for e in entries() for w in (e.number, e.name)]
    raise ConfigError(f"there is no page {word}; {nearest(wanted, known)}. posttrain lab --list prints them all")


@cache
def load(name: str) -> Lesson:
    """The lesson itself; imports what it computes with."""
    return import_module(find(name).module).LESSON
