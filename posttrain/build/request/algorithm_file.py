"""Algorithms that a user names or hands over: a name of a ladder, an object, or `algorithm=path.py:NAME`."""

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
    """Like `algorithm_of`, but ConfigError for an algorithm that does not learn from reward."""
    algorithm = algorithm_of(given)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm={algorithm.name} learns from {learns_from(type(algorithm))}, and recorded rollouts are judged"
            " by reward: name one that learns from reward"
        )
    return algorithm


def without_algorithm(overrides: Sequence[str], handed: UserObjects) -> tuple[list[str], UserObjects]:
    """Takes `algorithm=path.py:NAME` and `STAGE.algorithm=path.py:NAME` out of the overrides.

    Returns:
        (the other overrides, `handed` with these algorithms as objects in `files`).
    """
    # An override can only have names, so an algorithm of a file (a word with a colon) is handed over as an object.
    # `files`: by the stage, or '' where no stage is named, (the word, the algorithm).
    files, others = dict[str, tuple[str, AnyAlgorithm]](), list[str]()
    for text in overrides:
        name, _, word = (part.strip() for part in text.partition("="))
        stage, _, setting = name.rpartition(".")
        if setting != "algorithm" or ":" not in word:
            others.append(text)
        # Another file for the same stage, or a file and an object where no stage is named.
        elif files.get(stage, (word,))[0] != word or (handed.algorithm is not None and not stage):
            raise ConfigError(f"{text}: an algorithm is given twice; keep one")
        else:
            files[stage] = word, algorithm_of(word)
    return others, replace(handed, files=files)


def check_same(folder: Path, stored: Run, handed: UserObjects) -> None:
    """Raises ConfigError if a resumed run is handed another algorithm than the one with which it was begun."""
    used = list(algorithms_of(stored.stages).values())
    for given in (handed.algorithm, *(a for _, a in handed.files.values())):
        # Compared whole, and not only by name: the steps so far were taken with all its numbers.
        if given is not None and given not in used:
            raise ConfigError(
                f"{folder}: the algorithm {given.name!r} that was given is not the one that the run was begun"
                f" with ({', '.join(a.name for a in used)}). Give the file as it was, or begin a new run with"
                f" model={folder}"
            )
