"""Text on a screen: lines that are wrapped and never cut (wide characters are two columns), colours, numbers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

from posttrain.core.measure.number_text import number_text
from posttrain.system.terminal_output import visible

NARROWEST = 40
"""The fewest columns that text is laid out for."""
LOG_WIDTH = 80
"""Columns where the output is no terminal and COLUMNS is not set: a file, a pipe."""


def screen_width() -> int:
    """Columns of the terminal; COLUMNS decides where it is set, and 80 where there is no terminal."""
    return max(NARROWEST, shutil.get_terminal_size((LOG_WIDTH, 24)).columns)


def cells(text: str) -> int:
    """Columns that a text takes."""
    # Nearly all text is ASCII, where each character takes one column.
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fold(text: str, width: int) -> Iterator[str]:
    """One line of text as lines of at most `width` columns, broken at spaces where there are any.

    >>> list(fold("one two three", 8))
    ['one two', 'three']
    """
    # More than 2 * width characters are nearly always too wide, and not measured again as a whole for each line.
    while len(text) > 2 * width or cells(text) > width:
        fits = _fitting(text, width)
        # Characters without a width, such as combining marks, may make a long text narrow.
        if fits == len(text):
            break
        # Broken at the last space that fits; else, or if only spaces are before it, cut where the line ends.
        at = text.rfind(" ", 1, fits + 1)
        at = at if text[:at].strip() and at > 0 else fits
        yield text[:at].rstrip()
        text = text[at:].lstrip(" ")
    yield text


def _fitting(text: str, width: int) -> int:
    """Number of characters of the text that fit into `width` columns; at least 1."""
    # `fold` asks only of a text that is wider than `width`.
    if text.isascii():
        return width
    taken = 0
    for i, c in enumerate(text):
        taken += cells(c)
        if taken > width:
            return max(1, i)
    return len(text)


def folded(text: str, width: int, most: int = 0, hint: str = "") -> Iterator[str]:
    """Foreign text in lines of at most `width` columns; its own line breaks stay. `most`: of more lines than this (0:
    none) only the beginning and the end are shown, and between them how many are left out, followed by `hint`.

    >>> list(folded("a\\nb\\nc\\nd\\ne", 40, 4))
    ['a', 'b', '(2 lines left out)', 'e']
    """
    lines = [part for line in text.split("\n") for part in fold(visible(line), width)]
    if not most or len(lines) <= most:
        yield from lines
        return
    # One line says what is left out. Of the others a third is for the end of the text, and the rest for its beginning.
    tail = max(1, (most - 1) // 3)
    head = most - 1 - tail
    yield from lines[:head]
    yield from fold(f"({len(lines) - head - tail} lines left out{hint})", width)
    yield from lines[-tail:]


def hanging(lead: str, text: str, width: int) -> Iterator[str]:
    """A text after its lead, such as `said: `. Further lines are indented, so that they begin below the text.

    >>> list(hanging("said: ", "one two three four five", 26))
    ['said: one two three four', '      five']
    """
    # A long lead may leave no room: the lines are then wider than `width`.
    room = max(NARROWEST // 2, width - cells(lead))
    for i, line in enumerate(folded(text, room)):
        yield (lead if i == 0 else " " * cells(lead)) + line


_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured() -> bool:
    """True where standard output shows colours (https://no-color.org is respected)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, colours_on: bool) -> str:
    """The text in a colour of `_CODES`, if `colours_on`; colour '' changes nothing."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if colours_on and colour else text


def number(x: float | None) -> str:
    """A number with three decimals, if it has an ordinary size; `-` for None."""
    return "-" if x is None else number_text(x)
