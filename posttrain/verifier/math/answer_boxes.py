"""The boxes of a response: `\\boxed{...}` and `\\fbox{...}`, found in linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
"""A whole number, with or without commas between its thousands."""
_BRACE = re.compile(
    r"\\(?:boxed|fbox)\s*\{"
    r"|\\(?:boxed|fbox)(?![A-Za-z])\s*(\\[dt]?frac(?:\s?\d\s?\d|\{[^{}\n]{1,60}\}\{[^{}\n]{1,60}\})"
    rf"|[-+−]?{DIGITS}(?:\.\d+)?|[A-Za-z](?![A-Za-z]))"
    r"|\\[\\{}]|[{}]"
)


@dataclass(frozen=True)
class Box:
    """A complete box: where its command begins, where it ends, and what is in it."""

    start: int
    end: int
    text: str


def boxes_of(text: str) -> tuple[list[Box], bool]:
    """The complete outermost boxes, in the order of their ends, and whether a box after them is never closed."""
    stack: list[tuple[int, int, bool]] = []
    inside, out = 0, list[Box]()
    if "\\boxed" not in text and "\\fbox" not in text:
        return out, False
    for match in _BRACE.finditer(text):
        token = match.group()
        if match[1] is not None:
            if not inside:
                out.append(Box(match.start(), match.end(), match[1]))
            continue
        if len(token) == 2 and token[0] == "\\":
            continue
        if token != "}":
            box = token != "{"
            stack.append((match.start(), match.end(), box))
            inside += box
        elif stack:
            command, start, box = stack.pop()
            inside -= box
            if box and not inside:
                out.append(Box(command, match.end(), text[start : match.start()]))
    return out, inside > 0
