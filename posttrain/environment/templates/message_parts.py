"""Messages of several parts in chat templates: which templates read parts, and how special tokens' names are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.content import Content, ContentPart, mapped
from posttrain.core.types import Message
from posttrain.environment.templates import template_process
from posttrain.system.errors import PosttrainError

TEXTS = ("first part", "second part")
"""Texts of the message that tests whether a template reads parts."""


def read_by(tokenizer: Any) -> bool:
    """Returns whether the tokenizer's template writes each text of a list of parts. Other templates refuse the list,
    lose some of it, or print the list itself."""
    probe = Message(role="user", content=tuple(ContentPart("text", text) for text in TEXTS))
    try:
        written = template_process.apply(tokenizer, [probe], generate=False)
    except PosttrainError:
        raise
    except Exception:  # a template may raise anything it likes
        return False
    return all(written.count(text) == 1 for text in TEXTS) and "'type'" not in written and '"type"' not in written


def shielded(found: Content, specials: Sequence[str], shield: str) -> Content:
    """The content with `shield` inside each special token's name, also if the name spans two parts.

    A template may trim each part, and so join what white space kept apart. So every later part begins with a `shield`,
    behind its own white space, which is then trimmed as before.
    """

    def cut(text: str) -> str:
        for special in specials:
            text = text.replace(special, f"{special[0]}{shield}{special[1:]}")
        return text

    whole = mapped(found, cut)
    if isinstance(whole, str):
        return whole
    out: list[ContentPart] = []
    before = ""
    for part in whole:
        at, joined = len(before), before + part.text
        # A name that begins in the parts before and ends in this one: the window has len(s) - 1 characters on
        # both sides of the border.
        meets = any(joined.find(s, max(0, at - len(s) + 1), at + len(s) - 1) >= 0 for s in specials)
        if part.type == "text" and out:
            body = part.text.lstrip()
            part = ContentPart("text", part.text[: len(part.text) - len(body)] + shield + body)
        out.append(ContentPart("text", shield + part.text) if meets else part)
        before += out[-1].text
    return tuple(out)
