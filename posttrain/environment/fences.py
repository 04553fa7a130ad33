"""The program of a response: what stands in its fenced blocks, as CommonMark reads them."""

from __future__ import annotations

import re

OPEN = re.compile(r"(?P<fence>`{3,})[ \t]*(?P<language>\w*)[^\n`]*\n")
BEFORE = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)*")
"""What may stand before an opening fence so that the block is as far in: white space and marks of lists, no words."""
LINE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,})[ \t]*(?P<more>[^\n]*)$", re.MULTILINE)
DEEPER = 3
"""Columns that a closing fence may stand further in than its opening one; further in it belongs to the program (a docstring's)."""
PYTHON = ("python", "py", "python3")


def program_in(text: str) -> str:
    """The last block marked as Python, else the last block, else the whole response. A block that is never closed goes to the end."""
    blocks = fenced(text)
    marked = [body for language, body in blocks if language.lower() in PYTHON]
    if marked:
        return marked[-1]
    return blocks[-1][1] if blocks else text


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, body) of each block, without the indentation that its opening fence has.

    A line of nothing but a fence closes it. Where another block opens before such a line, or there is none, the first fence
    in the middle of a line does.
    """
    found: list[tuple[str, str]] = []
    at = 0
    while opened := OPEN.search(text, at):
        begin, fence = opened.end(), opened["fence"]
        before = text[text.rfind("\n", 0, opened.start()) + 1 : opened.start()]
        column = len(before) if BEFORE.fullmatch(before) else 0
        end, at = _closed(text, begin, column, fence)
        body = text[begin:end]
        found.append((opened["language"], re.sub(rf"^[ \t]{{0,{column}}}", "", body, flags=re.MULTILINE) if column else body))
    return found


def _closed(text: str, begin: int, column: int, fence: str) -> tuple[int, int]:
    """Where a block ends, and where what follows its closing fence begins."""
    for line in LINE.finditer(text, begin):
        if len(line["fence"]) < len(fence) or len(line["indent"].expandtabs(4)) > column + DEEPER:
            continue
        if not line["more"].strip():
            return line.start(), line.end()
        break
    inline = text.find(fence, begin)
    return (inline, inline + len(fence)) if inline >= 0 else (len(text), len(text))
