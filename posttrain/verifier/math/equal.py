"""Compares two answers, symmetrically except for what a gold answer leaves out. Where mathematics does not decide:

- Numbers are exact: 0.5 is 1/2, and 0.33 is not 1/3. A decimal of six or more digits after its point is also what it
  rounds, to five significant digits: 0.333333 is 1/3. A sum, difference or product left standing (`3+4` for 7) is no
  answer to a question whose answer is a number.
- 50% is 50% and 0.5, and also 50: the sign is often left out. 0.5 is not 50.
- A unit may be left out, behind one number such as 12, `12\\pi` or `4\\sqrt{2}`; two different units differ, nothing is
  converted. One letter is a unit only behind a space or in a text command: `2 h` is 2 hours, and `2h` a product that
  is not 2. Other words after a number are passed over (12 apples), but not those that make another number of it: 5
  million is 5000000, `5 squared` is not 5.
- `1011_2` is `1011`, and `1011_3` is neither: a base may be left out, and nothing is converted between bases.
- `h:mm` with hours to 24 and two digits of minutes is a time of day, equal to the same time only. Every other `a:b` is
  the ratio a/b; a time in lowest terms (`1:12`) is also that ratio where the other side is no time. So `2:4` is `1:2`,
  and `10:30` is not `1:3`.
- A choice may be said with its value: `(C) 12` is `C`, and `12` too; where both sides give both, both count. `ABD` is
  `A, B, D`.
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
from typing import Any

from posttrain.verifier.math.answer_values import (
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
from posttrain.verifier.math.numerals import constant
from posttrain.verifier.math.units import clash

Algebra = Callable[[str, str], bool]
"""(gold, said) -> whether they are equal, both spelled."""
ROUNDED = 6
"""A decimal with at least this many digits after the point also equals the number that it rounds."""

# An operation that is not computed: `3+4`, `3-4`, `2*3`, `6/(1+2)`, `2\times3`, `2(3)`, `(2)3`. A sign counts only
# where it is an operator, behind a digit, `!` or a closing bracket; `6/2` is a fraction.
_STANDING = re.compile(r"(?<=[\d)}!])(?:\+|-|\*|/\(|\\times|\\cdot|\()|\)\d")
_LETTERS = re.compile("[A-J]+")
"""The letters of several choices: `A, B, D`, or `ABD` without commas."""
_OPEN = re.compile(
    r"(?<![A-Za-z\\])(?!(?:[eiE]|sqrt)(?![A-Za-z]))[A-Za-z]+"  # `x` in `2x`, and not `e`, `i` or `sqrt`
    r"|\\(?:sum|prod|int|lim|max|min|gcd|lcm|lfloor|lceil|[bp]?mod|det)(?![A-Za-z])"
)
"""Parts that no number has: letters but Euler's number and the imaginary unit, and functions to be computed."""


def equal(gold: Value, said: Value, algebra: Algebra | None = None) -> bool | None:
    """Returns whether `said` equals `gold`; None if only the algebra can decide and there is none here."""
    # In order of precedence: the kind that contains another one is compared first (`x=(1,2)` is a name, then a list).
    for kind, compare in _COMPARED.items():
        if isinstance(gold, kind) or isinstance(said, kind):
            return compare(gold, said, algebra)
    if isinstance(gold, TooLarge) or isinstance(said, TooLarge):
        return gold == said
    if isinstance(gold, Number) and isinstance(said, Number):
        return _numbers(gold, said)
    # Words are compared without their case, and single letters with it: `yes` is `Yes`, and `a` is not `A`.
    if isinstance(gold, WordAnswer) or isinstance(said, WordAnswer):
        return _text(gold).casefold() == _text(said).casefold() if len(_text(gold)) > 1 else _text(gold) == _text(said)
    if isinstance(gold, Number | Other) and isinstance(said, Number | Other) and clash(gold.unit, said.unit):
        return False
    # The algebra would find `3+4` equal to 7, and the policy would not have computed the sum.
    if isinstance(gold, Number) and isinstance(said, Other) and standing(said.text):
        return False
    one, two = _text(gold), _text(said)
    # No number equals text with a free letter, so the algebra need not be asked.
    if isinstance(gold, Number) and _OPEN.search(two):
        return False
    if one == two:
        return True
    return None if algebra is None else algebra(one, two)


def standing(text: str) -> bool:
    """Returns whether an expression of numbers contains a sum, a difference or a product that is not computed.

    >>> standing("3+4"), standing("2\\\\cdot 3"), standing("-3^2"), standing("\\\\frac{1}{2}")
    (True, True, False, False)
    """
    return constant(text) and _STANDING.search(text.replace(" ", "")) is not None


def _numbers(gold: Number, said: Number) -> bool:
    """Compares two numbers with their units and percent signs."""
    if clash(gold.unit, said.unit):
        return False
    if gold.percent == said.percent:
        return _close(gold, said, gold.value, said.value)
    # One side is bare, because the sign is often left out: 50% is then 0.5 and also 50.
    bare, marked = (said, gold) if gold.percent else (gold, said)
    return _close(bare, marked, bare.value, marked.value) or _close(bare, marked, bare.value, marked.value / 100)


def _close(a: Number, b: Number, x: Fraction, y: Fraction) -> bool:
    """Returns whether the values `x` of `a` and `y` of `b` are equal, or one is a decimal that rounds the other."""
    if x == y:
        return True
    # A decimal may round only a number that was written in another way, such as a fraction. Two decimals are exact.
    rounded = (a.decimals is None) != (b.decimals is None)
    return rounded and near(x, y, a.decimals or b.decimals or 0)


def near(x: Fraction, y: Fraction, digits: int) -> bool:
    """Returns whether two numbers, of which one is a decimal with `digits` digits after its point, are equal up to
    rounding, to five significant digits. With fewer than `ROUNDED` digits the decimal is exact.

    >>> near(Fraction(1, 3), Fraction(333333, 10**6), 6), near(Fraction(1, 3**20), Fraction(0), 6)
    (True, False)
    """
    # Half a unit of the last digit, and five significant digits, so that 0.000000 does not round every small number.
    gap = abs(x - y)
    return digits >= ROUNDED and gap * 2 <= Fraction(1, 10**digits) and gap * 10**5 <= max(abs(x), abs(y))


def _choice(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares two values of which at least one is a choice with its value, `(C) 12`."""
    if isinstance(gold, ChoiceAnswer) and isinstance(said, ChoiceAnswer):
        return gold.letter == said.letter and equal(gold.value, said.value, algebra)
    choice, other = (gold, said) if isinstance(gold, ChoiceAnswer) else (said, gold)
    assert isinstance(choice, ChoiceAnswer)
    if isinstance(other, WordAnswer | Other) and re.fullmatch("[A-J]", _text(other)):
        return choice.letter == _text(other)
    return equal(choice.value, other, algebra) if choice is gold else equal(other, choice.value, algebra)


def _clock(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares two values of which at least one is a time of day."""
    if isinstance(gold, TimeOfDay) and isinstance(said, TimeOfDay):
        # Two times are equal in either of two ways. Both have the same hour as written, and one side may leave out am
        # or pm: `2:30` is `2:30 pm`. Or they have the same hour of the day: `2 pm` is `14:00`.
        same_half = gold.half == said.half or not (gold.half and said.half)
        gold_hour, said_hour = (c.hour % 12 + 12 * (c.half == "pm") if c.half else c.hour for c in (gold, said))
        same_hour = gold_hour == said_hour and bool(gold.half or said.half)
        return gold.minute == said.minute and ((gold.hour == said.hour and same_half) or same_hour)
    clock, other = (gold, said) if isinstance(gold, TimeOfDay) else (said, gold)
    assert isinstance(clock, TimeOfDay)
    if not isinstance(other, Number | Other):
        return False
    # `5 pm` and `5:00` are also the number 5, which the task may have asked for.
    if not clock.minute:
        return isinstance(other, Number) and not other.percent and other.value == clock.hour and not other.unit
    # As a ratio, `10:30` would have been written in lowest terms, 1:3, and `2:05` without the zero.
    if clock.half or clock.minute < 10 or gcd(clock.hour, clock.minute) > 1:
        return False
    ratio = Number(Fraction(clock.hour, clock.minute))
    return equal(ratio, other, algebra) if clock is gold else equal(other, ratio, algebra)


def _based(gold: Value, said: Value, algebra: Algebra | None) -> bool:
    """Compares two values of which at least one is a number with its base."""
    if isinstance(gold, Based) and isinstance(said, Based):
        return gold == said
    based, other = (gold, said) if isinstance(gold, Based) else (said, gold)
    assert isinstance(based, Based)
    # Only the digits are compared: without its base `1011` may be a decimal number or a binary one.
    digits = _text(other).lstrip("0").upper() or "0"
    return isinstance(other, Number | Other | WordAnswer) and digits == based.digits and not getattr(other, "unit", "")


def _named(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares two values of which at least one is named, `x=3`."""
    if isinstance(gold, Named) and isinstance(said, Named):
        # A left side of numbers (`3+4=7`) names nothing, so it agrees with every name.
        if gold.name == said.name or any(constant(v.name) and v.simple for v in (gold, said)):
            same = equal(gold.value, said.value, algebra)
            if same or (gold.simple and said.simple):
                return same
        elif gold.simple and said.simple:
            return False
        # Where a left side is an expression (`x^2=3`) the two are compared as equations.
        return None if algebra is None else algebra(text_of(gold), text_of(said))
    named, other = (gold, said) if isinstance(gold, Named) else (said, gold)
    assert isinstance(named, Named)
    # `x^2=3` beside a bare value: the left side is no name that could be left out.
    if not named.simple:
        return False
    return equal(named.value, other, algebra) if named is gold else equal(other, named.value, algebra)


def _items(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares two values of which at least one is a list, a set, a pair or an interval."""
    if not isinstance(gold, Items) or not isinstance(said, Items):
        items, other = (gold, said) if isinstance(gold, Items) else (said, gold)
        assert isinstance(items, Items)
        # A set or a list of one is its item.
        if len(items.items) == 1 and items.left in ("{", "["):
            return equal(items.items[0], other, algebra) if items is gold else equal(other, items.items[0], algebra)
        letters = "".join(_text(v) for v in items.items)
        # `A, B, D` and `ABD` name the same choices, in any order.
        if items.left in ("", "{") and _LETTERS.fullmatch(letters) and isinstance(other, Other | WordAnswer):
            return sorted(letters) == sorted(_text(other).upper())
        if not isinstance(other, Other):
            return False
        return None if algebra is None else algebra(text_of(gold), text_of(said))
    # `brackets` has one entry where both are written with the same brackets.
    brackets = {gold.left + gold.right, said.left + said.right}
    if len(gold.items) != len(said.items):
        return False
    # Bare lists and sets have no order.
    if brackets <= {"", "{}"}:
        return _matched(gold.items, said.items, algebra)
    if len(brackets) == 1 or brackets in ({"", "()"}, {"", "[]"}):
        same = [equal(g, s, algebra) for g, s in zip(gold.items, said.items, strict=True)]
        # One item that differs decides it, although others are still open.
        return False if False in same else None if None in same else True
    return False


def _union(gold: Value, said: Value, algebra: Algebra | None) -> bool | None:
    """Compares two values of which at least one is a union. Only the algebra can, with a union, interval or set."""
    if any(not isinstance(v, Items | Union | Other) or (isinstance(v, Items) and not v.left) for v in (gold, said)):
        return False
    return None if algebra is None else algebra(text_of(gold), text_of(said))


_COMPARED: dict[type[Value], Callable[[Any, Any, Algebra | None], bool | None]] = {
    ChoiceAnswer: _choice, Named: _named, Union: _union, Items: _items, TimeOfDay: _clock, Based: _based
}  # fmt: skip


def _matched(gold: Sequence[Value], said: Sequence[Value], algebra: Algebra | None) -> bool | None:
    """Returns whether each gold item matches a different item of the answer, in any order."""
    # Each item takes the first equal one that is left. No other assignment need be tried, because equality is
    # transitive but for rounding.
    left_over = list(said)
    undecided = False
    for item in gold:
        answers = [equal(item, s, algebra) for s in left_over]
        if True in answers:
            left_over.pop(answers.index(True))
        elif None in answers:
            undecided = True
        else:
            return False
    return None if undecided else True


def _text(value: Value) -> str:
    """A value as LaTeX. An expression loses its text commands: `12\\text{ cm}` is `12 cm`."""
    if isinstance(value, Other):
        return re.sub(r"\\text\{([^{}]*)\}", r"\1", value.text)
    return text_of(value)


def text_of(value: Value) -> str:
    """A value as LaTeX."""
    if isinstance(value, Number):
        v = value.value
        # The digits of a decimal are written out: by their number the algebra knows to how many it may be rounded.
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
