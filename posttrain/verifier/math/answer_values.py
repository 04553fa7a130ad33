"""The values that an answer can have: `read_answer` makes them of text, and `equal` compares them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """An exact number with its unit. `decimals`: how many digits are after its decimal point; None if it was written in
    another way, such as `1/2`. `percent`: `value` is the number before a percent sign: 50 for `50%`."""

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True)
class TimeOfDay:
    """A time of day, `2:30` or `2:30 pm`. `half`: `am`, `pm`, or empty. `text`: as it was written."""

    hour: int
    minute: int
    half: str = ""
    text: str = ""


@dataclass(frozen=True)
class Based:
    """The digits of a number in a base: `1011_2`."""

    digits: str
    base: int


@dataclass(frozen=True)
class WordAnswer:
    """A word answer, such as a day, true, or none."""

    text: str


@dataclass(frozen=True)
class ChoiceAnswer:
    """The letter of a choice together with its value: `(C) 12`."""

    letter: str
    value: Value


@dataclass(frozen=True)
class Items:
    """Several values. `left` and `right` are brackets: `(`, `[`, `{` for a set, empty for a bare list."""

    left: str
    right: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Union:
    """Intervals and sets joined by `\\cup`, or written as `x<1 or x>2`."""

    items: tuple[Items, ...]


@dataclass(frozen=True)
class Named:
    """`x=3`. `simple`: the left side only names the value, such as `x`, `f(2)` or `3+4`. It may then be left out."""

    name: str
    simple: bool
    value: Value


@dataclass(frozen=True)
class Other:
    """An expression that only the algebra can read. `unit`: the unit after it, as in `12\\pi\\text{ cm}`."""

    text: str
    unit: str = ""


@dataclass(frozen=True)
class TooLarge:
    """A number that is too large to compute."""

    text: str


Value = Number | TimeOfDay | Based | WordAnswer | ChoiceAnswer | Items | Union | Named | Other | TooLarge


def parts(value: Value) -> tuple[Value, ...]:
    """The values inside a value: those of a list or a union, and the one of a name or a choice. Else empty."""
    if isinstance(value, Items | Union):
        return value.items
    return (value.value,) if isinstance(value, Named | ChoiceAnswer) else ()
