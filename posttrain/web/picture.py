"""The kinds of pictures that a page can show, as data. The front end draws them; nothing here knows HTML or a browser.

Each picture has a title and gives its numbers as a table. A value of None is a gap.

>>> Bars("Credit", ("a", "b"), {"grpo": (0.5, -0.5)}).table()
(('', 'grpo'), [('a', '0.5'), ('b', '-0.5')])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""(column names, rows), all as text."""

Tone = Literal["plain", "good", "bad", "mute", "one", "two", "three", "four"]
"""Meaning of a colour. `good` and `bad` also differ by form, for people who do not see the colours."""


def number(x: float | None, digits: int = 4) -> str:
    """A number with at most `digits` significant digits.

    >>> [number(x) for x in (0.5, 1234567.0, 1e-9, None, math.nan)]
    ['0.5', '1,234,567', '1e-09', '', 'not a number']
    """
    if x is None:
        return ""
    if not math.isfinite(x):
        return "not a number" if math.isnan(x) else "infinite" if x > 0 else "-infinite"
    if abs(x) >= 10**digits:
        return f"{x:,.0f}"
    return f"{x:.{digits}g}"


def _plain(x: Any) -> Any:
    """A value as JSON. Floats have five significant digits, and those that are not finite are None."""
    # A browser parses no NaN and no infinity. Five digits are more than a picture can show, and keep pages small.
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, Sequence) and not isinstance(x, str):
        return [_plain(v) for v in x]
    return _plain(x.item()) if isinstance(x, np.generic) else x


@dataclass(frozen=True)
class Picture:
    """The base of all pictures."""

    title: str

    def table(self) -> Table:
        """The numbers of the picture."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """The picture as the front end reads it, with its table."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data = {"kind": type(self).__name__.lower(), **fields}
        if not isinstance(self, Bars | Curve):
            # The table of bars and curves has the same numbers as their series. Sent twice, they would double the page.
            data["columns"], data["rows"] = self.table()
        return _plain(data)


@dataclass(frozen=True)
class Bars(Picture):
    """One group of bars for each label, one bar in it for each series."""

    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    unit: str = ""
    low: float | None = None
    """The ends of the axis; None: by the values, with 0 among them."""
    high: float | None = None
    marks: Mapping[str, float] | None = None
    """Lines across the bars, by name."""

    def table(self) -> Table:
        rows = [(str(x), *(number(ys[i]) for ys in self.series.values())) for i, x in enumerate(self.labels)]
        return ("", *self.series), rows


@dataclass(frozen=True)
class Curve(Picture):
    """Lines over one axis."""

    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    x_label: str = "step"
    y_label: str = ""
    low: float | None = None
    """The ends of the axis of y; None: by the values."""
    high: float | None = None
    log: bool = False
    """Whether the axis of x is logarithmic."""
    at: float | None = None
    """A place on the axis of x that a knob names."""

    def table(self) -> Table:
        rows = [(number(x), *(number(ys[i]) for ys in self.series.values())) for i, x in enumerate(self.x)]
        return (self.x_label, *self.series), rows


@dataclass(frozen=True)
class TextTile:
    """One token or cell: its text, what its colour means, and a number below it."""

    text: str
    tone: Tone = "plain"
    value: float | None = None
    level: float | None = None
    """-1 to 1: how strong the colour is; negative is the other colour. None: the tone alone."""
    note: str = ""
    """Text that a pointer or the keyboard shows."""


@dataclass(frozen=True)
class Tiles(Picture):
    """Rows of tiles, such as the tokens of one answer each."""

    rows_of: Mapping[str, Sequence[TextTile]]
    key: Mapping[Tone, str] | None = None
    """Meaning of each tone."""

    def table(self) -> Table:
        rows = [
            (name, t.text, number(t.value), (self.key or {}).get(t.tone, ""), t.note)
            for name, tiles in self.rows_of.items()
            for t in tiles
        ]
        return ("row", "text", "value", "meaning", "note"), rows

    def as_json(self) -> dict[str, Any]:
        # Lists instead of objects, because a page has thousands of tiles, and the names of fields would be most of its
        # size.
        plain = {n: [[t.text, t.tone, t.value, t.level, t.note] for t in ts] for n, ts in self.rows_of.items()}
        columns, rows = self.table()
        return _plain(
            {"kind": "tiles", "title": self.title, "rows_of": plain, "key": self.key, "columns": columns, "rows": rows}
        )


@dataclass(frozen=True)
class Branch:
    """A node of a tree with what lies below it."""

    text: str
    tone: Tone = "plain"
    value: float | None = None
    below: Sequence[Branch] = ()

    def rows(self, depth: int = 0) -> list[tuple[str, ...]]:
        """This node and all below it, with their depth."""
        first = (str(depth), self.text, number(self.value))
        return [first, *(row for branch in self.below for row in branch.rows(depth + 1))]

    def as_json(self) -> list[Any]:
        return [self.text, self.tone, self.value, [b.as_json() for b in self.below]]


@dataclass(frozen=True)
class Tree(Picture):
    """A tree that grows to the right."""

    root: Branch
    key: Mapping[Tone, str] | None = None

    def table(self) -> Table:
        return ("depth", "node", "value"), self.root.rows()

    def as_json(self) -> dict[str, Any]:
        columns, rows = self.table()
        plain = {"kind": "tree", "title": self.title, "root": self.root.as_json(), "key": self.key}
        return _plain(plain | {"columns": columns, "rows": rows})


@dataclass(frozen=True)
class Gantt(Picture):
    """A chart of events in time: for each lane its spans (start, end, text, tone)."""

    lanes: Mapping[str, Sequence[tuple[float, float, str, Tone]]]
    unit: str = "s"
    key: Mapping[Tone, str] | None = None
    now: float | None = None
    """A moment that is marked."""

    def table(self) -> Table:
        rows = [(lane, text, number(a), number(b)) for lane, spans in self.lanes.items() for a, b, text, _ in spans]
        return ("lane", "what", f"from ({self.unit})", f"to ({self.unit})"), rows


@dataclass(frozen=True)
class Matrix(Picture):
    """A table of cells, coloured by value between `low` and `high`; `texts` stands in place of the numbers."""

    across: Sequence[str]
    down: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]] | None = None
    low: float | None = None
    high: float | None = None
    chosen: tuple[int, int] | None = None
    """(row, column) of the cell that the knobs name."""

    def table(self) -> Table:
        cells = self.texts or [[number(x) for x in row] for row in self.values]
        return ("", *self.across), [(str(name), *map(str, row)) for name, row in zip(self.down, cells, strict=True)]
