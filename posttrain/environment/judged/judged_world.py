"""The world whose completions another environment judges, from a setting such as `arithmetic min_terms=3`."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.config.env import Env, Scalar
from posttrain.config.values import read
from posttrain.core.types import Task
from posttrain.environment.single import SingleTurn
from posttrain.system.errors import ConfigError


def inner_world(
    env: str, words: str, seed: int, *, heldout: int, more: Mapping[str, Scalar] | None = None, hint: str = ""
) -> SingleTurn:
    """The environment that `words` name: its name, then its settings, separated by spaces.

    Args:
        env: the environment whose setting `world` this is, for the error.
        more: further settings of the world.
        hint: text at the end of the error's message.

    Raises:
        ConfigError: there is none of that name, or a setting is wrong.
    """
    from posttrain.environment.make import environment

    name, *pairs = words.split() or [""]
    settings = {k: read(Scalar, v, f"env.args.{k}") for k, _, v in (w.partition("=") for w in pairs)}
    try:
        return environment(Env(name=name, args={**settings, **(more or {})}, heldout=heldout), seed=seed)
    except ConfigError as error:
        raise ConfigError(f"env {env}: world={words!r}: {error}{hint}") from error


def task_at(world: SingleTurn, index: int) -> Task:
    """The training task at this place of the world's source, which is begun again at its end."""
    source = world.train
    return source.task(index if source.count is None else index % source.count)
