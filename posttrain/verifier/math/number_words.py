"""Numbers written in words: `forty-two`, `minus two thirds`, `three point five`, `one hundred and twenty-three`."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.verifier.math.units import SCALES

LONGEST = 120
"""The most characters of a number in words."""
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
    if words in (["a"], ["an"]):
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    value = _value(words[1:] if sign < 0 else words)
    return None if value is None else sign * value


def _value(words: list[str]) -> Fraction | None:
    if not words:
        return None
    if "point" in words:
        at = words.index("point")
        whole, digits = _whole(words[:at]), words[at + 1 :]
        if whole is None or not digits or any(d not in _SMALL or _SMALL[d] > 9 for d in digits):
            return None
        return whole + Fraction(int("".join(str(_SMALL[d]) for d in digits)), 10 ** len(digits))
    if words[-1] not in _PARTS:
        return _whole(words)
    below, rest = _PARTS[words[-1]], words[:-1]
    if not rest:
        return Fraction(1, 2) if words[-1] == "half" else None
    if "and" in rest and rest[-2:-1] == ["and"]:
        whole, above = _whole(rest[:-2]), _whole(rest[-1:])
        return None if whole is None or above is None else whole + above / below
    above = _whole(rest)
    many = words[-1].endswith(("s", "ves"))
    return None if above is None or not above or (above > 1 and not many) else above / below


def _whole(words: list[str]) -> Fraction | None:
    """A whole number: groups below a thousand, each before a scale, the scales decreasing."""
    if words in (["a"], ["an"]):
        return Fraction(1)
    total, last = 0, 10**30
    while words:
        at = next((i for i, word in enumerate(words) if word in _GREAT), None)
        group = words if at is None else words[:at]
        value = _group(group)
        if value is None and group and group[0] == "and" and total:
            value = _group(group[1:])
        scale = 1 if at is None else _GREAT[words[at]]
        if value is None or scale >= last:
            return None
        total, last = total + value * scale, scale
        words = [] if at is None else words[at + 1 :]
    return Fraction(total) if last < 10**30 else None


def _group(words: list[str]) -> int | None:
    """`forty-two hundred`, `one hundred and five`, `ninety nine`."""
    if "hundred" in words:
        at = words.index("hundred")
        above = 1 if words[:at] == ["a"] else _below_hundred(words[:at])
        rest = words[at + 1 :]
        rest = rest[1:] if rest[:1] == ["and"] and len(rest) > 1 else rest
        below = _below_hundred(rest) if rest else 0
        return None if not above or below is None else 100 * above + below
    return 1 if words == ["a"] else _below_hundred(words)


def _below_hundred(words: list[str]) -> int | None:
    if len(words) == 1:
        return _SMALL.get(words[0], _TENS.get(words[0]))
    if len(words) == 2 and words[0] in _TENS and 1 <= _SMALL.get(words[1], 0) <= 9:
        return _TENS[words[0]] + _SMALL[words[1]]
    return None
