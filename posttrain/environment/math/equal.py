"""When two answers are the same. Symmetric but for what a gold answer leaves out, and documented where mathematics leaves it open.

- Numbers are exact: 0.5 is 1/2, and 0.33 is not 1/3. A decimal of six or more digits after its point is also what it rounds: 0.333333
  is 1/3. A sum, difference or product left standing (`3+4` for 7) is no answer to a question whose answer is a number.
- 50% is 50% and 0.5, and also 50: the sign is often left out. 0.5 is not 50.
- A unit may be left out; two different units differ, nothing is converted. Other words after a number are passed over (12 apples).
- `1,2` is a list without order, like the set `{1,2}`. `(1,2)` and `[1,2]` have an order, and their own meaning: the pair or open
  interval, the list or closed interval. A bare list equals a bracketed one with the same order; brackets of different kinds differ.
- A value may be named (`x=3`) where the other is not; different names differ. Case matters in one letter (a choice, a variable),
  and in no longer word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from posttrain.environment.math.reading import Items, Named, Number, Other, TooLarge, Value, Words, constant

Algebra = Callable[[str, str], bool]
"""(gold, said) -> whether they are equal, both spelled."""
ROUNDED = 6
"""Digits after the point from which a decimal stands for what it rounds."""

_STANDING = re.compile(r"(?<=[\d)}!])(?:\+|-|\*|/\(|\\times|\\cdot|\()|\)\d")
_NO_NUMBER = re.compile(r"\d\.\d+\.|\.\.")
_LETTERS = re.compile(r"[A-Za-z]+")
_KNOWN = {"e", "i", "pi", "frac", "sqrt", "times", "cdot", "div", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos"}
_KNOWN |= {"arctan", "binom", "exp", "text", "le", "ge", "infty", "pm", "mp", "overline", "left", "right"}


def equal(gold: Value, said: Value, algebra: Algebra | None = None) -> bool | None:
    """Whether `said` is `gold`; None where only the algebra knows and there is none here."""
    if isinstance(gold, Named) or isinstance(said, Named):
        return _named(gold, said, algebra)
    if isinstance(gold, Items) or isinstance(said, Items):
        return _items(gold, said, algebra)
    if isinstance(gold, TooLarge) or isinstance(said, TooLarge):
        return gold == said
    if isinstance(gold, Number) and isinstance(said, Number):
        return _numbers(gold, said)
    if isinstance(gold, Words) or isinstance(said, Words):
        return _text(gold).casefold() == _text(said).casefold() if len(_text(gold)) > 1 else _text(gold) == _text(said)
    if isinstance(gold, Number) and isinstance(said, Other) and (standing(said.text) or _has_variable(said.text)):
        return False
    one, two = _text(gold), _text(said)
    if one == two:
        return True
    if _NO_NUMBER.search(two) or (one.isalpha() and two.isalpha() and len(one) == len(two) == 1):
        return False
    return None if algebra is None else algebra(one, two)


def standing(text: str) -> bool:
    """Whether an expression of numbers leaves a sum, a difference or a product to be worked out.

    >>> standing("3+4"), standing("2\\\\cdot 3"), standing("-3^2"), standing("\\\\frac{1}{2}")
    (True, True, False, False)
    """
    return constant(text) and _STANDING.search(text.replace(" ", "")) is not None


def _has_variable(text: str) -> bool:
    return any(word not in _KNOWN for word in _LETTERS.findall(text))


def _numbers(gold: Number, said: Number) -> bool:
    if gold.unit and said.unit and gold.unit != said.unit:
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
        if isinstance(other, Number | Words | TooLarge):
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


def _matched(gold: Sequence[Value], said: Sequence[Value], algebra: Algebra | None) -> bool | None:
    """Whether each gold item has one of its own among what was said, in any order."""
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
    """A value as it was spelled, without the marks of text."""
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
    if isinstance(value, Items):
        inner = ",".join(text_of(v) for v in value.items)
        left, right = ("\\{", "\\}") if value.left == "{" else (value.left, value.right)
        return f"{left}{inner}{right}"
    return value.text
