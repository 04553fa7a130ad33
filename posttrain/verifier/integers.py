"""Reads the last integer of a response. It never raises, whatever the policy wrote."""

from __future__ import annotations

import re
from collections import deque

from posttrain.verifier.thoughts import spoken

_MINUS = "\u2212\u2010\u2011\u2013\ufe63\uff0d"
# Characters that become ASCII: minus signs, the full-width plus sign and the full-width digits.
_TRANSLATE = str.maketrans(
    {**dict.fromkeys(_MINUS, "-"), "\uff0b": "+", **{chr(0xFF10 + d): str(d) for d in range(10)}}
)
_NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)"  # not inside a number, nor a further part of 1.2.3
    r"(?P<sign>(?<![0-9)\]])[+-])?"  # after a digit or a closing bracket, a sign is an operator
    r"(?P<whole>[0-9]{1,3}(?:[,'_\u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.(?P<fraction>[0-9]+))?"
)


def last_integer(text: str) -> str | None:
    """The last number of a text outside its thoughts, without separators, plus and leading zeros. None if there is no
    number, or it is not an integer: `12.0` is 12, and `12.5` is none.

    Accepts a sign that is not an operator, Unicode minus signs, full-width digits and thousands separators (comma,
    apostrophe, underscore, narrow or fixed space). The result is text, because Python refuses to convert very long
    digit strings, and a policy can write one.

    >>> last_integer("3+4=7;7+5=12"), last_integer("about 1,234."), last_integer("\u2212007"), last_integer("12.5")
    ('12', '1234', '-7', None)
    """
    # Only the last match is kept, because a policy may write a million numbers.
    last_match = deque(_NUMBER.finditer(spoken(text).translate(_TRANSLATE)), maxlen=1)
    number = last_match[0] if last_match else None
    if number is None or (number["fraction"] or "").strip("0"):
        return None
    digits = re.sub(r"[^0-9]", "", number["whole"]).lstrip("0") or "0"
    return f"-{digits}" if number["sign"] == "-" and digits != "0" else digits
