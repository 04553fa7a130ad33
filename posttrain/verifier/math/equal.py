"""Compares two answers. The comparison is symmetric except for what a gold answer leaves out. These are its rules where
mathematics does not decide.

- Numbers are exact: 0.5 is 1/2, and 0.33 is not 1/3. A decimal of six or more digits after its point is also what it
  rounds: 0.333333 is 1/3. A sum, difference or product left standing (`3+4` for 7) is no answer to a question whose
  answer is a number.
- 50% is 50% and 0.5, and also 50: the sign is often left out. 0.5 is not 50.
- A unit may be left out, behind a number and behind `12\\pi` or `4\\sqrt{2}`; two different units differ, nothing is
  converted. Other words after a number are passed over (12 apples), but not those that make another number of it: 5
  million is 5000000, `5 squared` is not 5.
- `1011_2` is `1011`, and `1011_3` is neither: a base may be left out, and nothing is converted between bases.
- `h:mm` with hours to 24 and two digits of minutes is a time of day, equal to the same time only. Every other `a:b` is
  the ratio a/b; a time in lowest terms (`1:12`) is also that ratio where the other side is no time. So `2:4` is `1:2`,
  and `10:30` is not `1:3`.
- A choice may be said with its value: `(C) 12` is `C`, and `12` too; where both sides give both, both count.
- `1,2` is a list without order, like the set `{1,2}`. `(1,2)` and `[1,2]` have an order, and their own meaning: the
  pair or open interval, the list or closed interval. A bare list equals a bracketed one with the same order; brackets
  of different kinds differ.
- A value may be named (`x=3`) where the other is not; different names differ. Case matters in one letter (a choice, a
  variable), and in no longer word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd

from posttrain.verifier.math.numerals import constant
from posttrain.verifier.math.units import clash
from posttrain.verifier.math.values import (
    Based,
    ChoiceAnswer,
    Items,
    Named,
    Number,
    Other,
    TimeOfDay,
    TooLarge,
    Union,
    Value,
    WordAnswer,
)

Algebra = Callable[[str, str], bool]
"""(gold, said) -> whether they are equal, both spelled."""
ROUNDED = 6
"""A decimal with at least so many digits after the point also equals the number that it rounds."""

_STANDING = re.compile(r"(?<=[\d)}!])(?:\+|-|\*|/\(|\\times|\\cdot|\()|\)\d")
_NO_NUMBER = re.compile(r"\d\.\d+\.|\.\.")
_BASE = re.compile(r"(?<=[\d)])_(\{[^{}]*\}|\w)")
_LETTERS = re.compile(r"[A-Za-z]+")
_KNOWN = {
    "e",
    "i",
    "pi",
    "frac",
    "sqrt",
    "times",
    "cdot",
    "div",
    "log",
    "ln",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
}
_KNOWN |= {"arctan", "binom", "exp", "text", "le", "ge", "infty", "pm", "mp", "overline", "left", "right"}


def equal(gold: Value, said: Value, algebra: Algebra | None = None) -> bool | None:
    """Whether `said` equals `gold`; None if only the algebra can decide and there is none here."""
    if isinstance(gold, ChoiceAnswer) or isinstance(said, ChoiceAnswer):
        return _choice(gold, said, algebra)
    if isinstance(gold, Named) or isinstance(said, Named):
        return _named(gold, said, algebra)
    if isinstance(gold, Union) or isinstance(said, Union):
        return _union(gold, said, algebra)
    if isinstance(gold, Items) or isinstance(said, Items):
        return _items(gold, said, algebra)
    if isinstance(gold, TimeOfDay) or isinstance(said, TimeOfDay):
        return _clock(gold, said, algebra)
    if isinstance(gold, Based) or isinstance(said, Based):
        return _based(gold, said)
    if isinstance(gold, TooLarge) or isinstance(said, TooLarge):
        return gold == said
    if isinstance(gold, Number) and isinstance(said, Number):
        return _numbers(gold, said)
    if isinstance(gold, WordAnswer) or isinstance(said, WordAnswer):
        return _text(gold).casefold() == _text(said).casefold() if len(_text(gold)) > 1 else _text(gold) == _text(said)
    if isinstance(gold, Number | Other) and isinstance(said, Number | Other) and clash(gold.unit, said.unit):
        return False
    if isinstance(gold, Number) and isinstance(said, Other) and (standing(said.text) or _has_variable(said.text)):
        return False
    one, two = _text(gold), _text(said)
    if one == two:
        return True
    bases = [sorted(_BASE.findall(text)) for text in (one, two)]
    if bases[0] != bases[1] and all(bases):
        return False
    if _NO_NUMBER.search(two) or (one.isalpha() and two.isalpha() and len(one) == len(two) == 1):
        return False
    return None if algebra is None else algebra(one, two)


def standing(text: str) -> bool:
    """Whether an expression of numbers contains a sum, a difference or a product that is not computed.

    >>> standing("3+4"), standing("2\\\\cdot 3"), standing("-3^2"), standing("\\\\frac{1}{2}")
    (True, True, False, False)
    """
    return constant(text) and _STANDING.search(text.replace(" ", "")) is not None


def _has_variable(text: str) -> bool:
    return any(word not in _KNOWN for word in _LETTERS.findall(text))


def _numbers(gold: Number, said: Number) -> bool:
    if clash(gold.unit, said.unit):
        return False
    if gold.percent == said.percent:
        return _close(gold, said, gold.value, said.value)
    bare, marked = (said, gold) if gold.percent else (gold, said)
    return _close(bare, marked, bare.value, marked.value) or _close(bare, marked, bare.value, marked.value / 100)


def _close(a: Number, b: Number, x: Fraction, y: Fraction) -> bool:
    if x == y:
        return True
    if (a.decimals is None) == (b.decimals is None):
        return False
    decimals = a.decimals if a.decimals is not None else b.decimals
    return decimals is not None and decimals >= ROUNDED and abs(x - y) * 2 <= Fraction(1, 10**decimals)


def _choice(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    if isinstance(gold, ChoiceAnswer) and isinstance(said, ChoiceAnswer):
        return gold.letter == said.letter and equal(gold.value, said.value, algebra)
    choice, other = (gold, said) if isinstance(gold, ChoiceAnswer) else (said, gold)
    assert isinstance(choice, ChoiceAnswer)
    if isinstance(other, WordAnswer | Other) and re.fullmatch("[A-J]", _text(other)):
        return choice.letter == _text(other)
    return equal(choice.value, other, algebra) if choice is gold else equal(other, choice.value, algebra)


def _clock(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    if isinstance(gold, TimeOfDay) and isinstance(said, TimeOfDay):
        alike = gold.half == said.half or not (gold.half and said.half)
        day = _of_day(gold) == _of_day(said) and bool(gold.half or said.half)
        return gold.minute == said.minute and ((gold.hour == said.hour and alike) or day)
    clock, other = (gold, said) if isinstance(gold, TimeOfDay) else (said, gold)
    assert isinstance(clock, TimeOfDay)
    if not isinstance(other, Number | Other):
        return False
    if not clock.minute:
        return isinstance(other, Number) and not other.percent and other.value == clock.hour and not other.unit
    if clock.half or clock.minute < 10 or gcd(clock.hour, clock.minute) > 1:
        return False
    ratio = Number(Fraction(clock.hour, clock.minute))
    return equal(ratio, other, algebra) if clock is gold else equal(other, ratio, algebra)


def _of_day(clock: TimeOfDay) -> int:
    return clock.hour % 12 + (12 if clock.half == "pm" else 0) if clock.half else clock.hour


def _based(gold: Value, said: Value) -> bool:
    if isinstance(gold, Based) and isinstance(said, Based):
        return gold == said
    based, other = (gold, said) if isinstance(gold, Based) else (said, gold)
    assert isinstance(based, Based)
    if isinstance(other, Number):
        return (
            not other.unit
            and not other.percent
            and based.digits.replace(".", "", 1).isdigit()
            and Fraction(based.digits) == other.value
        )
    return isinstance(other, Other | WordAnswer) and _text(other).lstrip("0").upper() == based.digits


def _named(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    if isinstance(gold, Named) and isinstance(said, Named):
        if gold.name == said.name or (not _variable(said) and said.simple) or (not _variable(gold) and gold.simple):
            return equal(gold.value, said.value, algebra)
        if gold.simple and said.simple:
            return False
        return None if algebra is None else algebra(text_of(gold), text_of(said))
    named, other = (gold, said) if isinstance(gold, Named) else (said, gold)
    assert isinstance(named, Named)
    if not named.simple:
        return False
    return equal(named.value, other, algebra) if named is gold else equal(other, named.value, algebra)


def _variable(value: Named) -> bool:
    return not constant(value.name)


def _items(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    if not isinstance(gold, Items) or not isinstance(said, Items):
        items, other = (gold, said) if isinstance(gold, Items) else (said, gold)
        assert isinstance(items, Items)
        if len(items.items) == 1 and items.left in ("{", "["):
            return equal(items.items[0], other, algebra) if items is gold else equal(other, items.items[0], algebra)
        if not isinstance(other, Other):
            return False
        return None if algebra is None else algebra(text_of(gold), text_of(said))
    brackets = {gold.left + gold.right, said.left + said.right}
    if len(gold.items) != len(said.items):
        return False
    if brackets <= {"", "{}"}:
        return _matched(gold.items, said.items, algebra)
    if len(brackets) == 1 or brackets in ({"", "()"}, {"", "[]"}):
        return _all(equal(g, s, algebra) for g, s in zip(gold.items, said.items, strict=True))
    return False


def _union(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares the parts in any order. If the parts were split differently, the algebra decides."""
    if isinstance(gold, Union) and isinstance(said, Union) and len(gold.items) == len(said.items):
        if _matched(gold.items, said.items, algebra):
            return True
    elif any(not isinstance(v, Items | Union | Other) or (isinstance(v, Items) and not v.left) for v in (gold, said)):
        return False
    return None if algebra is None else algebra(text_of(gold), text_of(said))


def _matched(gold: Sequence[Value], said: Sequence[Value], algebra: Algebra | None) -> bool | None:
    """Whether each gold item matches a different item of the answer, in any order."""
    rest = list(said)
    open_ = False
    for item in gold:
        answers = [equal(item, s, algebra) for s in rest]
        if True in answers:
            rest.pop(answers.index(True))
        elif None in answers:
            open_ = True
        else:
            return False
    return None if open_ else True


def _all(answers: Sequence[bool | None] | object) -> bool | None:
    listed = list(answers)  # type: ignore[call-overload]
    return False if False in listed else None if None in listed else True


def _text(value: Value) -> str:
    """A value in its spelling, without text commands."""
    if isinstance(value, Other):
        return re.sub(r"\\text\{([^{}]*)\}", r"\1", value.text)
    return text_of(value)


def text_of(value: Value) -> str:
    """A value as LaTeX."""
    if isinstance(value, Number):
        v = value.value
        if value.decimals:
            digits = str(abs(v.numerator * 10**value.decimals // v.denominator)).rjust(value.decimals + 1, "0")
            point = f"{'-' if v < 0 else ''}{digits[: -value.decimals]}.{digits[-value.decimals :]}"
            return f"{point}%" if value.percent else point
        whole = str(v.numerator) if v.denominator == 1 else rf"\frac{{{v.numerator}}}{{{v.denominator}}}"
        return f"{whole}%" if value.percent else whole
    if isinstance(value, Named):
        return f"{value.name}={text_of(value.value)}"
    if isinstance(value, Union):
        return "\\cup ".join(text_of(v) for v in value.items)
    if isinstance(value, Based):
        return f"{value.digits}_{{{value.base}}}"
    if isinstance(value, ChoiceAnswer):
        return text_of(value.value)
    if isinstance(value, Items):
        inner = ",".join(text_of(v) for v in value.items)
        left, right = ("\\{", "\\}") if value.left == "{" else (value.left, value.right)
        return f"{left}{inner}{right}"
    return value.text
