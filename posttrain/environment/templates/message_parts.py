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
    """Returns whether the template writes each text of a list of parts. Others refuse it, lose some, or print it."""
    probe = Message(role="user", content=tuple(ContentPart("text", text) for text in TEXTS))
    try:
        written = template_process.apply(tokenizer, [probe], generate=False)
    except PosttrainError:
        raise
    except Exception:  # a template may raise anything it likes
        return False
    return all(written.count(text) == 1 for text in TEXTS) and "'type'" not in written and '"type"' not in written


def shielded(content: Content, specials: Sequence[str], shield: str) -> Content:
    """The content with `shield` inside each special token's name, also if the name spans two parts.

    A template may trim each part, and then a name could form across two parts. So every part after the first begins
    with a `shield`, behind its own white space, which the template trims as before.
    """

    def cut(text: str) -> str:
        for special in specials:
            text = text.replace(special, f"{special[0]}{shield}{special[1:]}")
        return text

    whole = mapped(content, cut)
    if isinstance(whole, str):
        return whole
    shielded_parts: list[ContentPart] = []
    text_before = ""
    for part in whole:
        if part.type == "text" and shielded_parts:
            border, joined = len(text_before), text_before + part.text
            # A name may begin in the parts before: it is searched in len(s) - 1 characters on each side of the border.
            spans_border = any(joined.find(s, max(0, border - len(s) + 1), border + len(s) - 1) >= 0 for s in specials)
            body = part.text.lstrip()
            # A name that spans the border may end inside the white space, such as `<|a|>` with a line feed. The shield
            # behind the white space would leave it whole, so one stands in front too.
            in_front = shield if spans_border else ""
            part = ContentPart("text", in_front + part.text[: len(part.text) - len(body)] + shield + body)
        shielded_parts.append(part)
        text_before += part.text
    return tuple(shielded_parts)
