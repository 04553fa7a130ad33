"""Reads numbers digit by digit, numbers in words, and chains of equations. Nothing is evaluated."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from posttrain.verifier.math.answer_values import Based, Number, TimeOfDay, TooLarge
from posttrain.verifier.math.spelling import closing
from posttrain.verifier.math.units import SCALES, clash, tail, unit

MOST_DIGITS = 2000
"""A power of ten with a greater exponent is not computed."""

# The digits of a number without a sign: `1,234.5`, `1 234`, `2.`, `.5`. Commas or spaces separate thousands, not both.
_D = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([-+]?)({_D})")
# `3\times 10^{5}`, `3*10^5`, `10^5`, `-2.5e-3`. Groups: 1 or 5 the sign, 2 or 6 the factor, 3, 4 or 7 the exponent.
_SCIENTIFIC = re.compile(
    rf"([-+]?)(?:({_D})(?: ?\\times ?| ?\\cdot ?|\*|x))?10\^(?:\{{([-+]?\d+)\}}|(\d+))|([-+]?)({_D})[eE]([-+]?\d+)"
)
# `\frac{3}{-4}`, `3/-4`, `3:4`. Groups: 1 the sign before it, 2 and 4 or 7 the signs inside it, 3 or 6 the numerator,
# 5 or 8 the denominator.
_FRACTION = re.compile(rf"([-+]?)(?:\\frac\{{([-+]?)({_D})\}}\{{([-+]?)({_D})\}}|({_D})[/:]([-+]?)({_D}))")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")  # `0.1\overline{6}`
_MIXED = re.compile(r"([-+]?)(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))")  # `1\frac{1}{2}`, `1 1/2`
_HUGE_FACTORIAL = re.compile(r"[)}!]!|\d{4}!")  # `(10)!`, `5!!`, `1000!`
_CURRENCY = re.compile(r"([-+]?)(\$|€|£|₹|¥|\\pounds ?|\\euro ?)([-+]?)(.+)")  # `$-5`, `-$5`, `\pounds 5`
_MONEY = {"$": "$", "€": "€", "£": "£", "₹": "₹", "¥": "¥", "\\pounds": "£", "\\euro": "€"}
# An exponent of six or more digits (`2^123456`), a power of a power (`2^{3^4}`), `\binom{10^6}{2}`, `\sqrt[10^9]{2}`.
_VAST = re.compile(r"\^(?:\{[-+]?)?\d{6}|\d\^\{?\d+\^\{?\d|\\binom\{(?:\d{6}|\d+\^)|\\sqrt\[(?:\d+\^|\d{7})")
_CONSTANT = re.compile(r"(?:[-+*/^(){}\[\]\d.,!=%: ]|\\(?:times|cdot|frac|sqrt|div))+")  # `3+4=7`, `\sqrt{2}`
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LETTER = re.compile("[A-Za-z](?![A-Za-z])")  # One letter alone: `h`, and the `m` of `m/s`.
# The number before its words: `12 ` of `12 cm`, `-3.5` of `-3.5\text{m}`, `3\times10^{5} ` of `3\times10^{5} km`.
_BODY = re.compile(r"[-+]?(?:[\d.,/ ]|\\frac\{[\d.]+\}\{[\d.]+\}|\^\{?-?\d+\}?|\\times|\\cdot(?![A-Za-z]))*")
# `2:30 pm`, `14:05`, `5 p.m.`. Groups: hour, minutes, `a` or `p`.
_CLOCK = re.compile(r"(\d\d?)(?::([0-5]\d))?(?: ?(?:\\text\{)?([ap])\.? ?m\.?\}?)?", re.IGNORECASE)
# `1011_2`, `(1011)_{2}`, `1011_{\text{two}}`, `1A.8_{16}`, `1011 base 2`. Groups: digits, base.
_BASED = re.compile(
    r"\(?([0-9A-Z]+(?:\.[0-9A-Z]+)?)\)?(?:_(?:\{(?:\\text\{)?|\\text\{)?| ?(?:\\text\{)?\(?base\}?[ _]?)"
    r"(\d\d?|[a-z]+)\)?\}{0,2}"
)
_NAMED_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {word: n for n, word in enumerate(_NAMED_BASES.split(), 2)}


def number(text: str) -> Number | TooLarge | None:
    """A number with an optional currency, percent sign, unit or round brackets around it."""
    # The first bracket has to close at the very end: `(1)(2)` is a product.
    if text.startswith("(") and text.endswith(")") and closing(text, 0) == len(text) - 1:
        return number(text[1:-1])
    if (currency := _CURRENCY.fullmatch(text)) is not None:
        inner = number((currency[1] or currency[3]) + currency[4])
        money = _MONEY[currency[2].strip()]
        # `$5 dollars` has the same unit twice, which is accepted. `$5 cm` is no number.
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
    factor, unit_name = words
    return Number(inner.value * factor, inner.decimals if factor == 1 else None, False, unit_name)


def _split_words(text: str) -> tuple[str, tuple[Fraction, str] | None]:
    """(number, meaning of the words after it); None if there are no words after a number, or none that are known."""
    number_part = _BODY.match(text)
    end = number_part.end() if number_part else 0
    body, rest = text[:end], text[end:]
    spaced = body.endswith(" ") or rest.startswith(("\\text", "^\\circ"))
    body, rest = body.strip().rstrip(",."), rest.strip()
    plain = _TEXT.sub(r"\1", rest).strip()
    # Words may follow a space, a text command or a degree sign. Directly behind a digit a letter is a variable (`2h`),
    # and only the name of a unit may stand there (`2cm`).
    if not body or not plain or not (spaced or (unit(plain) and _LETTER.match(plain) is None)):
        return text, None
    return body, tail(plain)


def _bare(text: str) -> Number | TooLarge | None:
    """A number without words: a decimal, a repeating decimal, a mixed number, a fraction, or a power of ten (`TooLarge`
    if that is too large). None if the text is none of these, or divides by zero."""
    if (m := _DECIMAL.fullmatch(text)) is not None:
        return Number(_signed(m[1], _decimal(m[2])), len(m[2].partition(".")[2]) or None)
    if (m := _REPEATING.fullmatch(text)) is not None:
        # A decimal 0.h(t) with |h| and |t| digits is (h (10^|t| - 1) + t) / (10^|h| (10^|t| - 1)): 0.1(6) is 15/90.
        fixed, nines = m[3], 10 ** len(m[4]) - 1
        part = Fraction(int(fixed or "0") * nines + int(m[4]), 10 ** len(fixed) * nines)
        return Number(_signed(m[1], Fraction(int(m[2] or "0")) + part))
    if (m := _MIXED.fullmatch(text)) is not None:
        above, below = int(m[3] or m[5]), int(m[4] or m[6])
        return Number(_signed(m[1], int(m[2]) + Fraction(above, below))) if below else None
    if (m := _FRACTION.fullmatch(text)) is not None:
        above, below = _decimal(m[3] or m[6]), _decimal(m[5] or m[8])
        value = _signed(m[1], _signed(m[2] or "", above)) if below else Fraction(0)
        return Number(_signed(m[4] or m[7] or "", value / below)) if below else None
    if (m := _SCIENTIFIC.fullmatch(text)) is not None:
        # Cut before it is converted: a policy may write thousands of digits, and nine are far above the limit anyway.
        # Zeros at the front go first, or `10^{0000000005}` would be 10^0.
        power = int(re.sub(r"^([-+]?)0+(?=\d)", r"\1", m[3] or m[4] or m[7])[:9])
        if abs(power) > MOST_DIGITS:
            return TooLarge(text)
        return Number(_signed(m[1] or m[5] or "", _decimal(m[2] or m[6] or "1")) * Fraction(10) ** power)
    return None


def _decimal(text: str) -> Fraction:
    """The value of a decimal without a sign: `1,234.5`."""
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
    # A base above 36 has no digits to write it with, and below 2 there is no such notation.
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2], 0)
    if not 2 <= base <= 36 or any(int(c, 36) >= base for c in match[1] if c != "."):
        return None
    return Based(match[1].lstrip("0") or "0", base)


def vast(text: str) -> bool:
    """Returns whether a power, a root, a binomial or a factorial in a text is too large to compute."""
    return _VAST.search(text) is not None or (constant(text) and _HUGE_FACTORIAL.search(text) is not None)


def constant(text: str) -> bool:
    """Returns whether a text consists of numbers and operations on them, so that it could have been computed."""
    return _CONSTANT.fullmatch(text) is not None


LONGEST = 120
"""The most characters of a number in words."""
# Names of numbers: from 0 to 19, from 20 to 90, from a thousand on, and denominators: 3 for `third` and `thirds`.
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_SMALL = {word: i for i, word in enumerate(_ONES.split())}
_DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * i for i, word in enumerate(_DECADES.split(), 2)}
_PARTS = {
    **dict.fromkeys(("half", "halves"), 2), **dict.fromkeys(("quarter", "quarters"), 4),
    **{f"{word}{s}": n for s in ("", "s") for word, n in {
        "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
        "eleventh": 11, "twelfth": 12,
        "fifteenth": 15, "sixteenth": 16, "twentieth": 20, "thirtieth": 30, "fiftieth": 50, "hundredth": 100,
        "thousandth": 1000, "millionth": 10**6,
    }.items()},
}  # fmt: skip
_GREAT = {word: int(value) for word, value in SCALES.items() if value >= 1000}
_SPLIT = re.compile(r"[\s-]+")


def worded(text: str) -> Fraction | None:
    """The number that a whole text of words spells; None if it is not a number.

    >>> worded("minus forty-two"), worded("two thirds"), worded("One hundred and five"), worded("four two")
    (Fraction(-42, 1), Fraction(2, 3), Fraction(105, 1), None)
    """
    if len(text) > LONGEST:
        return None
    words = _SPLIT.split(text.strip().casefold())
    # `a` counts as one before a scale (`a hundred`). Alone it is a letter or an article.
    if words in (["a"], ["an"]):
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    value = _value(words[1:] if sign < 0 else words)
    return None if value is None else sign * value


def _value(words: list[str]) -> Fraction | None:
    """The number that words without a sign spell: with a decimal point, as a fraction, or whole; else None."""
    if not words:
        return None
    # `three point one four`: each word after the point is one digit.
    if "point" in words:
        at = words.index("point")
        whole, digits = _whole(words[:at]), words[at + 1 :]
        if whole is None or not digits or any(d not in _SMALL or _SMALL[d] > 9 for d in digits):
            return None
        return whole + Fraction(int("".join(str(_SMALL[d]) for d in digits)), 10 ** len(digits))
    if words[-1] not in _PARTS:
        return _whole(words)
    # `third` alone is a place in an order; only `half` is a number by itself.
    below, rest = _PARTS[words[-1]], words[:-1]
    if not rest:
        return Fraction(1, 2) if words[-1] == "half" else None
    # `two and one half`: a whole number, `and`, and a fraction whose numerator is one word.
    if "and" in rest and rest[-2:-1] == ["and"]:
        whole, above = _whole(rest[:-2]), _whole(rest[-1:])
        return None if whole is None or above is None else whole + above / below
    above = _whole(rest)
    # `two third` is no fraction, and `one third` is.
    plural = words[-1].endswith(("s", "ves"))
    return None if above is None or not above or (above > 1 and not plural) else above / below


def _whole(words: list[str]) -> Fraction | None:
    """A whole number in words: groups such as `forty two`, each before its scale (`million`). The scales decrease."""
    if words in (["a"], ["an"]):
        return Fraction(1)
    # Each scale is smaller than the one before: `two thousand five million` is refused. The first value of `last_scale`
    # stays only if there is no word at all.
    total, last_scale = 0, 10**30
    while words:
        scale_place = next((i for i, word in enumerate(words) if word in _GREAT), None)
        group = words if scale_place is None else words[:scale_place]
        value = _group(group)
        # `one thousand and five`: `and` may stand before a later group.
        if value is None and group and group[0] == "and" and total:
            value = _group(group[1:])
        scale = 1 if scale_place is None else _GREAT[words[scale_place]]
        if value is None or scale >= last_scale:
            return None
        total, last_scale = total + value * scale, scale
        words = [] if scale_place is None else words[scale_place + 1 :]
    return Fraction(total) if last_scale < 10**30 else None


def _group(words: list[str]) -> int | None:
    """The number of words without a greater scale than hundred: `forty two hundred`, `one hundred and five`."""
    if "hundred" in words:
        at = words.index("hundred")
        hundreds = 1 if words[:at] == ["a"] else _below_hundred(words[:at])
        rest = words[at + 1 :]
        rest = rest[1:] if rest[:1] == ["and"] and len(rest) > 1 else rest
        remainder = _below_hundred(rest) if rest else 0
        return None if not hundreds or remainder is None else 100 * hundreds + remainder
    return 1 if words == ["a"] else _below_hundred(words)


def _below_hundred(words: list[str]) -> int | None:
    """The number of one or two words, `seven` or `ninety nine`; None for other words."""
    if len(words) == 1:
        return _SMALL.get(words[0], _TENS.get(words[0]))
    if len(words) == 2 and words[0] in _TENS and 1 <= _SMALL.get(words[1], 0) <= 9:
        return _TENS[words[0]] + _SMALL[words[1]]
    return None


# A value with its rounding in brackets: `1/3 (\approx 0.33)`, `1/3 (or about 0.33)`. Groups: value, rounding.
_ROUNDED = re.compile(
    r"(.+?) ?\((?:\\approx ?|(?:\\text\{)?(?:or )?(?:about|approximately|approx\.?)(?: ?\})? ?)([^()]+)\)"
)


def sides(text: str, places: list[int]) -> list[str]:
    """The texts between the equals signs of a chain such as `x=1+2=3`. `places`: positions of the equals signs."""
    ends = [-1, *places, len(text)]
    return [text[a + 1 : b].strip() for a, b in itertools.pairwise(ends)]


def agree(one: Number, two: Number) -> bool:
    """Returns whether two sides of an equation may be one number: they are equal, perhaps as a percent; have different
    units; or one is a decimal that rounds the other or cuts its digits.

    >>> agree(Number(Fraction(1, 3)), Number(Fraction(333, 1000), 3)), agree(Number(Fraction(43)), Number(Fraction(42)))
    (True, False)
    """
    # `1 m = 100 cm` is no contradiction: units are not converted here, so nothing is known.
    if clash(one.unit, two.unit):
        return True
    x, y = (n.value / 100 if n.percent and not (one.percent and two.percent) else n.value for n in (one, two))
    if x == y:
        return True
    # A rounded decimal differs by at most half a unit of its last digit, and one whose digits were cut by less than
    # one. The percent sign moves the point by two digits.
    digits = [n.decimals + (2 if n.percent else 0) for n in (one, two) if n.decimals is not None]
    return any(abs(x - y) < Fraction(1, 10**d) for d in digits)


def contradicts(pieces: list[str]) -> bool:
    """Returns whether two sides are numbers that differ, as in `43=42`."""
    # Neighbouring numbers are compared. A side that is no number is left out, as is a time, which reads as a ratio.
    numbers = [n for n in (number(piece) for piece in pieces if clock(piece) is None) if isinstance(n, Number)]
    return any(not agree(one, two) for one, two in itertools.pairwise(numbers))


def exact(pieces: list[str]) -> str | None:
    """The last exact number before a decimal that ends the chain: `1/3` of `1/3=0.333`.

    None if the chain does not end with a decimal, or no exact number differs from that decimal.
    """
    last = number(pieces[-1])
    if not isinstance(last, Number) or last.decimals is None:
        return None
    for piece in reversed(pieces):
        if isinstance(n := number(piece), Number) and n.decimals is None and n.value != last.value:
            return piece
    return None


def roundings(text: str) -> list[str]:
    """The sides of `a \\approx b` and of `a (\\approx b)`; the whole text if there is no such sign."""
    if (pair := _ROUNDED.fullmatch(text)) is not None:
        return [pair[1].strip(), pair[2].strip()]
    return [piece.strip() for piece in re.split(r"\\approx(?![A-Za-z])", text)]
