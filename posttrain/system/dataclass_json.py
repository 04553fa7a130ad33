"""Trees of frozen dataclasses to plain JSON data and back, losslessly and strictly.

A dataclass becomes an object with one key per field. Where the declared type is a union or an open choice
(`system.subclass_registry`), the object also has `"type": "ClassName"`. So `Clip | None` can later become `Clip | Cap |
None`, and files on disk stay readable. Non-finite floats become `{"float": "inf"}`, because JSON does not have them.
Reading refuses unknown keys and values; the message names the dotted path and the nearest valid key.

    >>> from posttrain.config.stages.stage import Optimizer
    >>> to_plain(Optimizer(lr=0.1))["lr"], from_plain(Optimizer, {"lr": 0.1}).lr
    (0.1, 0.1)
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast

from posttrain.system.errors import ConfigError, nearest
from posttrain.system.subclass_registry import alternatives, is_open

T = TypeVar("T")
NoneType = type(None)
NOT_FINITE = [{"float": x} for x in ("inf", "-inf", "nan")]
"""The numbers that JSON does not have, as they are written."""
TAG = "type"
"""The key with the name of the class, where a union is declared."""


# --- looking at declared types ---------------------------------------------------------------------------------------


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> declared type of a dataclass, in order of declaration."""
    resolved = typing.get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def is_union(declared: Any) -> bool:
    """Returns whether a declared type has alternatives: a union, or an open choice."""
    return _is_written_union(declared) or is_open(declared)


def members(declared: Any) -> tuple[Any, ...]:
    """The alternatives of a union or an open choice, flat; of any other type, itself alone."""
    written = typing.get_args(declared) if _is_written_union(declared) else (declared,)
    return tuple(x for m in written for x in (alternatives(m) if is_open(m) else (m,)))


def _is_written_union(declared: Any) -> bool:
    return typing.get_origin(declared) in (Union, types.UnionType)


def pieces(declared: Any) -> dict[str, type]:
    """The dataclasses among the alternatives, by class name."""
    return {m.__name__: m for m in members(declared) if isinstance(m, type) and dataclasses.is_dataclass(m)}


def tuple_item(declared: Any) -> Any | None:
    """X of a `tuple[X, ...]` among the alternatives; None where there is none."""
    for m in members(declared):
        if typing.get_origin(m) is tuple and typing.get_args(m)[1:] == (...,):
            return typing.get_args(m)[0]
    return None


def fixed_items(declared: Any) -> tuple[Any, ...] | None:
    """(X, Y) of a `tuple[X, Y]` among the alternatives; None where there is none."""
    for m in members(declared):
        if typing.get_origin(m) is tuple and typing.get_args(m)[1:] != (...,):
            return typing.get_args(m)
    return None


def mapping_item(declared: Any) -> Any | None:
    """X of a `Mapping[str, X]` among the alternatives; None where there is none."""
    for m in members(declared):
        origin = typing.get_origin(m)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return typing.get_args(m)[1]
    return None


def choices(declared: Any) -> tuple[Any, ...]:
    """Values of all Literals and enums among the alternatives."""
    out: list[Any] = []
    for m in members(declared):
        if typing.get_origin(m) is Literal:
            out += typing.get_args(m)
        elif isinstance(m, type) and issubclass(m, Enum):
            out += [e.value for e in m]
    return tuple(out)


_SCALARS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "none",
}


def describe(declared: Any) -> str:
    """What is valid for a declared type, for messages: `a number`, `one of token, one`, `none, or Clip`."""
    words: list[str] = []
    if values := choices(declared):
        words.append(f"one of {', '.join(str(v) for v in values)}")
    words += list(pieces(declared))
    if (item := tuple_item(declared)) is not None:
        words.append(f"a list of ({describe(item)})")
    if (fixed := fixed_items(declared)) is not None:
        words.append(":".join(describe(x) for x in fixed))
    if mapping_item(declared) is not None:
        words.append("an object of named values")
    words += [_SCALARS[m] for m in members(declared) if m in _SCALARS]
    return ", or ".join(words) if words else "anything"


# --- writing ---------------------------------------------------------------------------------------------------------


def to_plain(obj: object) -> Any:
    """A dataclass (or a value made of them) as data that `json` writes and `from_plain` reads back equal."""
    return _plain(obj, type(obj), type(obj).__name__)


def _plain(value: Any, declared: Any, path: str) -> Any:
    """A value as plain data. `declared`: the type of its field, which decides whether a tag is written."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        if declared is Any:
            raise ConfigError(
                f"{path}: a {cls.__name__} cannot be stored where any type is declared, since it could not be read back"
            )
        if TAG in hints(cls):
            raise ConfigError(
                f"{path}: {cls.__name__} has a field called {TAG!r}, which is the tag of unions. Rename the field"
            )
        body = {name: _plain(getattr(value, name), hint, f"{path}.{name}") for name, hint in hints(cls).items()}
        return {TAG: cls.__name__, **body} if is_union(declared) else body
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        # `float(...)` makes a plain number of a subclass, such as NumPy's float64.
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, tuple | list):
        item = tuple_item(declared)
        elements = cast("tuple[Any, ...] | list[Any]", value)
        # A tuple of fixed places has a type for each of them, a list one for all.
        items = fixed_items(declared) or (Any if item is None else item,) * len(elements)
        return [_plain(v, x, f"{path}.{i}") for i, (v, x) in enumerate(zip(elements, items, strict=True))]
    if isinstance(value, Mapping):
        item = mapping_item(declared)
        table = cast("Mapping[Any, Any]", value)
        if bad := [k for k in table if not isinstance(k, str)]:
            raise ConfigError(f"{path}: keys must be text, got {bad[0]!r}")
        return {k: _plain(v, Any if item is None else item, f"{path}.{k}") for k, v in table.items()}
    raise ConfigError(f"{path}: a {type(value).__name__} cannot be written as plain data")


# --- reading ---------------------------------------------------------------------------------------------------------


def from_plain(cls: type[T], data: Any) -> T:
    """Build `cls` from plain data. ConfigError names the dotted path, what was found and what is valid."""
    return cast(T, build(cls, data, cls.__name__))


def _wrong(declared: Any, data: Any, path: str) -> ConfigError:
    text = repr(data)
    shown = text if len(text) < 80 else text[:77] + "..."
    return ConfigError(f"{path}: {shown} is not valid here; expected {describe(declared)}")


def build(declared: Any, data: Any, path: str) -> Any:
    """Plain data as a value of a declared type; `path` names it in messages."""
    if declared is Any:
        return _anything(data)
    if isinstance(data, dict):
        table = cast("dict[str, Any]", data)
        if table in NOT_FINITE and float in members(declared):
            return float(table["float"])
        if pieces(declared):
            return _dataclass(_piece(declared, table, path), {k: v for k, v in table.items() if k != TAG}, path)
        item = mapping_item(declared)
        if item is None:
            raise _wrong(declared, table, path)
        return {k: build(item, v, f"{path}.{k}") for k, v in table.items()}
    if isinstance(data, list):
        elements, item = cast("list[Any]", data), tuple_item(declared)
        items = (item,) * len(elements) if item is not None else fixed_items(declared)
        if items is None or len(items) != len(elements):
            raise _wrong(declared, data, path)
        return tuple(build(x, v, f"{path}.{i}") for i, (v, x) in enumerate(zip(elements, items, strict=True)))
    return _scalar(declared, data, path)


def _anything(data: Any) -> Any:
    """Plain data where no type is declared: unchanged, except for numbers that JSON does not have."""
    if isinstance(data, dict):
        table = cast("dict[str, Any]", data)
        return float(table["float"]) if table in NOT_FINITE else {k: _anything(v) for k, v in table.items()}
    return [_anything(x) for x in cast("list[Any]", data)] if isinstance(data, list) else data


def _scalar(declared: Any, data: Any, path: str) -> Any:
    """A JSON scalar as the alternative of exactly its type; a whole number also where only a float is declared."""
    options = members(declared)
    for m in options:
        if isinstance(m, type) and issubclass(m, Enum) and data in [e.value for e in m]:
            return m(data)
        # The types must be equal too: in Python 1 == True, and 1 is not the choice `true`.
        if typing.get_origin(m) is Literal and any(data == v and type(data) is type(v) for v in typing.get_args(m)):
            return data
    # `type` and not `isinstance`, for the same reason: a bool is an int.
    if type(data) in options:
        return data
    if type(data) is int and float in options and abs(data) <= 10**308:  # a larger one is no float
        return float(data)
    valid = choices(declared)
    if isinstance(data, str) and valid:
        raise ConfigError(f"{path}={data}: {nearest(data, [str(v) for v in valid])}")
    raise _wrong(declared, data, path)


def _piece(declared: Any, data: dict[str, Any], path: str) -> type:
    """The dataclass of an object: its tag names it, or it is the only one, where no union is declared."""
    options = pieces(declared)
    tag = data.get(TAG)
    if tag is None and not is_union(declared):
        return next(iter(options.values()))
    if tag is None:
        raise ConfigError(f"{path}: an object here needs a {TAG!r} key (one of {', '.join(options)})")
    if not isinstance(tag, str) or tag not in options:
        advice = ""
        if any(is_open(m) for m in (declared, *typing.get_args(declared))):
            advice = ". If a file of your own defines it, give that too: algorithm=path.py:NAME"
        raise ConfigError(f"{path}.{TAG}={tag}: {nearest(str(tag), options)}{advice}")
    return options[tag]


def _dataclass(cls: type, data: dict[str, Any], path: str) -> Any:
    """An object of a dataclass from plain data without the tag."""
    known = hints(cls)
    for name in data:
        if name not in known:
            raise ConfigError(f"{path}.{name}: {cls.__name__} has no such field; {nearest(name, known)}")
    for f in dataclasses.fields(cls):
        if f.name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}.{f.name} is missing: {cls.__name__} needs {describe(known[f.name])}")
    # The class's own checks run here, so a tree that was read is as valid as one that a program made.
    return cls(**{name: build(known[name], value, f"{path}.{name}") for name, value in data.items()})
