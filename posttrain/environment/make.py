"""Makes the environment that a configuration names, and imports its module only then."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from posttrain.config.env import Scalar
from posttrain.config.run import Env
from posttrain.environment.gallery import GALLERY, gallery_class
from posttrain.environment.single import SingleTurn, common_settings
from posttrain.record.runtime_objects import RuntimeObjects, is_inline
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.configured import sources
from posttrain.verifier.user_code import load


def names() -> tuple[str, ...]:
    """The forms of `Env.name`, for messages."""
    return (*GALLERY, "prompts", "gym:TASK", "verifiers:ID", "path.py:Class")


def shipped_class(name: str) -> type[SingleTurn] | None:
    """The class of a shipped environment, whose fields are what `env.args` may set; None for any other name."""
    if name == "prompts":
        from posttrain.environment.rows.own_prompts import PromptsEnv

        return PromptsEnv
    return gallery_class(name) if name in GALLERY else None


def environment(config: Env, seed: int, given: RuntimeObjects = RuntimeObjects()) -> Any:
    """The environment of a run's configuration: a `SingleTurn`, or any `Environment` that a program handed (`given`).

    Raises:
        ConfigError: unknown name, setting or reward; a setting of the wrong type or out of range.
        DataError: the user's prompts cannot be read.
    """
    # A class of the user's is loaded first, because only the class shows whether the environment reads rows.
    in_file = ":" in config.name and not is_inline(config.name) and not config.name.startswith(("gym:", "verifiers:"))
    user_class = _load_user_class(config.name) if in_file else None
    if config.name == "prompts" or config.data or user_class is not None:
        from posttrain.environment.rows.own_prompts import PromptsEnv, read_tasks

        # `SingleTurn` stands here for every other environment, which reads no rows.
        rows_class = PromptsEnv if config.name == "prompts" else user_class or SingleTurn
        if issubclass(rows_class, PromptsEnv):
            return read_tasks(config, checked(config.name, rows_class, config.args), seed, given, rows_class)
        if config.data:
            raise ConfigError(
                f"env.prompts={config.prompts!r} is not read by the environment {config.name!r}: set env=prompts too,"
                " derive your own class from posttrain.environment.rows.own_prompts.PromptsEnv, or leave"
                " env.prompts out"
            )
    rewards = sources(config.rewards, where=config.sandbox, given=given)
    common = common_settings(config, rewards, seed)
    if is_inline(config.name):
        return _handed(config, given.environment(config.name), common)
    if config.name.startswith("gym:"):
        from posttrain.environment.adapters.reasoning_gym import Gym

        return Gym.of(config.name.removeprefix("gym:"), config.args, **common)
    if config.name.startswith("verifiers:"):
        from posttrain.environment.adapters.verifiers import Verifiers

        return Verifiers.of(config.name.removeprefix("verifiers:"), config.args, **common)
    if config.name in GALLERY:
        cls = gallery_class(config.name)
    elif user_class is not None:
        cls = user_class
    else:
        like_data = "/" in config.name or Path(config.name).suffix in (".jsonl", ".json", ".parquet")
        suggestion = f"rows of yours are env=prompts env.prompts={config.name}, from Python env=posttrain.prompts(...)"
        if not like_data:
            suggestion = nearest(config.name, names())
        raise ConfigError(f"env.name={config.name!r} is no environment: {suggestion}")
    return cls(**checked(config.name, cls, config.args), **common)


def _handed(config: Env, thing: Any, common: dict[str, Any]) -> Any:
    """An environment that a program handed: a class of `SingleTurn` or an object of one, whose settings come from the
    tree (`env.args`, `env.heldout`), or any other environment."""
    if inspect.isclass(thing) and issubclass(thing, SingleTurn):
        _check_class(config.name, thing)
        return thing(**checked(config.name, thing, config.args), **common)
    if isinstance(thing, SingleTurn):
        # The object keeps its own rewards, and the rewards of the configuration are added behind them.
        common = {**common, "rewards": (*thing.rewards, *common["rewards"])}
        return replace(thing, **checked(config.name, type(thing), config.args), **common)
    if config.rewards or config.args or config.measured:
        raise ConfigError(
            f"env={config.name}: this environment judges by itself, and takes no rewards=, env.args and env.measured."
            " Derive it from posttrain.environment.single.SingleTurn to add some"
        )
    return thing


def _load_user_class(name: str) -> type[SingleTurn]:
    """The environment class of a user's file, `path.py:Class`. ConfigError if it is not one, or lacks methods."""
    path, _, attribute = name.rpartition(":")
    cls: Any = load(Path(path), attribute, "env.name", "class")
    if not issubclass(cls, SingleTurn):
        raise ConfigError(
            f"env.name={name}: {attribute} is no environment: derive it from posttrain.environment.single.SingleTurn"
            " (posttrain new env writes an example)"
        )
    _check_class(name, cls)
    return cls


def _check_class(name: str, cls: type[SingleTurn]) -> None:
    """ConfigError if a user's class is no dataclass, lacks methods, or misspells one."""
    attribute = cls.__name__
    # `vars` and not `getattr`, so that only the class itself counts and no base class. Without the decorator on this
    # class, its new fields would be no settings, and would be ignored silently.
    if vars(cls).get("__annotations__") and "__dataclass_params__" not in vars(cls):
        raise ConfigError(
            f"env.name={name}: write @dataclass(frozen=True, kw_only=True) above class {attribute}; its fields are its"
            " settings"
        )
    if misspelt := [(n, near[0]) for n in vars(cls) if (near := _meant(cls, n))]:
        raise ConfigError(
            f"env.name={name}: {attribute} has {misspelt[0][0]}, which nothing reads: did you mean {misspelt[0][1]}?"
            " Give it another name if not"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(
            f"env.name={name}: {attribute} does not say {', '.join(missing)} yet (posttrain new env writes an example"
            " of each)"
        )


_OPTIONAL = "knows_gold vouches_for_gold paraphrases pays_parts contained styles demonstrate steps judgements abilities"
OPTIONAL = _OPTIONAL.split()
"""Members that a subclass of `SingleTurn` may define. A misspelt one is an error, as nothing would read it."""


def _meant(cls: type[SingleTurn], name: str) -> list[str]:
    """The name of `OPTIONAL` that `name` probably is a misspelling of; empty for known names and settings."""
    known = hasattr(SingleTurn, name) or name.startswith("_") or name in cls.settings()
    # The cutoff is high, because a class may have helpers of any name.
    return [] if known else difflib.get_close_matches(name, OPTIONAL, n=1, cutoff=0.85)


def checked(name: str, cls: type[SingleTurn], args: Mapping[str, Scalar]) -> dict[str, Any]:
    """Settings by name, each of the type that its field declares. An int is accepted for a float."""
    hints = get_type_hints(cls)
    settings: dict[str, Any] = {}
    for key, value in args.items():
        if key not in cls.settings():
            raise ConfigError(
                f"env.args.{key}: environment {name!r} has no such setting: {nearest(key, cls.settings())}"
            )
        wanted = hints[key]
        # The exact type is compared, because True would also be an instance of int.
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            kind = getattr(wanted, "__name__", wanted)  # several types have no name
            raise ConfigError(
                f"env.args.{key}={value!r}: environment {name!r} wants {kind}, got {type(value).__name__}"
            )
        settings[key] = float(value) if wanted is float else value
    return settings
