"""HTML as escaped text, and Markdown without HTML of its own.

>>> tag("p", "1 < 2", Markup("<b>so</b>"), id="x", hidden=True, title=None)
'<p id="x" hidden>1 &lt; 2<b>so</b></p>'
>>> markdown("**A** <script>")
'<p><strong>A</strong> &lt;script&gt;</p>\\n'
"""

from __future__ import annotations

import html
import json
from functools import cache
from typing import Any

# Elements without content and without an end tag.
VOID = ("input", "link", "meta", "br", "img")


class Markup(str):
    """Text that is HTML already. Everything else is escaped where it enters a page."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str | float | bool | None) -> Markup:
    """One element. An attribute that is None or False is left out.

    `_` in the name of an attribute is written `-`, and is left out at its end (`class_`).
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{html.escape(str(value))}"')
    opened = f"<{' '.join(words)}>"
    return Markup(opened if name in VOID else f"{opened}{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    """Parts after each other, escaped where they are not HTML."""
    # All text between tags enters a page here. Only text of the type `Markup` is HTML already.
    return Markup("".join(p if isinstance(p, Markup) else html.escape(p) for p in parts))


@cache
def _reader() -> Any:
    """The parser of Markdown, made once."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table")


def markdown(text: str) -> Markup:
    """Paragraphs, lists, tables, links and code; HTML in the text is shown as text."""
    return Markup(_reader().render(text))


def inline(text: str) -> Markup:
    """Markdown of one line, without a paragraph around it."""
    return Markup(_reader().renderInline(text))


def data(identity: str, value: Any) -> Markup:
    """Data that a script of the page reads. `</script>` cannot occur in it."""
    # A browser ends the element at the first `</script`, even in a JSON string, so every `<` is written as an escape.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{html.escape(identity)}">{text}</script>')


def document(title: str, *body: str, styles: tuple[str, ...], scripts: tuple[str, ...], language: str = "en") -> str:
    """A whole page. Scripts and styles are files of the same server; none is inside the page."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        *(tag("link", rel="stylesheet", href=s) for s in styles),
        *(tag("script", src=s, defer=True) for s in scripts),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang=language)}\n"
