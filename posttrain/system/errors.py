"""Errors by who has to act, each with the exit code that the command line returns.

A failed rollout is data (`verdict.Verdict`), a broken invariant stops the run, and a wrong config never starts one.
Every message says what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosttrainError(Exception):
    """Base of all errors that posttrain raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows: the message alone, as the command line does."""
        from posttrain.system.terminal_output import visible_lines

        return [f"{type(self).__name__}: {visible_lines(str(self))}"]


class ConfigError(PosttrainError):
    """The settings of a run are wrong, or it cannot start with them. Exit code 2, as for wrong usage."""

    exit_code = 2


class InvariantError(PosttrainError):
    """A canary or a type found that something is false that must be true. The run stops. Exit code 3."""

    exit_code = 3


class DataError(PosttrainError):
    """The user's data or model cannot be read, or is wrong. The message names file and line if it can. Exit code 4."""

    exit_code = 4


class LimitError(PosttrainError):
    """A model's chat template needed more time or memory than an untrusted program may use. Exit code 4."""

    exit_code = 4


class RunFolderError(PosttrainError):
    """A run folder exists, is in use, is damaged, or cannot be written. Exit code 5."""

    exit_code = 5


class UntrustedError(RunFolderError):
    """A run folder that this user did not make here needs code, addresses, secrets or files elsewhere. Exit code 5."""


class EngineError(PosttrainError):
    """An engine could not do what its protocol requires (out of cache, unsupported architecture). Exit code 6."""

    exit_code = 6


class EndpointError(EngineError):
    """A server used as engine or judge refused a request, failed at every retry, or gave an unreadable answer.

    `role` is what the run uses the server for. `status` is the HTTP status, None without an answer. Exit code 6.
    """

    def __init__(self, message: str, role: str, status: int | None = None) -> None:
        super().__init__(message)
        self.role, self.status = role, status


class RewardError(PosttrainError):
    """The user's reward function broke its contract (raised, wrong count, NaN) too often to go on. Exit code 7."""

    exit_code = 7


CLOSE = 0.66
"""Least likeness at which a wrong name is taken for a misspelling of a valid one: twice the number of common
characters, divided by those of both. `dapoo` is taken for `dapo` (0.89), `nope` is not for `shop` (0.5)."""


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name of which `name` is probably a misspelling, whatever its case; None where none is close."""
    # Backwards, so that of valid names that differ only in case the first one remains in the table.
    by_word = {option.lower(): option for option in reversed([*valid])}
    matches = difflib.get_close_matches(name.lower(), by_word, n=1, cutoff=CLOSE)
    return by_word[matches[0]] if matches else None


def at_least(owner: object, path: str, **least: float) -> None:
    """ConfigError for the first of these fields of `owner` whose value is smaller than it may be; None passes. `path`
    stands before the name in the message."""
    for name, bound in least.items():
        if (value := getattr(owner, name)) is not None and not value >= bound:  # `not >=`: NaN is refused too
            raise ConfigError(f"{path}{name}={value}: must be >= {bound}")


def first_line(error: BaseException) -> str:
    """The first line of an error, without its final period; the name of its class where it has no words."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an 'unknown name' message: the nearest valid name where one is close, then all of them.

    >>> nearest("grop", ["grpo", "rloo"])
    "did you mean 'grpo'? (valid: grpo, rloo)"
    >>> nearest("nope", ["shop", "rloo"])
    'use one of shop, rloo'
    """
    options = list(valid)
    close = closest(name, options)
    if not options:
        return "there is none"
    listed = ", ".join(options)
    return f"did you mean '{close}'? (valid: {listed})" if close else f"use one of {listed}"
