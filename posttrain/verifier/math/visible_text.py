"""The visible text of a response, in which an answer is searched: without thoughts, comments, struck-out or invisible
text; and the boxes in it, `\\\\boxed{...}` and `\\\\fbox{...}`, found in linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.verifier.thoughts import spoken

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_LATEX_COMMENT = re.compile(r"^[ \t]*%[^\n]*$", re.MULTILINE)
_ODD = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
"""A backslash that is not doubled: the text is not the escaped form of another."""
_STRUCK = re.compile(r"~~(?=\S)[^~\n]{1,200}~~")
_UNSEEN = re.compile(r"\\(?:[hv]?phantom|[bx]?cancel|sout|st)(?![A-Za-z])\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}?")
"""Commands that print nothing or strike out what they print."""
_TAGS = re.compile(
    r"</?(?:b|i|u|p|em|strong|span|div|br|center|mark|small|big)(?:\s[^<>\n]{0,100})?\s?/?>", re.IGNORECASE
)
_LABEL = re.compile(
    r"(\$\$|\$|\\\[|\\\()?[ \t]{0,4}\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}\n]{1,60}:)\s*\}"
)
_ELLIPSIS = re.compile(r"(?<![\w.])(\d{1,20}\.\d{0,20}?)(\d)\2{2,}(?:\.\.\.|…|\\ldots(?![A-Za-z])|\\dots(?![A-Za-z]))")


def seen(text: str) -> str:
    """The text that counts. If there are `<answer>` tags, the text between the last ones.

    >>> seen("<think>3</think>~~41~~ 42 <!-- 43 -->"), seen(r"$\\text{Answer: }42$"), seen("<answer>4</answer> or 5")
    (' 42 ', 'Answer: $42$', '4')
    >>> seen("0.333...")
    '0.\\\\overline{3}'
    """
    # Thoughts go first and comments before the answer's tags, so that no tag or box in them counts. A pattern runs only
    # where its mark is in the text, since a plain search is cheaper.
    text = spoken(text)
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
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end)
    # A quoted tag is an example of the form and holds no answer.
    return None if begin < 0 or text[begin - 1 : begin] in ("'", '"', "`") else text[begin + len("<answer>") : end]


DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
"""A whole number, with or without commas between its thousands."""
_BRACE = re.compile(
    r"\\(?:boxed|fbox)\s*\{"
    # TeX takes one argument without braces: a digit, a letter or a command. Whole numbers and fractions are
    # accepted too, as they are meant.
    r"|\\(?:boxed|fbox)(?![A-Za-z])\s*(\\[dt]?frac(?:\s?\d\s?\d|\{[^{}\n]{1,60}\}\{[^{}\n]{1,60}\})"
    rf"|[-+−]?{DIGITS}(?:\.\d+)?|[A-Za-z](?![A-Za-z]))"
    # An escaped brace or backslash is a token, so that the brace in it opens and closes nothing.
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
    # On the stack, for each open brace: where its command begins, where its content begins, and whether it is a box.
    # `inside` counts the boxes among them, and only a box with none around it is reported.
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
