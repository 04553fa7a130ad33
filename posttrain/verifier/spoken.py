"""The part of a response outside its thoughts. Every reward that looks for an answer reads this part only."""

from __future__ import annotations

import re

_CLOSED = re.compile(r"(?<![\"'`])</think>")
_OPENED = re.compile(r"(?<![\"'`])<think>")


def spoken(text: str) -> str:
    """The text after the last `</think>`, up to a `<think>` that is not closed. A tag in quotes is plain text.

    >>> spoken("<think>3?</think>It is 4.<think>or"), spoken("tags = ['<think>']")
    ('It is 4.', "tags = ['<think>']")
    """
    ends = [match.end() for match in _CLOSED.finditer(text)]
    text = text[ends[-1] :] if ends else text
    opened = _OPENED.search(text)
    return text[: opened.start()] if opened else text
