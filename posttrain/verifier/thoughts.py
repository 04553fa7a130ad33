"""The thoughts of a response, and the text outside them. Every reward, judge, vote, form and parser of calls reads
thoughts here."""

from __future__ import annotations

import re
from collections.abc import Iterator

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))
_ENDS = dict(THOUGHTS)
_TAG = re.compile("|".join(re.escape(tag) for pair in THOUGHTS for tag in pair))
_BEFORE = re.compile(r"(?:(?<![\w.,!?)\]}])|(?<=\b[bfrBFR]))([\"'`])\1*\Z")
"""Quotes that begin a quotation. Those behind a word end one, and three are a fence."""
_AFTER = re.compile(r"([\"'`])\1*")


def tags(text: str) -> Iterator[re.Match[str]]:
    """The tags of thoughts, without those that have the same quotes on both sides."""
    for tag in _TAG.finditer(text):
        # A tag between equal quotes is spoken about and not used. Four characters are enough to tell one or two quotes
        # from the three of a fence.
        before = _BEFORE.search(text, max(0, tag.start() - 4), tag.start())
        after = _AFTER.match(text, tag.end(), tag.end() + 4)
        if before is None or after is None or before[0] != after[0] or len(before[0]) > 2:
            yield tag


def thoughts(text: str) -> tuple[str, str]:
    """(thoughts, the rest). A first tag that ends a thought ends one that the prompt began; later ones are plain text
    unless a thought is open. A thought that is not ended is all of the text after its tag.

    >>> thoughts("3?</think>It is 4.<think>or"), thoughts("tags = ['<think>']"), thoughts('<think>"3"</think>4')
    (('3?or', 'It is 4.'), ('', "tags = ['<think>']"), ('"3"', '4'))
    """
    pieces: tuple[list[str], list[str]] = ([], [])
    at, end = 0, ""
    # `end` is the tag that ends the open thought, '' outside of thoughts. Inside, only that tag counts; outside, a tag
    # that begins a thought, or as the very first one a tag that ends it, since the prompt may have begun it.
    for tag in tags(text):
        first = not (pieces[0] or pieces[1])
        if tag[0] != end and (end or (tag[0] not in _ENDS and not first)):
            continue
        # What stands before a beginning tag was said (piece 1), and before an ending one thought (piece 0).
        pieces[not end and tag[0] in _ENDS].append(text[at : tag.start()])
        at, end = tag.end(), "" if end else _ENDS.get(tag[0], "")
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
