"""The one way to a terminal through rich: tables, a live line and colours of ours; foreign text in them is shown as
text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from posttrain.core.visible import visible_lines


class PlainConsole(Console):
    """A console without markup, emoji codes and guesses at what to highlight; what is not printable is written out.

    Words of ours get a colour as `Text(word, style=...)`.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Every plain string that is printed, or lies in a table, comes by here before it is laid out."""
        return super().render_str(visible_lines(text), **{**how, "markup": False, "emoji": False, "highlight": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else comes by here; control codes that rich itself writes are segments of their own kind."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)
