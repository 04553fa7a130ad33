"""Printing through rich: tables, the live line and our own colours. Text from elsewhere is shown as plain text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from posttrain.system.terminal_output import visible_lines

WIDEST = 10_000
"""Columns that a table may take where it is not drawn into a terminal."""


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    words: Collection[str],
    one_line: bool = False,
) -> Group:
    """A table in the form of every table that a command prints.

    It has no lines, so that it reads well in a log file, its title above it at the left, and two blanks between
    columns.

    Args:
        title: '' for none.
        words: the heads of columns of text, which stand at the left and are folded. All other columns are numbers,
            which stand at the right. A number stays whole; only a number with its interval is folded, at its blanks.
        one_line: whether text that is too long is cut instead of folded. It is for a table that is drawn again and
            again in the same place.
    """
    grid, rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), list(rows)
    for i, head in enumerate(heads):
        is_text = head in words
        folds = is_text or any("[" in str(row[i]) for row in rows if i < len(row))
        grid.add_column(head, justify="left" if is_text else "right", overflow="fold", no_wrap=one_line or not folds)
    for row in rows:
        grid.add_row(*row)
    return Group("", title, grid) if title else Group(grid)


def lines_of(drawn: Group) -> list[str]:
    """The lines of a table, none of them folded."""
    out = io.StringIO()
    PlainConsole(file=out, width=WIDEST).print(drawn)
    return [line.rstrip() for line in out.getvalue().splitlines()]


class PlainConsole(Console):
    """A console without markup, emoji codes and automatic highlighting. Unprintable characters are escaped.

    Our own words get a colour as `Text(word, style=...)`.
    """

    def __init__(self, **settings: Any) -> None:
        # force_jupyter: a notebook gets plain text too, and not the HTML that rich would write there.
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape plain strings, printed or in a table; rich calls this before the layout."""
        return super().render_str(
            visible_lines(text), **{**settings, "markup": False, "emoji": False, "highlight": False}
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all other output; control codes that rich itself writes are marked as such and kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)
