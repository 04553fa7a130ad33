"""Printing through rich: tables, the live line and our own colours. Text from elsewhere is shown as plain text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from posttrain.core.visible import visible_lines


class PlainConsole(Console):
    """A console without markup, emoji codes and automatic highlighting. Unprintable characters are escaped.

    Our own words get a colour as `Text(word, style=...)`.
    """

    def __init__(self, **how: Any) -> None:
        # in a notebook too: its HTML output would not be text of ours
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Escape plain strings, printed or in a table; rich calls this before the layout."""
        return super().render_str(visible_lines(text), **{**how, "markup": False, "emoji": False, "highlight": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all other output; control codes that rich itself writes are marked as such and kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)
