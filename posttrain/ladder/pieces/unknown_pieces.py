"""Pieces of an algorithm whose class this program does not have, as a run folder records them. Reading a run executes
no code of it. So a piece of the user's own file is read as its recorded numbers, as an instance of a stand-in class
with its name. It can be printed and compared, and has no mathematics and no checks."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError
from posttrain.system.subclass_registry import is_open

MOST = 100
"""Largest number of fields of a stand-in."""
LONGEST = 80
"""Largest number of characters of the name of a stand-in, or of one of its fields."""


def known_pieces() -> set[str]:
    """The names of all classes of pieces that this program has."""
    return {c.__name__ for choice in _choices() for c in dataclass_json.members(choice)}


def _choices() -> list[type[Any]]:
    """The open choices of algorithms, one for each kind of piece."""
    declared = (x for hint in _fields().values() for x in _inner(hint))
    return list(dict.fromkeys(c for c in declared if is_open(c)))


def _fields() -> dict[str, Any]:
    """The fields of the algorithms of both ladders. No field that holds pieces is in both."""
    return {**dataclass_json.hints(Algorithm), **dataclass_json.hints(PreferenceAlgorithm)}


def _inner(declared: Any) -> Iterator[Any]:
    """A declared type and all types inside it: of `tuple[Correction, ...]`, itself and `Correction`."""
    yield declared
    for part in typing.get_args(declared):
        yield from _inner(part)


@contextmanager
def read_without(run: Any, names: Collection[str]) -> Generator[None]:
    """Context in which the pieces `names` of a plain run can be read although this program has no class for them.
    RunFolderError where the record of one cannot be a piece."""
    # Stand-ins are alternatives only inside the block: outside, an override with such a name must stay an error.
    stand_ins: dict[tuple[type[Any], str], type[Any]] = {}
    try:
        for base, data in _recorded(run) if names else ():
            name = str(data.get(dataclass_json.TAG))
            # Only names that the caller knows to be absent, each once. A piece with a class is read by its class.
            if name in names and (base, name) not in stand_ins:
                stand_ins[base, name] = _offered(base, name, tuple(f for f in data if f != dataclass_json.TAG))
        yield
    finally:
        for stand_in in stand_ins.values():
            stand_in.withdraw()


def _recorded(run: Any) -> Iterator[tuple[type[Any], Mapping[str, Any]]]:
    """(open choice, plain piece) for each piece of every algorithm of a plain run, the algorithms' parents included."""
    stages: Any = cast("dict[str, Any]", run).get("stages") if isinstance(run, dict) else None
    for stage in cast("list[Any]", stages) if isinstance(stages, list) else []:
        a: Any = cast("dict[str, Any]", stage).get("algorithm") if isinstance(stage, dict) else None
        # An algorithm's parents are recorded inside it, and may have other pieces. A record
        # comes from elsewhere, so the type of each value is tested before it is used.
        while isinstance(a, dict):
            plain = cast("dict[str, Any]", a)
            for field, hint in _fields().items():
                # The open choice inside the declared type: `Pull | None` or `tuple[Correction, ...]`.
                base, value = next((c for c in _inner(hint) if is_open(c)), None), plain.get(field)
                items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
                if base is not None:
                    yield from ((base, cast("Mapping[str, Any]", x)) for x in items if isinstance(x, dict))
            a = plain.get("parent")


def _offered(base: type[Any], name: str, fields: tuple[str, ...]) -> type[Any]:
    """Makes the stand-in of a piece, and offers it as an alternative of its choice."""
    try:
        stand_in = _stand_in(base, name, fields)
        stand_in.offer()
        return stand_in
    # TypeError: a field is no identifier. ValueError: the name of the class has a NUL or is no UTF-8.
    except (ConfigError, TypeError, ValueError) as error:
        raise RunFolderError(f"the piece {name!r:.80} is damaged: {error}") from error


@lru_cache(maxsize=64)
def _stand_in(base: type[Any], name: str, fields: tuple[str, ...]) -> type[Any]:
    """A class with the recorded fields and no mathematics, in no choice yet. The same record gives the same class, so
    that pieces of two readings can be equal."""
    # The names become the names of a class and of its fields. So their number and length are limited, and
    # a field must not begin with `__` or hide a method of the base.
    if len(name) > LONGEST or len(fields) > MOST:
        raise ConfigError(
            f"it has {len(fields)} fields and a name of {len(name)} letters; the most are {MOST}, {LONGEST}"
        )
    for f in fields:
        if f.startswith("__") or len(f) > LONGEST or f == "absent" or callable(getattr(base, f, None)):
            raise ConfigError(f"it has a field {f!r:.80}")

    def words(self: Any) -> str:
        numbers = ", ".join(f"{f}={_short(getattr(self, f))}" for f in fields)
        return f"{name}{f'({numbers})' if numbers else ''}, of a file that was not imported"

    def refuse(self: Any, *given: Any, **named: Any) -> Any:
        raise InvariantError(f"{name} is only its record here: its class is defined in a file that was not imported")

    # Abstract methods must be defined, or no instance could be made. All but `words`, which prints the record, raise an
    # error: code that computes with pieces asks `Piece.absent` first.
    methods: dict[str, Any] = dict.fromkeys(base.__abstractmethods__, refuse)
    space = {**methods, "words": words, "absent": True, "__module__": __name__}
    typed = [(f, Any) for f in fields]
    made: Any = dataclasses.make_dataclass(name, typed, bases=(base,), namespace=space, frozen=True, kw_only=True)
    # Defining a class has offered it as an alternative, which is too early: `_offered` does that.
    made.withdraw()
    return made


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
