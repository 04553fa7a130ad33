"""Units by their names. Nothing is converted: 5 m and 500 cm are different answers, as they are in the data sets."""

from __future__ import annotations

import re

_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre mL",
    "L": "liter litre l",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "deg": "degree ^\\circ",
    "rad": "radian",
    "C": "^\\circC celsius",
    "F": "^\\circF fahrenheit",
    "$": "dollar USD usd bucks",
    "cent": "¢",
    "€": "euro EUR",
    "£": "pounds GBP",
    "mph": "mi/h",
    "km/h": "kph kmh",
    "m/s": "",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "unit": "",
}
_ALIASES = {alias: name for name, more in _NAMES.items() for word in (name, *more.split()) for alias in (word, f"{word}s")}
_POWERS = {"square ": "^2", "sq ": "^2", "sq. ": "^2", "cubic ": "^3", "cu ": "^3"}
_RAISED = re.compile(r"(.+?)\^\{?([23])\}?")


def unit(text: str) -> str:
    """The one name of a unit; empty where it is none.

    >>> unit("centimeters"), unit("square cm"), unit("cm^{2}"), unit("apples")
    ('cm', 'cm^2', 'cm^2', '')
    """
    text = text.strip().rstrip(".").replace("^\\circ ", "^\\circ")
    for words, power in _POWERS.items():
        if text.lower().startswith(words):
            inner = unit(text[len(words) :])
            return inner and inner + power
    if text in _ALIASES:
        return _ALIASES[text]
    if text.lower() in _ALIASES and len(text) > 2:
        return _ALIASES[text.lower()]
    raised = _RAISED.fullmatch(text)
    inner = unit(raised[1]) if raised else ""
    return f"{inner}^{raised[2]}" if raised and inner else ""
