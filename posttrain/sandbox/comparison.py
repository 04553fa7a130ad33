"""Compares a function's return value with the wanted value, by type and value.

The return value leaves the sandbox as plain JSON, which the program controls. It never becomes Python objects whose
hashes or comparisons the program could choose, and is walked through together with the wanted value, and no deeper.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from posttrain.sandbox.cell.program import encode


class NoValidValue(ValueError):
    """No valid value arrived. `kind`: `no_result`, `type` (not plain built-in types) or `forged`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Comparison:
    """How values are compared. By default exactly: 5.0 is not 5, True is not 1, -0.0 is not 0.0. NaN equals NaN."""

    tolerance: float = 0.0
    """Absolute tolerance of floats. If it is not 0, an integer may stand for a float."""
    relative: bool = True
    """Whether `tolerance` is a relative tolerance too."""
    any_sequence: bool = False
    """Whether a tuple may stand for a list."""


def heard(result: bytes) -> Any:
    """The encoded value in a job's result. Raises `NoValidValue` where there is none."""
    if not result:
        raise NoValidValue("no_result", "ended without returning from the call, or returned too much")
    try:
        reply = json.loads(result)
    except (ValueError, RecursionError) as error:
        raise NoValidValue("forged", f"the result is no JSON: {type(error).__name__}") from None
    if isinstance(reply, dict) and list(reply) == ["type"]:
        raise NoValidValue("type", str(reply["type"])[:200])
    if not isinstance(reply, dict) or list(reply) != ["value"]:
        raise NoValidValue("forged", "the result is not one value")
    return reply["value"]


def same(said: Any, wanted: Any, comparison: Comparison = Comparison()) -> bool:
    """Returns whether an encoded value equals the wanted one.

    >>> same({"int": "0x5"}, 5), same(5.0, 5), same(0.30000000000000004, 0.3, Comparison(1e-9))
    (True, False, True)
    """
    try:
        return _same(said, encode(wanted), comparison)
    except RecursionError:
        return False


def _same(said: Any, wanted: Any, comparison: Comparison) -> bool:
    """Returns whether an encoded value equals the wanted one, which is encoded too."""
    if isinstance(wanted, float):
        return _close(said, wanted, comparison)
    if wanted is None or isinstance(wanted, bool | str):
        # JSON gives exact built-in types, so this comparison runs no code of the program's.
        return type(said) is type(wanted) and said == wanted
    if not isinstance(said, dict) or len(said) != 1:
        return False
    # Every other value is {tag: parts}, as `cell.program.encode` writes it. The wanted value has this form. The other
    # one may be anything, so its form is checked step by step.
    ((tag, parts),) = wanted.items()
    ((said_tag, body),) = said.items()
    if comparison.any_sequence and {tag, said_tag} <= {"list", "tuple"}:
        said_tag = tag
    if said_tag != tag:
        return False
    # `encode` writes integers and bytes as text, with one text for each value.
    if tag in ("int", "bytes"):
        return isinstance(body, str) and body == parts
    if not isinstance(body, list) or len(body) != len(parts):
        return False
    if tag in ("list", "tuple"):
        return all(_same(b, p, comparison) for b, p in zip(body, parts, strict=True))
    if tag == "dict":
        return _same_dict(body, parts, comparison)
    # Sets have the same elements in any order. Of a forged set with repeated elements the sorted list differs.
    return sorted(map(_text, body)) == sorted(map(_text, parts))


def _same_dict(body: list[Any], parts: list[Any], comparison: Comparison) -> bool:
    """Returns whether two encoded dictionaries are equal, from their lists of [key, value]."""
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
        return False
    # Pairs are matched by their keys, which have to be exactly equal. A tolerance is for the values only.
    left = sorted((_text(k), i) for i, (k, _) in enumerate(body))
    right = sorted((_text(k), i) for i, (k, _) in enumerate(parts))
    pairs = zip(left, right, strict=True)
    return all(a == b and _same(body[i][1], parts[j][1], comparison) for (a, i), (b, j) in pairs)


def _close(said: Any, wanted: float, comparison: Comparison) -> bool:
    """Returns whether an encoded value equals a wanted float, up to the tolerance."""
    tolerance = comparison.tolerance
    if tolerance:
        number = _integer(said)
        said = said if number is None else float(number)
    if type(said) is not float:
        return False
    # NaN is not equal to itself in Python. Here it is, because a function that should return NaN has returned it.
    if math.isnan(wanted) or math.isnan(said):
        return math.isnan(wanted) and math.isnan(said)
    if tolerance:
        relative = tolerance if comparison.relative else 0.0
        return said == wanted or math.isclose(said, wanted, rel_tol=relative, abs_tol=tolerance)
    # Without a tolerance the sign of a zero counts too.
    return said == wanted and math.copysign(1.0, said) == math.copysign(1.0, wanted)


def _integer(said: Any, digits: int = 200) -> int | None:
    """The integer that a value encodes; None for anything else, and for more than `digits` digits."""
    # 16**200 is below the largest float, so the conversion in `_close` cannot overflow.
    text = said.get("int") if isinstance(said, dict) and len(said) == 1 else None
    if not isinstance(text, str) or len(text) > digits:
        return None
    try:
        number = int(text, 16)
    except ValueError:
        return None
    # `int` also reads underscores, spaces and capitals. Only text that `encode` could have written counts.
    return number if hex(number) == text else None


def shown(said: Any) -> str:
    """The beginning of an encoded value for a message: numbers as numbers, everything else as its JSON."""
    number = _integer(said, 40)
    return str(number) if number is not None else json.dumps(said)[:80]


def _text(value: Any) -> str:
    """An encoded value as text that does not depend on the order of its sets."""
    return json.dumps(_ordered(value), sort_keys=True)


def _ordered(value: Any) -> Any:
    """A value in which the elements of sets and the entries of dictionaries are replaced by sorted digests of their
    texts.

    Digests are used because the texts of nested values would become longer with each level.
    """
    if isinstance(value, list):
        return [_ordered(v) for v in value]
    if not isinstance(value, dict):
        return value
    unordered = {k for k, v in value.items() if k in ("set", "frozenset", "dict") and isinstance(v, list)}
    return {
        k: sorted(hashlib.sha256(_text(p).encode()).hexdigest() for p in v) if k in unordered else _ordered(v)
        for k, v in value.items()
    }
