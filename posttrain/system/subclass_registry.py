"""Open choices: a declared type whose alternatives are all classes that derive from it, wherever they are defined.

A union lists its alternatives in one place, and a new one changes that place. An open choice registers them when they
are defined. Overrides, JSON and messages (`system.dataclass_json`) read this table.
"""

from __future__ import annotations

from typing import Any, ClassVar

from posttrain.system.errors import ConfigError


class Open:
    """Base class of open choices. `class Region(Open, begin=True)` begins a choice; classes derived from it are the
    alternatives.

    Alternatives are kept in the order of their definition. Overrides write their names in lower case, so two names that
    differ only in case are refused. A class that is defined again in the same place replaces the first one.
    """

    _alternatives: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, *, begin: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        # The class that begins a choice has the table of alternatives, and is not one of them.
        if begin:
            cls._alternatives = {}
        elif hasattr(cls, "_alternatives"):
            cls.offer()

    @classmethod
    def offer(cls) -> None:
        """Make this class an alternative of its choice again, after `withdraw`. Defining it does so the first time."""
        name = cls.__name__.lower()
        known = cls._alternatives.get(name)
        # The same module and name again: a cell of a notebook was run again, or a file was imported again.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{cls.__module__}.{cls.__qualname__}: overrides would not tell it from"
                f" {known.__module__}.{known.__qualname__}. Give the class another name"
            )
        cls._alternatives[name] = cls

    @classmethod
    def withdraw(cls) -> None:
        """Remove this alternative from its choice. Its values stay, but its name is no longer read."""
        if cls._alternatives.get(cls.__name__.lower()) is not cls:
            raise ConfigError(f"{cls.__name__} is no alternative of a choice: only one that is can be withdrawn")
        del cls._alternatives[cls.__name__.lower()]


def is_open(declared: Any) -> bool:
    """Returns whether a declared type stands for alternatives that derive from it."""
    # The table must be in the class itself. An alternative only inherits it, and is no choice.
    return isinstance(declared, type) and "_alternatives" in vars(declared)


def alternatives(declared: Any) -> tuple[type[Any], ...]:
    """The alternatives of an open choice, in the order of their definition."""
    if not is_open(declared):
        name = getattr(declared, "__name__", "Name")
        raise ConfigError(f"{declared!r} is no open choice: begin one with class {name}(Open, begin=True)")
    return tuple(declared._alternatives.values())
