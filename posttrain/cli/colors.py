"""Colours of a terminal, and numbers of a table."""

from __future__ import annotations

import os
import sys

from posttrain.core.measure.interval import number_text

_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured() -> bool:
    """True where standard output shows colours (https://no-color.org is respected)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, on: bool) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on and colour else text


def number(x: float | None) -> str:
    """With three decimals, where it is of an ordinary size; - where there is none."""
    return "-" if x is None else number_text(x)
