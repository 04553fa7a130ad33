"""What an answer says, as far as our own rules understand it: numbers exactly, with percent and unit; lists, sets, intervals; words.

Whatever they do not understand is an `Other`, for the algebra to compare. Nothing here evaluates: numbers are read digit by digit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

from posttrain.environment.math.spelling import closing
from posttrain.environment.math.units import unit

MOST_DIGITS = 2000
"""A power or factorial with more digits is not computed."""
MOST_ITEMS = 64
DEPTH = 4
"""Lists inside lists."""


@dataclass(frozen=True)
class Number:
    """An exact number. `decimals`: digits after its decimal point; None where it was written in another way."""

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """A word answer, such as a day, true, or none."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several values. `left` and `right` are brackets: `(`, `[`, `{` for a set, empty for a bare list."""

    left: str
    right: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Named:
    """`x=3`. `simple`: the left side only names the value, as `x`, `f(2)` or `3+4` do, so that it may be left out."""

    name: str
    simple: bool
    value: Value


@dataclass(frozen=True)
class Other:
    """Only the algebra understands this."""

    text: str


@dataclass(frozen=True)
class TooLarge:
    """A number that nobody should compute."""

    text: str


Value = Number | Words | Items | Named | Other | TooLarge

_D = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([-+]?)({_D})")
_SCIENTIFIC = re.compile(rf"([-+]?)(?:({_D})(?: ?\\times ?| ?\\cdot ?|\*|x))?10\^(?:\{{([-+]?\d+)\}}|(\d+))|([-+]?)({_D})[eE]([-+]?\d+)")
_FRACTION = re.compile(rf"([-+]?)(?:\\frac\{{([-+]?)({_D})\}}\{{([-+]?)({_D})\}}|({_D})[/:]([-+]?)({_D}))")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_MIXED = re.compile(r"([-+]?)(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))")
_POWER = re.compile(r"(-?)(\d+)\^(?:\{(-?\d+)\}|(\d))")
_FACTORIAL = re.compile(r"(\d+)!")
_HUGE_FACTORIAL = re.compile(r"[)}!]!|\d{4}!")
_TOWER = re.compile(r"[-+]?\d+(?:(?:\^|\*\*)\{*-?\d+)*(?:\^|\*\*)\{*-?\d+\}*")
_CURRENCY = re.compile(r"([-+]?)(\$|€|£|\\pounds ?|\\euro ?)([-+]?)(.+)")
_SIMPLE = re.compile(r"[A-Za-z](?:_(?:\w|\{\w+\}))?'?|\\[A-Za-z]+(?:_\w)?|\([A-Za-z](?:,[A-Za-z])+\)|[A-Za-z]{1,3}\([^()=]{0,30}\)")
_CONSTANT = re.compile(r"(?:[-+*/^(){}\[\]\d.,!=%: ]|\\(?:times|cdot|frac|sqrt|div) ?)+")
_WORDS = re.compile(r"[^\W\d_]{4,}|(?:[^\W\d_]+[ '-]){1,8}[^\W\d_]{2,}|yes|no|odd|one|two|six|ten|all", re.IGNORECASE)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_RELATION = re.compile(r"(?:([^<>=]+?)(<|>|\\le|\\ge) ?)?(?<![A-Za-z\\])([A-Za-z])(?: ?(<|>|\\le|\\ge) ?([^<>=]+))?")
_SUCH_THAT = re.compile(r"\\\{[A-Za-z](?: ?\\in ?\\mathbb\{R\})? ?(?:\\mid ?|\||:)(.+)\\\}")
_CHOICE = re.compile(r"\(?(?:\\text\{ ?\(?)?([A-Za-z])(?:\)? ?\})?[).]?")
_AND = re.compile(r"(?: |\\text\{)(?:and|or)(?: |\})|\\text\{ ?(?:and|or) ?\}| ?\\(?:lor|vee|land) ?")


def read(text: str, depth: int = 0) -> tuple[Value, ...]:
    """Everything a spelled answer may mean, most likely first; empty where it says nothing.

    >>> read("1,000")
    (Number(value=Fraction(1000, 1), decimals=None, percent=False, unit=''),)
    >>> read("100,200")[1].items[0].value, read("50%")[0].percent, read("x=3")[0].name
    (Fraction(100, 1), True, 'x')
    """
    text = text.strip()
    if (inside := _TEXT.fullmatch(text)) is not None and any(c.isdigit() for c in text):
        text = inside[1].strip()
    if (rule := _SUCH_THAT.fullmatch(text)) is not None and (known := _between(rule[1].strip(), depth)):
        return known
    if not text or not any(c.isalnum() or c in "\\$" for c in text):
        return ()
    number = _number(text)
    if isinstance(number, TooLarge):
        return (number,)
    if number is not None and "," not in text:
        return (number,)
    if named := _named(text, depth) or _between(text, depth):
        return named
    items = _both(text, depth) or _items(text, depth)
    return tuple(v for v in (number, items) if v is not None) or (_words(text) or Other(text),)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _number(text: str) -> Number | TooLarge | None:
    """A number with what may stand around it: currency, percent, unit, round brackets."""
    if text.startswith("(") and text.endswith(")") and closing(text, 0) == len(text) - 1:
        return _number(text[1:-1])
    if (match := _CURRENCY.fullmatch(text)) is not None:
        inner = _number((match[1] or match[3]) + match[4])
        if isinstance(inner, Number) and not inner.unit and not inner.percent:
            return Number(inner.value, inner.decimals, False, unit(match[2].strip().lstrip("\\")) or "$")
        return None
    if text.endswith("%") or text.lower().endswith((" percent", "\\text{percent}")):
        inner = _bare(re.sub(r"(?:%| percent|\\text\{percent\})$", "", text, flags=re.IGNORECASE).strip())
        return Number(inner.value, inner.decimals, True) if isinstance(inner, Number) else inner
    bare = _bare(text)
    if bare is not None:
        return bare
    body, name = _split_unit(text)
    if name is None:
        return None
    inner = _bare(body)
    return Number(inner.value, inner.decimals, False, name) if isinstance(inner, Number) else inner


def _split_unit(text: str) -> tuple[str, str | None]:
    """(number, unit): the unit is '' for a word that is none (`12 apples`), None where there is no word after a number."""
    at = re.match(r"[-+]?(?:[\d.,/ ]|\\frac\{[\d.]+\}\{[\d.]+\}|\^\{?-?\d+\}?|\\times ?|\\cdot )*", text)
    end = at.end() if at else 0
    body, rest = text[:end], text[end:]
    spaced = body.endswith(" ") or rest.startswith(("\\text", "^\\circ"))
    body, rest = body.strip().rstrip(",."), rest.strip()
    if not body or not rest:
        return text, None
    plain = _TEXT.sub(r"\1", rest).strip()
    if (known := unit(plain)) and (spaced or len(plain) > 1 or not plain.isalpha()):
        return body, known
    words = re.fullmatch(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+){0,5}", plain)
    return (body, "") if words and (spaced or rest.startswith("\\text")) else (text, None)


def _bare(text: str) -> Number | TooLarge | None:
    """A number alone."""
    if (m := _DECIMAL.fullmatch(text)) is not None:
        whole, _, part = m[2].partition(".")
        return Number(_signed(m[1], _decimal(m[2])), len(part) if part or not whole else None)
    if (m := _REPEATING.fullmatch(text)) is not None:
        head, tail = m[3], m[4]
        value = Fraction(int(m[2] or "0")) + Fraction(
            int(head or "0") * (10 ** len(tail) - 1) + int(tail), 10 ** len(head) * (10 ** len(tail) - 1)
        )
        return Number(_signed(m[1], value))
    if (m := _MIXED.fullmatch(text)) is not None:
        above, below = int(m[3] or m[5]), int(m[4] or m[6])
        return Number(_signed(m[1], int(m[2]) + Fraction(above, below))) if below else None
    if (m := _FRACTION.fullmatch(text)) is not None:
        above, below = _decimal(m[3] or m[6]), _decimal(m[5] or m[8])
        value = _signed(m[1], _signed(m[2] or "", above)) if below else Fraction(0)
        return Number(_signed(m[4] or m[7] or "", value / below)) if below else None
    if (m := _SCIENTIFIC.fullmatch(text)) is not None:
        power = int((m[3] or m[4] or m[7])[:9])
        if abs(power) > MOST_DIGITS:
            return TooLarge(text)
        return Number(_signed(m[1] or m[5] or "", _decimal(m[2] or m[6] or "1")) * Fraction(10) ** power)
    return _large(text)


def _large(text: str) -> Number | TooLarge | None:
    """A power or a factorial of naturals, where it is small enough to be written out."""
    if (m := _POWER.fullmatch(text)) is not None:
        base, power = int(m[2]), int((m[3] or m[4])[:9])
        if abs(power) * len(m[2]) > MOST_DIGITS:
            return TooLarge(text)
        return Number(_signed(m[1], Fraction(base) ** power)) if base or power >= 0 else None
    if (m := _FACTORIAL.fullmatch(text)) is not None:
        return Number(Fraction(factorial(int(m[1])))) if len(m[1]) <= 3 and int(m[1]) <= 500 else TooLarge(text)
    if _HUGE_FACTORIAL.search(text) and constant(text):
        return TooLarge(text)
    if text.count("^") + text.count("**") > 1 and _TOWER.fullmatch(text):
        return TooLarge(text)
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip(".") or "0")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


# --- what is more than a number --------------------------------------------------------------------------------------


def _named(text: str, depth: int) -> tuple[Named, ...]:
    """`x=3`, `x=1,2`, `x\\in(1,2)`, and the last equals sign of a chain; nothing for a list of equations."""
    parts = [p for p in _parts(text) if _equals(p)]
    at = _equals(text)
    if len(parts) > 1 or (at and _equals(_parts(text)[0]) != at) or depth >= DEPTH:
        return ()
    split = (text[: at[-1]], text[at[-1] + 1 :]) if at else _member(text)
    if split is None or not split[0].strip():
        return ()
    name, first = split[0].strip(), split[0].partition("=")[0].strip()
    variable = _SIMPLE.fullmatch(first) is not None
    simple = variable or constant(name)
    return tuple(Named(first if variable else name, simple, v) for v in read(split[1], depth + 1))


def _between(text: str, depth: int) -> tuple[Named, ...]:
    """`x<3`, `3>x` and `1<x\\le 2` as the intervals they are."""
    match = _RELATION.fullmatch(text)
    if match is None or depth >= DEPTH:
        return ()
    low, below, name, above, high = match.groups()
    down = {below, above} & {">", "\\ge"}
    if down and {below, above} & {"<", "\\le"}:
        return ()
    if down:
        low, below, above, high = high, above, below, low
    ends = [read(low or "-\\infty", depth + 1), read(high or "\\infty", depth + 1)]
    if not all(ends) or not (low or high):
        return ()
    left, right = ("[" if below in ("\\le", "\\ge") else "("), ("]" if above in ("\\le", "\\ge") else ")")
    return (Named(name, True, Items(left, right, (ends[0][0], ends[1][0]))),)


def _equals(text: str) -> list[int]:
    """Places of the equals signs outside of brackets that are no part of another relation."""
    return [i for i, c in enumerate(text) if c == "=" and text[max(0, i - 1) : i] not in tuple("<>!:") and _outside(text, i)]


def _member(text: str) -> tuple[str, str] | None:
    match = re.match(r"([A-Za-z]) ?\\in ?(?=[(\[\\])", text)
    return (match[1], text[match.end() :]) if match else None


def _outside(text: str, at: int) -> bool:
    """Whether a place is inside no bracket. Half-open intervals count their brackets like others."""
    depth = 0
    for c in text[:at]:
        depth += (c in "([{") - (c in ")]}")
    return depth == 0


def _parts(text: str) -> list[str]:
    """Split at commas and semicolons outside of brackets, and at `and` and `or`."""
    out, depth, start = [], 0, 0
    text = _AND.sub(",", text)
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c in ",;":
            out.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*out, text[start:]] if p.strip()]


def _items(text: str, depth: int) -> Items | None:
    """A set, a bracketed list, an interval, or a bare list of two or more."""
    if depth >= DEPTH:
        return None
    left, inner, right = _brackets(text)
    if not left and len(_parts(text)) < 2:
        return None
    parts = _parts(inner)
    if len(parts) > MOST_ITEMS or (left in ("(", "[") and len(parts) < 2 and left + right != "[]"):
        return None
    if any(re.fullmatch(r"0\d\d", p) for p in parts):
        return None
    values = [read(p, depth + 1) for p in parts]
    return Items(left, right, tuple(v[0] for v in values)) if all(values) and values else None


def _both(text: str, depth: int) -> Items | None:
    """`a\\pm b` as the list of its two values."""
    if text.count("\\pm") != 1 or len(_parts(text)) != 1 or depth >= DEPTH:
        return None
    values = [read(text.replace("\\pm ", "\\pm").replace("\\pm", sign).removeprefix("+"), depth + 1) for sign in "+-"]
    return Items("", "", (values[0][0], values[1][0])) if all(values) else None


def _brackets(text: str) -> tuple[str, str, str]:
    """(left, inside, right) where one pair holds everything, else ('', text, '')."""
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 1) == len(text) - 1:
        return "{", text[2:-2], "}"
    if text[0] in "([" and closing(text, 0) == len(text) - 1:
        return text[0], text[1:-1], text[-1]
    return "", text, ""


def _words(text: str) -> Words | None:
    """A word, a phrase, or a choice such as `(B)`: compared as text."""
    if (match := _CHOICE.fullmatch(text)) is not None and len(text) > 1:
        return Words(match[1])
    plain = _TEXT.sub(r"\1", text).strip()
    if (plain != text and "\\" not in plain and not any(c.isdigit() or c in "+*/^=<>" for c in plain)) or _WORDS.fullmatch(plain):
        return Words(plain if len(plain) == 1 else " ".join(plain.casefold().split()))
    return None


def parts(value: Value) -> tuple[Value, ...]:
    """What a value is made of."""
    return value.items if isinstance(value, Items) else (value.value,) if isinstance(value, Named) else ()


def constant(text: str) -> bool:
    """Whether it is made of numbers only, so that it could have been worked out."""
    return _CONSTANT.fullmatch(text) is not None
