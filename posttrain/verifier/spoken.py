"""What of a response is said to its reader: its thoughts are not, in every reward that looks for an answer."""

from __future__ import annotations

import re

_CLOSED = re.compile(r"(?<![\"'`])</think>")
_OPENED = re.compile(r"(?<![\"'`])<think>")


def spoken(text: str) -> str:
    """What comes after the last `</think>`, up to a `<think>` that never ends. A tag in quotes is text.

    >>> spoken("<think>3?</think>It is 4.<think>or"), spoken("tags = ['<think>']")
    ('It is 4.', "tags = ['<think>']")
    """
    ends = [match.end() for match in _CLOSED.finditer(text)]
    text = text[ends[-1] :] if ends else text
    opened = _OPENED.search(text)
    return text[: opened.start()] if opened else text
