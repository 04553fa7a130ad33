"""Which part of a response is its answer: in linear time, whatever the policy says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST_LINE = 300
"""Characters after a phrase such as `the answer is` that are looked at."""
TAIL = 10_000
"""Without a box, only so many last characters are searched."""

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
_PHRASE = re.compile(r"(?:\banswers?\b|\bresult\b)[*_\s]{0,4}(?:is|are|:|=)[*_\s:=]{0,6}", re.IGNORECASE)
_SPAN = re.compile(r"\$\$([^$]{1,500})\$\$|(?<!\\)\$([^$]{1,500}?)(?<!\\)\$|\\\(([^\n]{1,500}?)\\\)|\\\[([^$]{1,500}?)\\\]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"(?<![\w.])(?<![\d)\]] )(?:(?<![\d)\]])[-+−–])?[$€£]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?(?:\s?\\?%)?(?![\d])"
)
_PLAIN = re.compile(rf"[-+−–]?[$€£]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?")
_COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|max|min|gcd|lcm|mod|and|or)\b")
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class Found:
    """The answer as it was written. `several`: boxes before it say something else."""

    text: str
    several: bool = False


def final(text: str) -> Found | None:
    """The answer of a response; None where there is none. The first rule that finds something decides:

    1. what comes before the last `</think>` does not count, nor what follows a `<think>` that never ends;
    2. the last complete `\\boxed{...}`, braces balanced. A box that was opened and never closed is no answer;
    3. the line after the last `####`;
    4. what follows the last `answer is` or `answer:` on its line: all of it where it is no prose, else its first formula or number;
    5. all of a response that is one line without prose;
    6. the last formula in dollar signs, or the last number, whichever ends later.

    >>> final(r"so \\boxed{3}, no: \\boxed{\\frac{1}{2}}"), final("7 of 12 make 1,234.")
    (Found(text='\\\\frac{1}{2}', several=True), Found(text='1,234', several=False))
    """
    text = _spoken(text)
    boxes, opened = _boxes(text)
    if boxes:
        return Found(boxes[-1], any(b.strip() != boxes[-1].strip() for b in boxes))
    if opened or not text.strip():
        return None
    text = text[-TAIL:]
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0].strip()
        return Found(line) if line else None
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        line = _line(text[phrases[-1].end() : phrases[-1].end() + LONGEST_LINE])
        if line:
            return Found(_first(line))
    whole = text.strip()
    if len(whole) <= LONGEST_LINE and "\n" not in whole and (not prose(whole) or not any(c.isdigit() or c == "$" for c in whole)):
        return Found(whole)
    last = max(_candidates(text), default=None)
    return None if last is None else Found(last[1])


def prose(text: str) -> bool:
    """Whether it has words beside commands and functions."""
    return _WORD.search(_COMMAND.sub(" ", text)) is not None


def _spoken(text: str) -> str:
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _boxes(text: str) -> tuple[list[str], bool]:
    """Contents of the complete boxes in the order in which they end, outermost only, and whether one stays open after them."""
    stack: list[tuple[int, bool]] = []
    inside, out = 0, list[str]()
    if "\\boxed" not in text and "\\fbox" not in text:
        return out, False
    for match in _BRACE.finditer(text):
        token = match.group()
        if len(token) == 2 and token[0] == "\\":
            continue
        if token != "}":
            box = token != "{"
            stack.append((match.end(), box))
            inside += box
        elif stack:
            start, box = stack.pop()
            inside -= box
            if box and not inside:
                out.append(text[start : match.start()])
    return out, inside > 0


def _line(rest: str) -> str:
    """What follows a phrase on its line, without markdown and final punctuation."""
    line = rest.lstrip().partition("\n")[0]
    return re.sub(r"^[*_\s]+|[*_\s.,;:]+$", "", line)


def _first(line: str) -> str:
    """The answer at the start of a line."""
    span, number = _SPAN.match(line), _NUMBER.search(line)
    if span:
        return _content(span)
    if not prose(line):
        return line
    span = _SPAN.search(line)
    if span and (number is None or span.start() <= number.start()):
        return _content(span)
    if number is not None:
        plain = _PLAIN.match(line)
        return plain.group() if plain else number.group()
    return re.split(r"[.;!?](?:\s|$)", line, maxsplit=1)[0]


def _candidates(text: str) -> Iterator[tuple[int, str]]:
    """(where it ends, what it is) of the last formula and of the last number outside of formulas."""
    last, spans = None, list[tuple[int, int]]()
    for last in _SPAN.finditer(text):
        spans.append(last.span())
    if last is not None:
        yield last.end(), _content(last)
    number, at = None, 0
    for match in _NUMBER.finditer(text):
        while at < len(spans) and spans[at][1] <= match.start():
            at += 1
        if at == len(spans) or match.end() <= spans[at][0]:
            number = match
    if number is not None:
        yield number.end(), number.group()


def _content(span: re.Match[str]) -> str:
    return next(g for g in span.groups() if g is not None)
