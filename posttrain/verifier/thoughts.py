"""Separates the thoughts of a response from the rest. All rewards, judges, votes and parsers of calls use this file."""

from __future__ import annotations

import re
from collections.abc import Iterator

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))
"""Pairs of the tag that begins a thought and the tag that ends it."""
_END_OF = dict(THOUGHTS)  # From the tag that begins a thought to the one that ends it.
_TAG = re.compile("|".join(re.escape(tag) for pair in THOUGHTS for tag in pair))
_BEFORE = re.compile(r"(?:(?<![\w.,!?)\]}])|(?<=\b[bfrBFR]))([\"'`])\1*\Z")
"""Equal quotes directly before a tag, which begin a quotation. A quote behind a word (`x'`) ends one and does not
match, except behind the prefix of a Python string (`b'`)."""
_AFTER = re.compile(r"([\"'`])\1*")
"""Equal quotes directly behind a tag."""


def tags(text: str) -> Iterator[re.Match[str]]:
    """The tags of thoughts in order, without quoted ones: those with the same one or two quotes on both sides."""
    for tag in _TAG.finditer(text):
        # A tag between equal quotes is only mentioned. Four characters are enough to tell one or two quotes from the
        # three of a fence of code.
        before = _BEFORE.search(text, max(0, tag.start() - 4), tag.start())
        after = _AFTER.match(text, tag.end(), tag.end() + 4)
        if before is None or after is None or before[0] != after[0] or len(before[0]) > 2:
            yield tag


def thoughts(text: str) -> tuple[str, str]:
    """(thoughts, the rest) of a response.

    If the first tag of the text ends a thought, the prompt began that thought. A later tag that ends a thought while
    none is open is plain text. A thought that is not ended lasts to the end of the text.

    >>> thoughts("3?</think>It is 4.<think>or"), thoughts("tags = ['<think>']"), thoughts('<think>"3"</think>4')
    (('3?or', 'It is 4.'), ('', "tags = ['<think>']"), ('"3"', '4'))
    """
    pieces: tuple[list[str], list[str]] = ([], [])
    at, end = 0, ""
    # `end` is the tag that ends the open thought, or '' outside of thoughts. Inside a thought only that tag counts.
    # Outside, a tag that begins a thought counts, and the very first tag also if it ends one.
    for tag in tags(text):
        first = not (pieces[0] or pieces[1])
        if tag[0] != end and (end or (tag[0] not in _END_OF and not first)):
            continue
        # The text before a tag that begins a thought was said (`pieces[1]`), that before one that ends it was thought.
        pieces[not end and tag[0] in _END_OF].append(text[at : tag.start()])
        at, end = tag.end(), "" if end else _END_OF.get(tag[0], "")
    pieces[not end].append(text[at:])
    return "".join(pieces[0]), "".join(pieces[1])


def whole(text: str) -> str:
    """The text with the tag that opens its first thought, which the prompt may have written.

    >>> whole("3?</think>4"), whole("4")
    ('<think>\\n3?</think>4', '4')
    """
    first = next(tags(text), None)
    begin = next((b for b, e in THOUGHTS if first is not None and e == first[0]), "")
    return f"{begin}\n{text.lstrip()}" if begin else text


def spoken(text: str) -> str:
    """The text outside thoughts."""
    return thoughts(text)[1]
