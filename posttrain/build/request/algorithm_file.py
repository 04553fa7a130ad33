"""An algorithm of the user's own: an object, or `algorithm=path.py:NAME`, which may have pieces of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.build.request.own_pieces import algorithm_module
from posttrain.build.request.user_objects import UserObjects
from posttrain.config.run import Run
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.both_ladders import AnyAlgorithm, algorithms_of, any_named, learns_from
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system.errors import ConfigError
from posttrain.verifier.user_code import named_object

BOTH = (Algorithm, PreferenceAlgorithm)
"""The types of the algorithms of both ladders."""


def algorithm_of(given: str | AnyAlgorithm) -> AnyAlgorithm:
    """The algorithm itself, one of a ladder by its name, or `path.py:NAME`: an `Algorithm` or a `PreferenceAlgorithm`,
    or a function without arguments that returns one."""
    if not isinstance(given, str):
        return given
    if ":" not in given:
        return any_named(given)
    wanted = "an Algorithm or a PreferenceAlgorithm, such as posttrain.ladder.algorithm.patch makes,"
    return named_object(given, "algorithm=", BOTH, algorithm_module, wanted)


def reward_algorithm(given: str | AnyAlgorithm) -> Algorithm:
    """`algorithm_of`, where only one that learns from reward has a meaning."""
    found = algorithm_of(given)
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"algorithm={found.name} learns from {learns_from(type(found))}, and recorded rollouts are judged by"
            " reward: name one that learns from reward"
        )
    return found


def without_algorithm(overrides: Sequence[str], handed: UserObjects) -> tuple[list[str], UserObjects]:
    """The overrides without `algorithm=path.py:NAME` and `STAGE.algorithm=path.py:NAME`, which are handed to the run as
    objects."""
    # A word with a colon names a file: such an algorithm is an object, and an override can only hold names. All other
    # words stay overrides.
    files, rest = dict[str, tuple[str, AnyAlgorithm]](), list[str]()
    for text in overrides:
        name, _, word = (part.strip() for part in text.partition("="))
        stage, _, setting = name.rpartition(".")
        if setting != "algorithm" or ":" not in word:
            rest.append(text)
        elif files.get(stage, (word,))[0] != word or (handed.algorithm is not None and not stage):
            raise ConfigError(f"{text}: an algorithm is given twice; keep one")
        else:
            files[stage] = word, algorithm_of(word)
    return rest, replace(handed, files=files)


def check_same(folder: Path, stored: Run, handed: UserObjects) -> None:
    """ConfigError where a run goes on with another algorithm than it was begun with."""
    used = list(algorithms_of(stored.stages).values())
    for given in (handed.algorithm, *(a for _, a in handed.files.values())):
        # By equality, not by name: the steps so far were taken by these numbers.
        if given is not None and given not in used:
            raise ConfigError(
                f"{folder}: the algorithm {given.name!r} that was given is not the one that the run was begun"
                f" with ({', '.join(a.name for a in used)}). Give the file as it was, or begin a new run with"
                f" model={folder}"
            )
