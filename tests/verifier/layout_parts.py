"""Tables of responses as language models write them: what each row is scored, and how a table is read.

A table is text. A row begins with `=== name | target`; what follows, to the next row, is the response, letter for
letter. For the math reward the target is the gold answer, or several (`;;` between them), each a case of its own. For
the code reward it is the name of a task in `TASKS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "layouts"


def table(*names: str) -> list[Any]:
    """The rows of tables as test cases (target, response). The `second` ones were written when all of the first
    held."""
    return [case for name in names for case in _rows(name)]


def _rows(name: str) -> list[Any]:
    text = (FOLDER / f"{name}.txt").read_bytes().decode()
    assert text.startswith("=== "), name
    cases: list[Any] = []
    for row in text[4:].split("\n=== "):
        head, _, response = row.partition("\n")
        title, _, targets = head.partition(" | ")
        assert targets, f"{name}: the row {head!r} names no target"
        more = "2 " if "second" in name else ""
        cases += [pytest.param(t, response, id=f"{more}{title}-{t}") for t in targets.split(" ;; ")]
    return cases


def calls(function: str, *pairs: tuple[list[Any], Any]) -> list[dict[str, Any]]:
    return [{"function": function, "args": args, "expected": expected} for args, expected in pairs]


TASKS: dict[str, list[Any]] = {
    "add": calls("add", ([1, 2], 3), ([5, -2], 3), ([0, 0], 0)),
    "asserted": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "biggest": calls("biggest", ([[3, 9, 2]], 9), ([[-1]], -1)),
    "counts": calls("counts", (["aab"], {"a": 2, "b": 1})),
    "ends": ["assert ends([3, 9, 2]) == (2, 9)"],
    "even": calls("even", ([4], True), ([5], False)),
    "grid": calls("grid", ([2], [[1, 0], [0, 1]])),
    "io": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 5\n", "stdout": "15\n"}],
    "least": calls("least", ([4, 2], 2), ([1, 7], 1)),
    "letters": calls("letters", (["ab"], ["a", "b"])),
    "mean": calls("mean", ([[1, 2, 3, 4]], 2.5), ([[1.5]], 1.5)),
    "positive": calls("positive", ([[1, -1, 0]], [True, False, False])),
    "root": calls("root", ([10], 3), ([16], 4)),
    "scale": calls("scale", ([[1, 2, 3], 2], [2, 4, 6]), ([[0, 5, 1], 3], [0, 15, 3])),
    "total": calls("Solution.total", ([[1, 2, 3]], 6), ([[]], 0)),
    "where": calls("where", ([[3, 9, 2], 9], 1)),
}
