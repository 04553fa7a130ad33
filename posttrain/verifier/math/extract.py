"""Finds the answer in a response, in linear time for any text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from posttrain.verifier.math.units import SCALES, changing, unit
from posttrain.verifier.math.visible_text import DIGITS, Box, boxes_of, seen

LONGEST_LINE = 300
"""How many characters are searched after a phrase such as `the answer is`. It also bounds an answer of one line."""
TAIL = 10_000
"""If there is no box, only the last characters of a response are searched: this many."""

_SCRIPTS = "\u2e80-\u9fff\uac00-\ud7af\u3040-\u30ff"
"""Letters that may be directly next to a number: Chinese, Japanese, Korean."""
# The text is a policy's and may be a million equal characters, so repetitions that could overlap have bounds such as
# {0,6}: a search stays linear. The longer notations come first: a mixed number, a time or a ratio, then a decimal with
# its power, denominator and percent sign. Spaces between thousands make one number, as in a box: else the last three
# digits of `12 345` would be the answer.
_SIGNLESS = (
    r"[$€£₹¥]?(?:\d{1,4}[ ]"  # `1 1/2`
    rf"\d{{1,3}}/\d{{1,3}}(?!\d)|\d\d?:[0-5]\d(?:\s?[ap]\.?m\b\.?)?|\d+:\d+"  # `2:30 pm`, `3:4`
    rf"|(?:(?:\d{{1,3}}(?:[ ]\d{{3}})+(?!\d)|{DIGITS})(?:\.\d+)?|\.\d+)"  # `12 345`, `1,234`, `.5`
    r"(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?)"  # `1e5`, `1.5/2`, `50%`
)
# A number at the start of a line or of a list's item, where a sign is always its own.
_PLAIN = re.compile(rf"[-+−–]?{_SIGNLESS}", re.IGNORECASE)
# A sign behind a digit or a closing bracket is an operator: `10-3` ends with 3. A digit behind a Latin letter begins no
# number (`x2`), behind a Chinese, Japanese or Korean one it does. Behind a point, or in the second half of `3:4`, none
# begins.
_NUMBER = re.compile(
    rf"(?<![^\W{_SCRIPTS}])(?<!\.)(?<!\d:)(?:(?<![\d)\]])(?<![\d)\]] )[-+−–])?{_SIGNLESS}(?![\d])", re.IGNORECASE
)
_PHRASE = re.compile(
    # `The answer is`, `result:`, `the correct option is` before a letter, `La respuesta es`, `答案是`.
    r"(?:\banswers?\b|\bresult\b|\b(?:correct|right|best)\s(?:option|choice)\b(?=[*_\s]{0,4}(?:is|:)[*_\s:]{0,6}\(?[A-J]\b)|\b(?:respuesta|resposta|risposta|réponse|antwort|ответ)\b|答案|答え|答)"
    # `isn't` is matched up to its `is`, so that what follows begins with `n't`, which `_HEDGE` knows.
    r"[*_\s]{0,4}(?:\bis(?=n['’]t\b)|\bis\b|\bare\b|\bes\b|\bist\b|\best\b|[:=：是为は])[*_\s:=：]{0,6}"
    r"|\bsolution is[*_\s:]{0,6}(?=[$\\\d-])"  # `solution is` before a formula or a number
    r"|^[ \t]{0,3}\|?[ \t*_]{0,6}(?:final[ ])?answer[ \t*_]{0,6}\|"  # `| Final Answer |`, the label of a table
    # A heading that is a line of its own: `## Final answer`, `**Answer:**`.
    r"|^[ \t]{0,3}(?:#{1,6}|\*\*|__)[^\n.:]{0,40}\banswers?[*_: \t]{0,6}$",
    re.IGNORECASE | re.MULTILINE,
)
_BELOW = re.compile(r"(?::|\b(?:below|by|follows|following)[.:]?)$", re.IGNORECASE)
"""The end of a line that announces a formula below it: `given by:`, `as follows`."""
_SPAN = re.compile(
    r"\$\$([^$]{1,500})\$\$|(?<!\\)\$([^$]{1,500}?)(?<!\\)\$(?!\d)|\\\(([^\n]{1,500}?)\\\)|\\\[([^$]{1,500}?)\\\]"
)
"""A formula: `$$x$$`, `$x$`, `\\(x\\)`, `\\[x\\]`. A dollar sign before a digit is a currency sign and ends none."""
_MAYBE = re.compile(r"\b(?:maybe|perhaps|possibly|probably|even) ")
# Text between the parts of a list: `, and `, ` or maybe `.
_JOIN = re.compile(rf"\s{{0,4}}(?:,\s{{0,4}}(?:(?:and|or)\b)?|and\b|or\b)\s{{0,4}}(?:{_MAYBE.pattern})?")
_COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|max|min|gcd|lcm|mod|and|or)\b")
"""A LaTeX command, a function or a joining word, which a text without prose may have: `\\frac`, `sin`, `and`."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_GROWN = re.compile(
    r"(?:\\(?:pi|sqrt|cdot|times|text|mathrm)(?![A-Za-z])(?:\{[^{}\n]{0,60}\})?|[π√²³°]|(?<=[π√])\d+"  # `\sqrt{2}`
    # `x`, `cm`, `rd`, `^2`. In `3 x as many` the `x` is the word `times`.
    r"|(?!x (?:as|more|faster|larger|bigger|greater|longer|the)\b)[A-Za-z]{1,3}(?![A-Za-z])|\^\{?-?\w{1,6}\}?)+"
)
"""Text directly after a number, so that the number alone is not the answer: `12π`, `5x`, `3rd`."""
# The text after a value up to the next punctuation: `million dollars` in `5 million dollars, so`.
_AFTER = re.compile(r"[ \t]{0,2}(?:\\text\{)?([^\n.,;:!?()$\\{}]{1,60})")
# The mark of a list's only point: `- ` in `- 5`, and not in `- 5\n- 6`.
_POINT = re.compile(r"[-+•] +(?![^\n]*\n\s*[-+•] )")
# The end of a sentence. The points of `3.5` and `5 sq. ft` are none.
_SENTENCE = re.compile(r"(?<!\bsq)(?<!\bcu)[.;!?](?:\s|$)")
_CORRECT = re.compile(
    r"\b(?:option|choice)\s\(?([A-J])\)?[*_]{0,3} is (?:the )?(?:correct|right|best)\b"  # `option C is correct`
    r"|(?:^|[\s*_])(?:\(([A-J])\)|([A-J]))[*_]{0,3} is (?:the )?(?:correct|right|best)\b"  # `(A) is right`
)
_ALONE = re.compile(r"\*{0,2}\(?[A-J]\)?\*{0,2}")  # `C`, `**(B)**`
_LABELLED = re.compile(r"(?:^|\s)\(?([A-J])[.):]\s", re.MULTILINE)  # The label of an option: `(A) `, `B. `, `C: `.
_DATE = re.compile(  # `March 5`, `Dec. 25th, 2020`
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.? \d{1,2}(?:st|nd|rd|th)?(?:,? \d{4})?(?!\d)"
)
_RATIO = re.compile(r"\d{1,9} to \d{1,9}(?=\W*$)")  # `3 to 4`
_CUT = re.compile(r"(?:[+/=]|(?<![-\w])-|\\(?:cdot|times|div|frac|sqrt|left|pm)\s*[({]?)\s*\Z")
"""An operator at the end (`x =`, `3 +`, `\\frac{`): the response was cut off in the middle of a formula."""
_NUMERAL = rf"{DIGITS}(?:\.\d+)?"
# Before ` and ` each comma has a space behind it: `1,200 and 3` are two numbers.
_SEVERAL = re.compile(
    rf"(?<![\w.])(?:(?:{_NUMERAL}, ?){{2,20}}(?:(?:and|or) )?|(?:{_NUMERAL}, ){{1,19}}{_NUMERAL} (?:and|or) ){_NUMERAL}"
    r"\W*\Z"
)
"""A list of at least three numbers at the end of a text: `1, 2, 3`, `1, 2, or 3`, `1, 2 and 3`."""
_HEDGE = re.compile(
    r"(?:n['’]t|either|neither|between|not|never|at (?:least|most)|(?:more|less|fewer|greater|smaller|larger) than|no"
    r" (?:more|less) than|anything but|over|under)\b",
    re.IGNORECASE,
)
"""Text before a number that makes the number alone no answer: `more than 5`, `either 3 or 4`, `n't 5`."""
# A denial at the end of the text before an answer: `it is not $`, `isn't \(`. It is searched in the last 24 characters:
# the longest, `anything but equal`, and marks behind it fit into these.
_DENIED = re.compile(
    r"(?:\bnot|\bcannot|n['’]t|\bnever|\bneither|\banything but)(?:\s(?:be|equal))?\s{0,3}[$\\(\[\s*]{0,6}\Z",
    re.IGNORECASE,
)
_IGNORANT = re.compile(
    r"\b(?:I|we)(?:[ ]am|['’]m|[ ]are)?[ ](?:(?:cannot|can['’]t|can not|unable to)"
    r"[ ](?:answer|tell|say|solve|determine|find|know)"
    r"|(?:do not|don['’]t)[ ]know|have no idea|not sure)\b",
    re.IGNORECASE,
)
"""A statement after the last number that the answer is not known: `I don't know`, `we cannot determine`."""
_UNSURE = re.compile(r"\b(?:perhaps|maybe|possibly)\b[^\d\n]{0,20}\d", re.IGNORECASE)  # `perhaps 6`, `maybe it is 7`
# Directly behind a box: ` is wrong`, `$ was not the right`.
_WITHDRAWN = re.compile(
    r"[\s$*.)\]\\]{0,8}(?:is|was)\s(?:wrong|incorrect|false|not (?:the|right|correct|true))\b", re.IGNORECASE
)
_RETRACTED = re.compile(r"\b(?:wait|actually|correction|wrong|incorrect|mistaken?|oops|rather)\b", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s$.]{0,6}(?:,|;|\band\b|\bor\b|,\s?and\b|,\s?or\b)[\s$]{0,6}(?:[A-Za-z](?:_\w)?\s?=\s?)?")
"""Text that joins two boxes into one answer: `$ and $`, `, y = `."""
_CLEAR = re.compile(r"\([A-J]\)(?=,? (?:because|since|as|is|for)\b)|(?i:yes|no|true|false)(?=[,.;])|([A-J][.)])(?= \S)")
"""A choice or a word that is the answer, whatever numbers follow: `(B)` before ` because`, `Yes` before a comma, `C.`
before ` 12`. Group 1 is the letter of a choice whose value follows (`C.`)."""


@dataclass(frozen=True)
class Found:
    """The answer as it was written. `several`: boxes before it have another content."""

    text: str
    several: bool = False
    told: bool = field(default=False, repr=False, compare=False)
    """True if the answer was part of a sentence. Then an exclamation mark at its end may be no factorial."""


def final(text: str) -> Found | None:
    """The answer of a response; None if there is none. The first rule that finds something decides:

    1. Thoughts, comments and struck-out text do not count (`seen`). If there are `<answer>` tags, only the content of
       the last ones counts.
    2. The last complete `\\boxed{...}`, braces balanced, and the boxes that `and`, `or` or a comma join to it. There is
       no answer if a box that is never closed comes after it. A box that is denied (`not \\boxed{3}`,
       `\\boxed{3} is wrong`) or taken back for another answer is none.
    3. The line after the last `####`, if it is no heading: it holds a value and no prose, or no answer comes after it.
    4. What follows the last `answer is`, `answer:`, `| answer |` or heading such as `**Final Answer**`: the formulas
       that come first, on any line; else all of its line if that is no prose; else its first formula or number with
       its unit.
    5. The last `option C is correct`; all of a response that is one line without prose; a last line of one letter.
    6. The last formula in dollar signs, or the last number, whichever ends later, with its unit. This does not
       apply if options are only listed, or if the response was cut off after an operator.

    >>> final(r"so \\boxed{3}, no: \\boxed{\\frac{1}{2}}"), final("7 of 12 make 1,234.")
    (Found(text='\\\\frac{1}{2}', several=True), Found(text='1,234', several=False))
    """
    text = seen(text)
    boxes, unclosed = boxes_of(text)
    if unclosed or not text.strip():
        return None
    if boxes:
        after = text[boxes[-1].end :]
        # Many responses only check a right answer once more, so `wait` cancels the box only if another answer with a
        # digit is announced behind it.
        taken_back = _RETRACTED.search(after)
        new_announcement = _PHRASE.search(after, taken_back.end()) if taken_back else None
        if new_announcement is None or not any(
            c.isdigit() for c in after[new_announcement.end() : new_announcement.end() + LONGEST_LINE]
        ):
            return _boxed(text, boxes)
        text = after
    text = text[-TAIL:]
    if "####" in text and (line := _after_hashes(text)) is not None:
        return Found(line) if line else None
    if announced := _announced(text):
        return Found(announced, told=True)
    return _at_the_end(text)


def _announced(text: str) -> str | None:
    """The answer after the last phrase that announces one."""
    phrases = list(_PHRASE.finditer(text))
    # `| answer |` before an empty cell is the head of a table, and an earlier phrase may hold the answer. After any
    # other phrase without an answer, what was announced before is not the last word.
    while phrases:
        last = phrases.pop()
        in_table = last.group().endswith("|")
        behind = _cell(text, last.end()) if in_table else _after_phrase(text[last.end() :], "\n" in last.group())
        if behind or not in_table:
            return behind or None
    return None


def _at_the_end(text: str) -> Found | None:
    """The answer of a response without a phrase that announces one."""
    if correct := list(_CORRECT.finditer(text, max(0, len(text) - LONGEST_LINE))):
        return Found(next(g for g in correct[-1].groups() if g))
    # One line without prose is the answer as it stands (`10-3`), and so is one of words without a number (`Tuesday`).
    whole = text.strip()
    no_number = not any(c.isdigit() or c == "$" for c in whole)
    if len(whole) <= LONGEST_LINE and "\n" not in whole and (not prose(whole) or no_number):
        return Found(whole)
    line = whole.rpartition("\n")[2].strip()
    if _ALONE.fullmatch(line):
        return Found(line.strip("*_"))
    if _CUT.search(whole):
        return None
    # Three numbers or more with commas between them are one list; the last of them alone would be a wrong reading.
    if (several := _SEVERAL.search(whole[-LONGEST_LINE:])) is not None:
        return Found(several[0].strip())
    # (end, begin, text) of the formula or the number that ends last.
    candidate = max(_candidates(text), default=None)
    if (
        candidate is None
        or _among_options(text, candidate[1])
        or _DENIED.search(text, max(0, candidate[1] - 24), candidate[1])
        or _IGNORANT.search(text, candidate[0])
    ):
        return None
    return Found(candidate[2], told=True)


def _among_options(text: str, at: int) -> bool:
    """Returns whether the text at `at` belongs to the last of three or more options that are only listed."""
    labels = [m for m in _LABELLED.finditer(text) if m.end() <= at]
    # A number behind `(D)` is the value of that option, unless a line's end or a sentence's ends the list before.
    if len({m[1] for m in labels}) < 3:
        return False
    between = text[labels[-1].end() : at]
    return "\n" not in between and _SENTENCE.search(between) is None


def prose(text: str) -> bool:
    """Returns whether a text has words other than commands and functions."""
    return _WORD.search(_COMMAND.sub(" ", text)) is not None


def _boxed(text: str, boxes: list[Box]) -> Found | None:
    """The last box with what belongs to it: boxes joined to it, and a unit or a word such as `million` after it."""
    last = boxes[-1]
    # `\Z` in `_DENIED` is the end of the searched part, so the denial has to stand directly before the box.
    if _DENIED.search(text, max(0, last.start - 24), last.start) or _WITHDRAWN.match(text, last.end):
        return None
    several = any(b.text.strip() != last.text.strip() for b in boxes)
    joined = [last.text]
    # From the last box backwards: boxes that only a comma, `and` or `or` parts belong to one answer. A box equal to the
    # next one says the same answer twice and ends the walk.
    # `_BETWEEN` matches less than 24 characters, so boxes further apart are never joined.
    for earlier, later in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        apart = later.start - earlier.end > 24 or _BETWEEN.fullmatch(text, earlier.end, later.start) is None
        if earlier.text.strip() == later.text.strip() or apart:
            break
        joined.insert(0, earlier.text)
    if len(joined) > 1:
        return Found(", ".join(joined), several and len(joined) < len(boxes))
    # A unit or `million` belongs to a number. `x=3` names its value, so no words are added to it.
    at = last.end + (text[last.end : last.end + 1] == "$")
    after = _words_after(text, at) if any(c.isdigit() for c in last.text) and "=" not in last.text else ""
    return Found(rf"{last.text}\text{{ {after}}}" if after else last.text, several)


def _after_hashes(text: str) -> str | None:
    """The answer on the line after the last `####`; empty if that line is empty. None if other rules have to find it:
    the line is a heading, or the text below it may hold the answer."""
    line, _, rest = text.rpartition("####")[2].strip().partition("\n")
    line = line.strip()
    # `####` marks the answer in GSM8K, and is also a heading of Markdown, which is left to the rule for phrases. A line
    # without prose stays the answer although a phrase follows.
    if _PHRASE.search(f"#### {line}") or _PHRASE.search(rest):
        return None if prose(line) or _PHRASE.search(f"#### {line}") else line
    if not rest.strip():
        line = re.sub(r"^[A-Za-z ]{2,40}:\s*(?=\S)", "", line)
        return line if len(_WORD.findall(line)) <= 3 else _answer_of_line(line)
    value = any(c.isdigit() for c in line) or _SPAN.search(line) is not None
    # With text below it, the line counts where it holds a value alone, or where nothing below could be an answer.
    if (value and not prose(line)) or not any(c.isdigit() or c in "$\\" for c in rest):
        return line
    # A number with one word, such as `5 apples`, is a value too.
    plain = _PLAIN.match(line)
    return line if plain and re.fullmatch(r"[ ]?[^\W\d_]+", line[plain.end() :]) else None


def _cell(text: str, at: int) -> str:
    """The cell of a table next to its label, if it holds a value."""
    cell = re.split(r"[|\n]", text[at : at + LONGEST_LINE], maxsplit=1)[0].strip(" *_\t")
    return cell if any(c.isdigit() or c in "$\\" for c in cell) or re.fullmatch(r"\(?[A-J]\)?", cell) else ""


def _after_phrase(text: str, below: bool) -> str:
    """The answer after a phrase: the formulas that come first, else the answer at the start of the line.

    `below`: the phrase ended its line. Then what follows may be the only point of a list.
    """
    # A displayed formula of up to 500 characters may stand below the phrase.
    text = re.sub(r"^[*_\s]*(?:[.…]+\s+)?(?:```\w*\s+)?", "", text[: 4 * LONGEST_LINE])
    if below and _POINT.match(text):
        text = _POINT.sub("", text, 1)
    line = _line(text[:LONGEST_LINE])
    # `The answer is given by:` announces a formula on the next line.
    if _SPAN.match(text) is None and _BELOW.search(text.partition("\n")[0].rstrip("* _")) and "\n" in text:
        following = text.partition("\n")[2].lstrip()
        text = following if _SPAN.match(following) else text
    if (span := _SPAN.match(text)) is not None:
        return _joined(text, span)
    return _answer_of_line(line) if line else ""


def _line(rest: str) -> str:
    """The rest of the line after a phrase, without markdown and final punctuation."""
    line = rest.lstrip().partition("\n")[0]
    line = re.sub(r"(?<![\w)])\*\*|\*\*(?!\w)", "", line)
    return re.sub(r"^[*_\s]+|[*_\s.,;:。，；：\u2190-\u21ff\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]+$", "", line)


def _joined(text: str, span: re.Match[str]) -> str:
    """The formula of `span` and the formulas joined to it, with commas between them, and the unit after the last."""
    answer = span[span.lastindex or 0]
    while (join := _JOIN.match(text, span.end())) and (next_span := _SPAN.match(text, join.end())):
        word = join.group().replace(",", " ").strip()
        comma = rf" \text{{ {word} }} " if word else ", "
        answer, span = f"{answer.strip()}{comma}{next_span[next_span.lastindex or 0].strip()}", next_span
    after = _words_after(text, span.end())
    return rf"{answer.strip()}\text{{ {after}}}" if after else answer


def _answer_of_line(line: str) -> str:
    """The answer of a line behind a phrase: what stands at its start, else its first formula or number."""
    formula, number = _SPAN.match(line), _NUMBER.search(line)
    if formula:
        return _joined(line, formula)
    sentence = _SENTENCE.split(line, maxsplit=1)[0]
    # `March 5` and `3 to 4` have a number that alone would be another answer.
    if (date_or_ratio := _DATE.match(line) or _RATIO.match(line)) is not None:
        return date_or_ratio[0]
    # In a text command the sentence (`more than 5`; `5, perhaps 6`) is read as words, which equal no number.
    if _HEDGE.match(line) or (number is not None and _UNSURE.search(sentence, number.end())):
        return rf"\text{{{sentence}}}"
    if not prose(line):
        return line
    if (decided := _CLEAR.match(line)) is not None:
        return decided[0] if decided[1] is None else f"{decided[0]} {_answer_of_line(line[decided.end() :].strip())}"
    formula = _SPAN.search(line)
    if formula and (number is None or formula.start() <= number.start()):
        return _joined(line, formula)
    if number is None:
        return sentence
    # At the very start of the line stands a list, or else a number; a number further on stands in a sentence.
    plain = _PLAIN.match(line)
    return _list_at_start(line) or _with_unit(line, plain or number) if plain else _with_unit(line, number)


def _list_at_start(line: str) -> str | None:
    """A list such as `1, 2, and 3` at the start of a line, if at most two words follow it; else None."""
    end = 0
    match = _PLAIN.match(line)
    while match and (join := _JOIN.match(line, match.end())) and (following := _PLAIN.match(line, join.end())):
        match, end = following, following.end()
    return _MAYBE.sub("", line[:end]) if end and re.match(r"(?: [^\W\d_]+){0,2}(?:[.;!?]|$)", line[end:]) else None


def _with_unit(text: str, number: re.Match[str]) -> str:
    """A number with the text after it that belongs to it: `12π`, `5 million`, `12 km`, `5 squared`."""
    attached = _GROWN.match(text, number.end())
    start, end = number.start(), attached.end() if attached else number.end()
    # A root sign or a pi directly before the number is part of it.
    start -= len(text[:start]) - len(text[:start].rstrip("√π"))
    after = _words_after(text, end)
    return f"{text[start:end]} {after}" if after else text[start:end]


def _words_after(text: str, at: int) -> str:
    """The words after a value that belong to it: words that change it (`million`), or its unit. Empty if none do."""
    match = _AFTER.match(text, at)
    words = match[1].split() if match else []
    if not words:
        return ""
    # Words that multiply come first, and then a unit has to be all that is left. Words that make another number of it
    # (`squared`, `and a half`: at most three) are kept, so that the reading does not equal the bare number; others
    # (`apples`) are dropped.
    scales = 0
    while scales < len(words) and words[scales].lower() in SCALES:
        scales += 1
    if unit(" ".join(words[scales:])):
        return " ".join(words)
    if changing(" ".join(words[scales : scales + 3])):
        return " ".join(words[: scales + 3])
    return " ".join(words[:scales])


def _candidates(text: str) -> Iterator[tuple[int, int, str]]:
    """(end, begin, text) of the last formula and of the last number outside formulas."""
    formula, spans = None, list[tuple[int, int]]()
    for formula in _SPAN.finditer(text):
        spans.append(formula.span())
    if formula is not None:
        yield formula.end(), formula.start(), _joined(text, formula)
    # Both come in order, so one index into the formulas keeps the loop linear. A number inside a formula, or in what an
    # earlier number has grown by (`2^10`), is none of its own.
    number, next_span, attached_end = None, 0, 0
    for match in _NUMBER.finditer(text):
        while next_span < len(spans) and spans[next_span][1] <= match.start():
            next_span += 1
        if match.start() >= attached_end and (next_span == len(spans) or match.end() <= spans[next_span][0]):
            number = match
            attached_end = attached.end() if (attached := _GROWN.match(text, match.end())) else 0
    if number is not None:
        yield number.end(), number.start(), _with_unit(text, number)
