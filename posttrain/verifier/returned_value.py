"""Reads the value that a reward function returned, as a verdict."""

from __future__ import annotations

import math
from typing import Any

from posttrain.core.verdict import Verdict


def as_verdict(value: Any) -> Verdict:
    """The verdict for a value that a reward function returned. Numbers of any library are accepted. Text and truth
    values are not numbers here."""
    if value is None:
        return Verdict.abstain()
    if isinstance(value, Verdict):
        return value
    if not hasattr(value, "__float__"):
        return Verdict.failed(
            "type", f"returned {type(value).__name__} {value!r:.80}, wanted a number, a Verdict or None"
        )
    if _truth(value):
        return Verdict.failed(
            "type",
            f"returned the truth value {value!r:.80}, wanted a number: return float(...) of it, or None to abstain",
        )
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Verdict.failed("type", f"returned {type(value).__name__}, which is not one number: {error}")
    if not math.isfinite(score):
        return Verdict.failed("nan", f"returned {score}")
    return Verdict.value(score)


def _truth(value: Any) -> bool:
    """Returns whether a value is a truth value of Python, NumPy or torch: the result of a comparison and not a
    score."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
