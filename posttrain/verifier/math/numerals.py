"""Reads numbers digit by digit. Nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.verifier.math.answer_values import Based, Number, TimeOfDay, TooLarge
from posttrain.verifier.math.spelling import closing
from posttrain.verifier.math.units import tail, unit

MOST_DIGITS = 2000
"""A power of ten with more digits is not computed."""

_D = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([-+]?)({_D})")
_SCIENTIFIC = re.compile(
    rf"([-+]?)(?:({_D})(?: ?\\times ?| ?\\cdot ?|\*|x))?10\^(?:\{{([-+]?\d+)\}}|(\d+))|([-+]?)({_D})[eE]([-+]?\d+)"
)
_FRACTION = re.compile(rf"([-+]?)(?:\\frac\{{([-+]?)({_D})\}}\{{([-+]?)({_D})\}}|({_D})[/:]([-+]?)({_D}))")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_MIXED = re.compile(r"([-+]?)(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))")
_HUGE_FACTORIAL = re.compile(r"[)}!]!|\d{4}!")
_CURRENCY = re.compile(r"([-+]?)(\$|€|£|₹|¥|\\pounds ?|\\euro ?)([-+]?)(.+)")
_MONEY = {"$": "$", "€": "€", "£": "£", "₹": "₹", "¥": "¥", "\\pounds": "£", "\\euro": "€"}
_VAST = re.compile(r"\^(?:\{[-+]?)?\d{6}|\d\^\{?\d+\^\{?\d|\\binom\{(?:\d{6}|\d+\^)|\\sqrt\[(?:\d+\^|\d{7})")
_CONSTANT = re.compile(r"(?:[-+*/^(){}\[\]\d.,!=%: ]|\\(?:times|cdot|frac|sqrt|div))+")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LETTER = re.compile("[A-Za-z](?![A-Za-z])")
_BODY = re.compile(r"[-+]?(?:[\d.,/ ]|\\frac\{[\d.]+\}\{[\d.]+\}|\^\{?-?\d+\}?|\\times|\\cdot(?![A-Za-z]))*")
_CLOCK = re.compile(r"(\d\d?)(?::([0-5]\d))?(?: ?(?:\\text\{)?([ap])\.? ?m\.?\}?)?", re.IGNORECASE)
_BASED = re.compile(
    r"\(?([0-9A-Z]+(?:\.[0-9A-Z]+)?)\)?(?:_(?:\{(?:\\text\{)?|\\text\{)?| ?(?:\\text\{)?\(?base\}?[ _]?)"
    r"(\d\d?|[a-z]+)\)?\}{0,2}"
)
_NAMED_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {word: n for n, word in enumerate(_NAMED_BASES.split(), 2)}


def number(text: str) -> Number | TooLarge | None:
    """A number with an optional currency, percent sign, unit or round brackets around it."""
    if text.startswith("(") and text.endswith(")") and closing(text, 0) == len(text) - 1:
        return number(text[1:-1])
    if (match := _CURRENCY.fullmatch(text)) is not None:
        inner = number((match[1] or match[3]) + match[4])
        money = _MONEY[match[2].strip()]
        if isinstance(inner, Number) and inner.unit in ("", money) and not inner.percent:
            return Number(inner.value, inner.decimals, False, money)
        return None
    if text.endswith("%") or text.lower().endswith((" percent", "\\text{percent}")):
        inner = _bare(re.sub(r"(?:%| percent|\\text\{percent\})$", "", text, flags=re.IGNORECASE).strip())
        return Number(inner.value, inner.decimals, True) if isinstance(inner, Number) else inner
    bare = _bare(text)
    if bare is not None:
        return bare
    body, words = _split_words(text)
    if words is None:
        return None
    inner = _bare(body)
    if not isinstance(inner, Number):
        return inner
    factor, name = words
    return Number(inner.value * factor, inner.decimals if factor == 1 else None, False, name)


def _split_words(text: str) -> tuple[str, tuple[Fraction, str] | None]:
    """(number, meaning of the words after it); None if there are no words after a number, or none that are known."""
    at = _BODY.match(text)
    end = at.end() if at else 0
    body, rest = text[:end], text[end:]
    spaced = body.endswith(" ") or rest.startswith(("\\text", "^\\circ"))
    body, rest = body.strip().rstrip(",."), rest.strip()
    plain = _TEXT.sub(r"\1", rest).strip()
    if not body or not plain or not (spaced or (unit(plain) and _LETTER.match(plain) is None)):
        return text, None
    return body, tail(plain)


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
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip(".") or "0")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def clock(text: str) -> TimeOfDay | None:
    """A time of day: hours to 24 and two digits of minutes, or either with am or pm. Every other `a:b` is a ratio.

    >>> clock("5 pm"), clock("2:4"), clock("10:75")
    (TimeOfDay(hour=5, minute=0, half='pm', text='5 pm'), None, None)
    """
    match = _CLOCK.fullmatch(text)
    if match is None or not (match[2] or match[3]) or int(match[1]) > (12 if match[3] else 24):
        return None
    return TimeOfDay(int(match[1]), int(match[2] or 0), f"{match[3].lower()}m" if match[3] else "", text)


def based(text: str) -> Based | None:
    """`1011_2`, `(1011)_{2}`, `1011_{\\text{two}}`, `1011 base 2`: all digits must be allowed in the base, so `2a_1`
    is not such a number.

    >>> based("1011_2"), based("2A_{16}"), based("12_2")
    (Based(digits='1011', base=2), Based(digits='2A', base=16), None)
    """
    match = _BASED.fullmatch(text)
    if match is None or not any(c.isdigit() for c in match[1]):
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2], 0)
    if not 2 <= base <= 36 or any(int(c, 36) >= base for c in match[1] if c != "."):
        return None
    return Based(match[1].lstrip("0") or "0", base)


def vast(text: str) -> bool:
    """Returns whether a power, a root, a binomial or a factorial in a text is too large to compute."""
    return _VAST.search(text) is not None or (constant(text) and _HUGE_FACTORIAL.search(text) is not None)


def constant(text: str) -> bool:
    """Returns whether a text consists of numbers only, so that it could have been computed."""
    return _CONSTANT.fullmatch(text) is not None
