"""Parse one word of the command line as a value of a declared type. A ConfigError names the valid values."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, nearest

_BOOLS = {"true": True, "false": False}


class _NotAValue:
    """Returned where a word is not a value of a type (None is a value)."""


def read(declared: Any, word: str, path: str) -> Any:
    """The value of type `declared` that `word` stands for. `path` is named in errors.

    A list may also be JSON, for text with commas, spaces or escapes and for lists of lists; a pair is written
    `17:-2.5`.

    >>> read(float | None, "none", "wall_time"), read(tuple[int, ...], "1,2", "stop_ids")
    (None, (1, 2))
    >>> read(tuple[str, ...], '["a, b"]', "stop"), read(tuple[tuple[int, float], ...], "17:-2.5", "logit_bias")
    (('a, b',), ((17, -2.5),))
    """
    options = dataclass_json.members(declared)
    # `none` first, then lists and pairs item by item, a piece by its name, and only then the alternatives of a scalar.
    if type(None) in options and word.lower() == "none":
        return None
    item = dataclass_json.tuple_item(declared)
    if item is not None:
        if word.startswith("["):
            return dataclass_json.build(declared, _json(word, path), path)
        parts = [] if word.lower() in ("", "none") else [w.strip() for w in word.split(",")]
        return tuple(read(item, w, path) for w in parts)
    item_types = dataclass_json.fixed_items(declared)
    if item_types is not None:
        words = [w.strip() for w in word.split(":")]
        if len(words) != len(item_types):
            raise _refuse(declared, word, path)
        return tuple(read(x, w, path) for x, w in zip(item_types, words, strict=True))
    pieces = dataclass_json.pieces(declared)
    if pieces:
        return _piece(pieces, declared, word, path)
    for kind in sorted(options, key=_rank):
        value = _scalar(kind, word)
        if not isinstance(value, _NotAValue):
            return value
    raise _refuse(declared, word, path)


def _json(word: str, path: str) -> Any:
    try:
        return json.loads(word)
    except ValueError as error:
        raise ConfigError(
            f"{path}={word}: a list that begins with '[' is read as JSON, and this is none ({error})"
        ) from error


def _rank(kind: Any) -> int:
    """Order in which types are tried: a whole number before a float, and text, which accepts any word, last."""
    return {bool: 0, int: 2, float: 3, str: 4}.get(kind, 1)


def _scalar(kind: Any, word: str) -> Any:
    """The word as a value of one type; a `_NotAValue` where it is none."""
    if get_origin(kind) is Literal:
        return next((v for v in get_args(kind) if str(v) == word), _NotAValue())
    if kind is bool:
        return _BOOLS.get(word.lower(), _NotAValue())
    if kind is str:
        return word
    if kind in (int, float):
        try:
            number = float(word)
            # `1e3` is a whole number, `1000.0` is none. Digits alone are not taken through a float, which would round
            # them.
            with_exponent = int(number) if number.is_integer() and "e" in word.lower() else None
            integer = int(word) if word.lstrip("+-").isdigit() else with_exponent
        except (ValueError, OverflowError):
            return _NotAValue()
        if kind is int:
            return _NotAValue() if integer is None else integer
        # NaN is not equal to itself, so a run that has one could not be compared with what was recorded.
        return _NotAValue() if math.isnan(number) else number
    return _NotAValue()


def _piece(pieces: dict[str, type], declared: Any, word: str, path: str) -> Any:
    """A piece with its defaults, named by its type, or by its only required field where one type is valid."""
    names = {name.lower(): cls for name, cls in pieces.items()}
    if len(names) == 1:
        cls = next(iter(names.values()))
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        if len(required) == 1:
            return cls(**{required[0]: read(dataclass_json.hints(cls)[required[0]], word, path)})
    # `group_mean` stands for `groupmean` too.
    short = word.lower().replace("_", "")
    if short not in names:
        valid = ["none", *names] if type(None) in dataclass_json.members(declared) else names
        raise ConfigError(f"{path}={word}: {nearest(short, valid)}")
    return names[short]()


def _refuse(declared: Any, word: str, path: str) -> ConfigError:
    """The error about a word that is not valid, with what is."""
    if valid := [str(v) for v in dataclass_json.choices(declared)]:
        none = ["none"] if type(None) in dataclass_json.members(declared) else []
        return ConfigError(f"{path}={word}: {nearest(word, valid + none)}")
    rows = path.endswith(".prompts") and word.endswith((".json", ".jsonl", ".parquet"))
    advice = f". Rows of yours are env.prompts={word}" if rows else ""
    return ConfigError(f"{path}={word}: expected {dataclass_json.describe(declared)}{advice}")
