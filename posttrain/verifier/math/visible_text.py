"""The visible text of a response, in which answers are searched, and the boxes in that text.

Thoughts, comments, struck-out and invisible text are left out. Boxes, `\\boxed{...}` and `\\fbox{...}`, are found
in linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.verifier.thoughts import spoken

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_LATEX_COMMENT = re.compile(r"^[ \t]*%[^\n]*$", re.MULTILINE)  # A line that begins with `%`.
_ODD = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
"""A backslash that is not doubled. A text in which every one is doubled is the escaped form of another."""
_STRUCK = re.compile(r"~~(?=\S)[^~\n]{1,200}~~")  # `~~41~~`
_UNSEEN = re.compile(r"\\(?:[hv]?phantom|[bx]?cancel|sout|st)(?![A-Za-z])\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}?")
"""Commands that print nothing or strike out what they print: `\\phantom{3}`, `\\cancel{3}`."""
# Tags of HTML that only change the look of a text: `<b>`, `</span>`, `<br/>`.
_TAGS = re.compile(
    r"</?(?:b|i|u|p|em|strong|span|div|br|center|mark|small|big)(?:\s[^<>\n]{0,100})?\s?/?>", re.IGNORECASE
)
# A label inside a formula: `$\text{Answer: }` at the start of `$\text{Answer: }42$`. Groups: the delimiter, the label.
_LABEL = re.compile(
    r"(\$\$|\$|\\\[|\\\()?[ \t]{0,4}\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}\n]{1,60}:)\s*\}"
)
# A decimal whose last digit is repeated at least three times before dots: `0.333...`, `0.1666…`.
_ELLIPSIS = re.compile(r"(?<![\w.])(\d{1,20}\.\d{0,20}?)(\d)\2{2,}(?:\.\.\.|…|\\ldots(?![A-Za-z])|\\dots(?![A-Za-z]))")


def seen(text: str) -> str:
    """The text that counts. If there are `<answer>` tags, the text between the last ones.

    >>> seen("<think>3</think>~~41~~ 42 <!-- 43 -->"), seen(r"$\\text{Answer: }42$"), seen("<answer>4</answer> or 5")
    (' 42 ', 'Answer: $42$', '4')
    >>> seen("0.333...")
    '0.\\\\overline{3}'
    """
    # Comments are removed before the answer's tags are searched, so that no tag or box inside them counts. A pattern
    # runs only if its mark is in the text, because a plain search is cheaper.
    text = spoken(text)
    # A response in which every backslash is doubled (`\\boxed{3}`) was escaped once too often.
    if "\\\\" in text and _ODD.search(text) is None:
        text = text.replace("\\\\", "\\")
    if "<!--" in text:
        text = _COMMENT.sub("", text)
    if "</answer>" in text and (tagged := _tagged(text)) is not None:
        text = tagged
    if "%" in text:
        text = _LATEX_COMMENT.sub("", text)
    if "~~" in text:
        text = _STRUCK.sub("", text)
    if "<" in text:
        text = _TAGS.sub("", text)
    if "\\" in text:
        text = _LABEL.sub(lambda m: f"{m[2]} {m[1] or ''}", _UNSEEN.sub("", text))
    return _ELLIPSIS.sub(r"\1\\overline{\2}", text) if "." in text or "…" in text else text


def _tagged(text: str) -> str | None:
    """The text between the last `<answer>` tags; None if there are none, or if the opening tag is quoted."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end)
    # A quoted tag is an example of the form and holds no answer: "write `<answer>4</answer>`".
    return None if begin < 0 or text[begin - 1 : begin] in ("'", '"', "`") else text[begin + len("<answer>") : end]


DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
"""A whole number, with or without commas between its thousands."""
_BRACE = re.compile(
    r"\\(?:boxed|fbox)\s*\{"  # `\boxed{`, whose end is found by counting braces
    # A box without braces: `\boxed\frac12`, `\boxed 1,234.5`, `\boxed x`. TeX would take one digit, one letter or one
    # command. Whole numbers and fractions are accepted too, because the writer means them. Group 1: the content.
    r"|\\(?:boxed|fbox)(?![A-Za-z])\s*(\\[dt]?frac(?:\s?\d\s?\d|\{[^{}\n]{1,60}\}\{[^{}\n]{1,60}\})"
    rf"|[-+−]?{DIGITS}(?:\.\d+)?|[A-Za-z](?![A-Za-z]))"
    # An escaped brace or backslash is a token, so that the brace in it opens and closes nothing.
    r"|\\[\\{}]|[{}]"
)


@dataclass(frozen=True)
class Box:
    """A complete box: the position of its command, the position after its end, and its content."""

    start: int
    end: int
    text: str


def boxes_of(text: str) -> tuple[list[Box], bool]:
    """The complete outermost boxes, in the order of their ends, and whether a box is never closed."""
    # One entry of the stack for each open brace: the position of its command, the position of its content, and whether
    # it belongs to a box. `open_boxes` counts the boxes on the stack. A box is reported only if no other box is around
    # it.
    stack: list[tuple[int, int, bool]] = []
    open_boxes, boxes = 0, list[Box]()
    if "\\boxed" not in text and "\\fbox" not in text:
        return boxes, False
    for match in _BRACE.finditer(text):
        token = match.group()
        if match[1] is not None:
            if not open_boxes:
                boxes.append(Box(match.start(), match.end(), match[1]))
            continue
        if len(token) == 2 and token[0] == "\\":
            continue
        if token != "}":
            box = token != "{"
            stack.append((match.start(), match.end(), box))
            open_boxes += box
        elif stack:
            command, start, box = stack.pop()
            open_boxes -= box
            if box and not open_boxes:
                boxes.append(Box(command, match.end(), text[start : match.start()]))
    return boxes, open_boxes > 0
