"""Equations and roundings with several sides: their values, and whether their numbers agree."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from posttrain.verifier.math.answer_values import Number
from posttrain.verifier.math.numerals import clock, number
from posttrain.verifier.math.units import clash

_ROUNDED = re.compile(
    r"(.+?) ?\((?:\\approx ?|(?:\\text\{)?(?:or )?(?:about|approximately|approx\.?)(?: ?\})? ?)([^()]+)\)"
)


def sides(text: str, places: list[int]) -> list[str]:
    """The sides of a chain whose equals signs are at `places`."""
    ends = [-1, *places, len(text)]
    return [text[a + 1 : b].strip() for a, b in itertools.pairwise(ends)]


def agree(one: Number, two: Number) -> bool:
    """Returns whether two sides may be one number: equal, in percent, in other units, or one rounded (or cut) to the
    digits of the other.

    >>> agree(Number(Fraction(1, 3)), Number(Fraction(333, 1000), 3)), agree(Number(Fraction(43)), Number(Fraction(42)))
    (True, False)
    """
    if clash(one.unit, two.unit):
        return True
    x, y = (n.value / 100 if n.percent and not (one.percent and two.percent) else n.value for n in (one, two))
    if x == y:
        return True
    digits = [n.decimals + (2 if n.percent else 0) for n in (one, two) if n.decimals is not None]
    return any(abs(x - y) < Fraction(1, 10**d) for d in digits)


def contradicts(pieces: list[str]) -> bool:
    """Returns whether two sides are numbers that differ, as in `43=42`."""
    numbers = [n for n in (number(piece) for piece in pieces if clock(piece) is None) if isinstance(n, Number)]
    return any(not agree(one, two) for one, two in itertools.pairwise(numbers))


def exact(pieces: list[str]) -> str | None:
    """The last side that is an exact number, if the last side of all is a rounding of it: `1/3` of `1/3=0.333`."""
    last = number(pieces[-1])
    if not isinstance(last, Number) or last.decimals is None:
        return None
    found = [
        piece
        for piece in pieces
        if isinstance(n := number(piece), Number) and n.decimals is None and n.value != last.value
    ]
    return found[-1] if found else None


def roundings(text: str) -> list[str]:
    """The sides of `a \\approx b` and of `a (\\approx b)`; the whole text if there is no such sign."""
    if (beside := _ROUNDED.fullmatch(text)) is not None:
        return [beside[1].strip(), beside[2].strip()]
    return [piece.strip() for piece in re.split(r"\\approx(?![A-Za-z])", text)]
