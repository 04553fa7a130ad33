"""Units by their names. Nothing is converted: 5 m and 500 cm are different answers, as in the data sets."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

_NAMES = (
    "mm millimeter millimetre, cm centimeter centimetre, dm decimeter decimetre, m meter metre,"
    " km kilometer kilometre, in inch inches, ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram,"
    " lb, oz ounce, ml milliliter millilitre mL, L liter litre l, s second sec, min minute, h hour hr, day, week,"
    " month, year yr, deg degree ^\\circ, rad radian, C ^\\circC celsius, F ^\\circF fahrenheit,"
    " $ dollar USD usd bucks, cent ¢, € euro EUR, £ GBP, ₹ rupee INR, ¥ yen JPY yuan, pound, mph mi/h,"
    " km/h kph kmh, m/s, N newton, J joule, W watt, V volt, unit"
)
"""Each unit with its other names."""
# From each name of a unit, and the name with an `s`, to the unit's first name.
_ALIASES = {
    alias: name
    for name, *more in map(str.split, _NAMES.split(", "))
    for word in (name, *more)
    for alias in (word, f"{word}s")
}
_ALIKE = ({"pound", "lb"}, {"pound", "£"}, {"deg", "C"}, {"deg", "F"})
"""Names that may mean the same: a pound is a weight or money, and the letter after a degree is often left out."""
# Words before a unit, with a space, and the power that they mean: `square cm` is `cm^2`.
_POWERS = {f"{w} ": "^2" for w in ("square", "squared", "sq", "sq.")} | {
    f"{w} ": "^3" for w in ("cubic", "cubed", "cu", "cu.")
}
_RAISED = re.compile(r"(.+?)(?:\^?\{?([23])\}?| (squared|cubed))")  # `cm^2`, `cm^{3}`, `m2`, `inches squared`
_PER = re.compile(r"(?: per |/)(?:1 ?)?")  # `mi per hour`, `km/h`, `m/1 s`
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7}
SCALES = {word: Fraction(10**power) for word, power in _SCALES.items()} | {"dozen": Fraction(12)}
"""Words that multiply the number before them."""
_COUNTS = (
    "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty"
    " ninety"
)
_COUNT_WORDS = set(_COUNTS.split())
_CHANGING = {"squared", "cubed", "factorial", "half", "halves"} | set(SCALES)
"""First words after a number that make another number of it."""
_OPERATING = {"plus", "minus", "times", "over", "divided", "point", "by", "to", "and"}
"""Words that, with a number in words after them, compute with the number before them: `times two`."""
_PARTS = "half halves third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth"
_SHARES = {word for part in _PARTS.split() for word in (part, f"{part}s")}
"""Shares of one, which change a number alone or with a count before them: `3 tenths`, `and a half`."""
# Nouns after a number, of at least three letters at the start: `apples`, `one-dollar bills`, and not `cm`.
_PASSED = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+){0,5}")


def unit(text: str) -> str:
    """The first of a unit's names in `_NAMES`, perhaps with a power or a division; empty if the text is not a unit.

    >>> unit("centimeters"), unit("square cm"), unit("cm^{2}"), unit("inches squared"), unit("apples")
    ('cm', 'cm^2', 'cm^2', 'in^2', '')
    """
    # `cm$^2$` is `cm^2`. A dollar sign alone is a unit and stays.
    text = text.strip().rstrip(".").replace("^\\circ ", "^\\circ").replace("$^", "^")
    text = text.removesuffix("$") if "^" in text else text
    if text in _ALIASES:
        return _ALIASES[text]
    # Symbols of one or two letters keep their case: `m` is a metre, and `M` may be anything. Longer names may be
    # written in capitals (`METERS`).
    if text.lower() in _ALIASES and len(text) > 2:
        return _ALIASES[text.lower()]
    above, *below = _PER.split(text)
    if below:
        # One division at most: of `m/s/s` it is not clear what belongs to what.
        named = [unit(part) for part in (above, *below)] if len(below) == 1 else []
        return _ALIASES.get("/".join(named), "/".join(named)) if named and all(named) else ""
    for words, power in _POWERS.items():
        if text.lower().startswith(words):
            inner = unit(text[len(words) :])
            return inner and inner + power
    powered = _RAISED.fullmatch(text)
    inner = unit(powered[1]) if powered else ""
    return f"{inner}^{powered[2] or ('2' if powered[3] == 'squared' else '3')}" if powered and inner else ""


def clash(one: str, two: str) -> bool:
    """Returns whether two units are both given and differ."""
    return bool(one and two) and one != two and {one, two} not in _ALIKE


def tail(words: str) -> tuple[Fraction, str] | None:
    """(factor, unit) of the text after a number; None if it changes the number in another way or is not words.

    >>> tail("million dollars"), tail("cm^2"), tail("apples"), tail("squared")
    ((Fraction(1000000, 1), '$'), (Fraction(1, 1), 'cm^2'), (Fraction(1, 1), ''), None)
    """
    factor, rest = Fraction(1), words.strip()
    rest = rest[1:-1].strip() if rest.startswith("(") and rest.endswith(")") else rest
    # `5 million dollars`: the words that multiply come first, and what is left is the unit.
    while (first_word := rest.split(" ", 1)[0]).lower() in SCALES:
        factor, rest = factor * SCALES[first_word.lower()], rest[len(first_word) :].strip()
        # A policy may write `million` a thousand times, and the product would be very long.
        if factor > 10**24:
            return None
    known_unit = unit(rest) if rest else ""
    # Nouns are ignored, as in `12 apples`. A word of one or two letters is not ignored, because it may be a variable.
    if rest and not known_unit and (_PASSED.fullmatch(rest) is None or changing(rest)):
        return None
    return factor, known_unit


def changing(words: str) -> bool:
    """Returns whether the text after a number changes it to another number.

    >>> [changing(words) for words in ("and a half", "thirds", "times two", "half lives", "one-dollar bills", "years")]
    [True, True, True, False, False, False]
    """
    lowered = words.lower().replace(",", " ").split()
    # Some words always change it (`squared`). Shares and counts, and `half`, which also begins nouns (`half lives`), do
    # so only alone or before `of`. Without a word `bool(lowered)` is False.
    if (
        not lowered
        or lowered[0] in _CHANGING - {"half"}
        or (lowered[0] in _SHARES | _COUNT_WORDS and lowered[1:2] in ([], ["of"]))
    ):
        return bool(lowered)
    if lowered[0] in _OPERATING and not _COUNT_WORDS.isdisjoint(lowered[1:]):
        return True
    # `3 and a half`, `3 two thirds`: a count directly before a share, anywhere in the text.
    return any(
        count in ("a", "an", *_COUNT_WORDS) and share in _SHARES | {"quarter", "quarters"}
        for count, share in itertools.pairwise(lowered)
    )
