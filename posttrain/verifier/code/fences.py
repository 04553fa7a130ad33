"""The blocks of code in a response: fenced as in CommonMark, in quotations, or between tags."""

from __future__ import annotations

import bisect
import html
import re
from dataclasses import dataclass

from posttrain.verifier.thoughts import spoken

# Possessive repetitions (`++`, `*+`) never give characters back, so one long row of backticks or spaces is searched in
# linear time. The comments behind the alternatives are examples.
OPEN = re.compile(
    r"(?<!`)(?P<fence>`{3,}+)[ \t]*+\{?\.?(?P<language>\w*+)[^\n`]*+\n"  # "```python", "```{.py}"
    # `~~~py`, and `- ~~~` in a list.
    r"|^[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)*(?P<tildes>~{3,}+)[ \t]*+\{?\.?(?P<mark>\w*+)[^\n]*\n"
    r"|^[ \t]*(?P<comment><!--)"
    r"|^[ \t]*<(?P<tag>pre|code)\b[^>\n]*>"
    r"|(?<![\"'`])<(?P<answer>answer)>"
    r"|^[ \t]*\[(?P<upper>PYTHON)\][ \t]*$",
    re.MULTILINE,
)
# The marks of a quotation at the start of a line: `> `, `> > `. `>>>` is the prompt of an interpreter.
QUOTED = re.compile(r"[ \t]*(?:>(?!>>)[ \t]?)+")
BEFORE = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)*")
"""Text before an opening fence that indents its block: white space and list marks, but no words."""
# A line that begins with a fence. Group `more`: what stands behind the fence.
LINE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<more>[^\n]*)$", re.MULTILINE)
DEEPER = 3
"""The most columns that a closing fence may be indented further than its opening fence: else it is part of the program,
such as of a docstring."""
# Words behind a fence that mark a block as Python.
PYTHON = ("python", "py", "python3", "pycon")
LONGEST = 256 * 1024
"""A response with more characters is not searched for blocks."""
MOST_BLOCKS = 500
"""The search for blocks ends after this many."""
MOST_FENCES = 1000
"""The most lines with a fence, inside a block, among which its closing fence is searched."""
# Tags of code inside `<pre>`: `<code class='x'>` at the start, `</code>` at the end.
INNER = re.compile(r"\s*<code\b[^>\n]*>|</code>\s*\Z")


@dataclass(frozen=True)
class Block:
    """One block. `kind`: `fence`, `tag`, `answer` (between `<answer>` tags), or `bare` (a text without blocks)."""

    kind: str
    language: str
    body: str

    @property
    def python(self) -> bool:
        return self.language.lower() in PYTHON


def last_of(blocks: list[Block]) -> str:
    """The body of the last block marked as Python, else of the last block."""
    return ([b for b in blocks if b.python] or blocks)[-1].body


def blocks_of(text: str) -> list[Block]:
    """The blocks of a response outside its thoughts, at least one. If there is an `<answer>`, only the last one is
    searched. A text without blocks is one bare block.

    >>> [b.body for b in blocks_of("so:\\n~~~py\\nx = 1\\n~~~\\n> ```\\n> y\\n> ```")], blocks_of("x = 1")[0].kind
    (['x = 1\\n', 'y\\n'], 'bare')
    """
    text = spoken(text)
    if len(text) > LONGEST:
        return [Block("bare", "", text)]
    blocks = _marked_blocks(text)
    # Answer tags are found by the same walk as fences, so a tag inside a block of code is text of that block.
    answers = [b for b in blocks if b.kind == "answer"]
    if answers:
        text = answers[-1].body
        blocks = [b for b in _marked_blocks(text) if b.kind != "answer"]
    if blocks:
        return blocks
    lines = [line for line in text.split("\n") if line.strip()]
    # The whole response is one quotation of bare code.
    if lines and all(QUOTED.match(line) for line in lines):
        text = _unquoted(text)
    return [Block("bare", "", text)]


def _marked_blocks(text: str) -> list[Block]:
    """All blocks in order, without the indentation of their opening fences. HTML comments are skipped. A line with only
    a fence closes a fenced block; if there is none before another block opens, the first fence inside a line does."""
    blocks: list[Block] = []
    at = 0
    lines = list(LINE.finditer(text))
    while len(blocks) < MOST_BLOCKS and (opening := OPEN.search(text, at)):
        fence = opening["fence"] or opening["tildes"]
        if fence is None:
            block, at = _tag_block(text, opening)
            blocks += [block] if block else []
            continue
        # `prefix` is the text before the fence in its line. With `>` the block is in a quotation, which is searched
        # again without its marks. With white space or a list mark the block is indented, and its lines lose that
        # indentation.
        place = opening.start("fence" if opening["fence"] else "tildes")
        line = text.rfind("\n", 0, place) + 1
        prefix = text[line:place]
        if ">" in prefix and QUOTED.fullmatch(prefix):
            at = _quotation(text, line)
            blocks += _marked_blocks(_unquoted(text[line:at]))
            continue
        column = len(prefix) if BEFORE.fullmatch(prefix) else 0
        end, at = _end_of_block(text, lines, opening.end(), column, fence)
        body = text[opening.end() : end]
        # A line loses at most `column` columns, so the indentation inside the program stays.
        body = re.sub(rf"^[ \t]{{0,{column}}}", "", body, flags=re.MULTILINE) if column else body
        blocks.append(Block("fence", opening["language"] or opening["mark"] or "", body))
    return blocks


def _tag_block(text: str, opening: re.Match[str]) -> tuple[Block | None, int]:
    """The block of a tag or a comment, and the position after it. None for a comment, and for code in one line."""
    begin = opening.end()
    if opening["comment"]:
        end = text.find("-->", begin)
        return None, len(text) if end < 0 else end + 3
    tag = opening["tag"] or opening["answer"] or opening["upper"]
    closing = f"[/{tag}]" if opening["upper"] else f"</{tag}>"
    end = text.find(closing, begin)
    body = text[begin:] if end < 0 else text[begin:end]
    after = len(text) if end < 0 else end + len(closing)
    if opening["answer"]:
        return Block("answer", "", body), after
    # `<code>x</code>` inside a sentence is a name and no block.
    if "\n" not in body.strip("\n"):
        return None, after
    if opening["upper"]:
        return Block("tag", "python", body.lstrip("\n")), after
    return Block("tag", "", html.unescape(INNER.sub("", body)).lstrip("\n")), after


def _quotation(text: str, line: int) -> int:
    """The position at which the quotation that begins with this line ends."""
    while line < len(text) and QUOTED.match(text, line):
        end = text.find("\n", line)
        line = len(text) if end < 0 else end + 1
    return line


def _unquoted(text: str) -> str:
    """A quotation without the marks at the starts of its lines."""
    return re.sub(rf"^{QUOTED.pattern}", "", text, flags=re.MULTILINE)


def _end_of_block(text: str, lines: list[re.Match[str]], begin: int, column: int, fence: str) -> tuple[int, int]:
    """The position at which a block ends, and the position after its closing fence.

    Args:
        lines: all lines of the text that begin with a fence.
        begin: where the content of the block begins.
        column: columns by which the opening fence is indented.
        fence: the opening fence.
    """
    # All lines with a fence were found once. The search begins at the first of them inside the block.
    first = bisect.bisect_left(lines, begin, key=lambda fence_line: fence_line.start())
    for line in lines[first : first + MOST_FENCES]:
        # As in CommonMark: the closing fence is of the same character and at least as long.
        cannot_close = len(line["fence"]) < len(fence) or line["fence"][0] != fence[0]
        if cannot_close or len(line["indent"].expandtabs(4)) > column + DEEPER:
            continue
        # A fence with a word behind it opens another block, so this block was never closed by a line.
        if not line["more"].strip():
            return line.start(), line.end()
        break
    inline = text.find(fence, begin) if fence[0] == "`" else -1
    return (inline, inline + len(fence)) if inline >= 0 else (len(text), len(text))
