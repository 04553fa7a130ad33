"""Numbers as text for people."""

from __future__ import annotations

import math


def number_text(x: float, usual: str = ".3f", size: float | None = None) -> str:
    """A number as text. One of ordinary size has the format `usual`, a large or tiny one the decimals with a meaning.
    `size`: the smallest difference that matters, such as half an interval; None: the number's own size.

    >>> number_text(0.5), number_text(510833.333), number_text(-2508.162, "+.3f", 4912.0), number_text(-3e-5, "+.3f")
    ('0.500', '510,833.33', '-2,508', '-3e-05')
    """
    # Ordinary: neither large (1e4 and more, or differences of 100 and more matter), nor with differences below 1e-3.
    least = abs(x) if size is None else abs(size)
    large = abs(x) >= 1e4 or (size is not None and least >= 100)
    if not math.isfinite(x) or not math.isfinite(least) or not (large or 0 < least < 1e-3):
        return f"{x:{usual}}"
    sign = "+" if usual.startswith("+") else ""
    # Alone: 8 significant digits of a large number (510,833.33), 3 of a tiny one (-3e-05).
    if size is None or least == 0:
        return f"{x:{sign},.{max(0, 7 - math.floor(math.log10(abs(x))))}f}" if abs(x) >= 1e4 else f"{x:{sign}.3g}"
    # With a size: decimals down to the third digit of the smallest difference that matters.
    return f"{x:{sign},.{min(12, max(0, 2 - math.floor(math.log10(least))))}f}"
