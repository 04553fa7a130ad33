"""The parser of the command line. It imports nothing heavy; each command does that when it runs."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from itertools import pairwise
from typing import NoReturn, cast

from posttrain.cli.commands import (
    check_command,
    compare_command,
    evaluate_command,
    export_command,
    faults_command,
    lab_command,
    ladder_command,
    new_command,
    plan_command,
    plot_command,
    run_command,
    serve_command,
    show_command,
    summary_command,
)
from posttrain.cli.shared_arguments import EXIT_CODES, HelpText, Subparsers
from posttrain.cli.welcome import ShowVersion, welcome
from posttrain.system.errors import closest, nearest
from posttrain.system.terminal_output import visible

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
"""The beginning of an override: `rl.steps=`."""
_NO_COMMAND = re.compile(r"argument COMMAND: invalid choice: '([^']*)' ")
"""The beginning of argparse's message about an unknown command: argument COMMAND: invalid choice: 'runn' (choose from
..."""
_OVERRIDABLE = ("run", "eval", "serve", "check", "plan")
"""Commands that take `key=value` words."""

COMMANDS = (
    run_command,
    ladder_command,
    evaluate_command,
    serve_command,
    check_command,
    plan_command,
    new_command,
    summary_command,
    compare_command,
    plot_command,
    show_command,
    export_command,
    faults_command,
    lab_command,
)
"""In the order in which `--help` lists them."""


class _CommandParser(ArgumentParser):
    """A parser whose errors escape unknown words, because a shell may have expanded file names into them."""

    def error(self, message: str) -> NoReturn:
        # argparse's message only lists all commands. It is replaced by one with the nearest command.
        if match := _NO_COMMAND.match(message):
            names = re.findall(r"'([^']*)'", message[match.end() :])
            from posttrain.recipe.recipes import RECIPES  # here, since only a wrong word needs it

            meant = f"posttrain run {match[1]} starts it" if match[1] in RECIPES else nearest(match[1], names)
            message = f"there is no command {match[1]}; {meant}"
        super().error(visible(message))


def parser() -> ArgumentParser:
    """The whole command line."""
    return _parsers()[0]


def read_words(words: list[str]) -> Namespace:
    """The options of one command line, with its `key=value` words as `overrides`. Ends with 2 where a word is wrong."""
    # Overrides may stand anywhere, and argparse would take them for positional arguments.
    other_words, overrides = split_overrides(words)
    top, sub = _parsers()
    options, unknown = top.parse_known_args(other_words)
    if unknown:
        # The error comes from the parser of the command, so that its usage line is shown, and not the whole program's.
        command = next((sub.choices[w] for w in other_words[:1] if w in sub.choices), top)
        command.error(_unknown(unknown, command, takes_settings=other_words[0] in _OVERRIDABLE))
    options.overrides = overrides
    return options


def _unknown(words: list[str], command: ArgumentParser, takes_settings: bool) -> str:
    """The message about words that a command does not take, with what was probably meant."""
    message = f"unrecognized arguments: {' '.join(words)}"
    options = [w for a in command._actions for w in a.option_strings]
    if words[0].startswith("-"):
        if meant := closest(words[0].partition("=")[0], options):
            return f"{message}; did you mean {meant}?"
        setting = "=".join(words[0].lstrip("-").split("=") + words[1:2])
        way = f"a setting has no dashes: {setting}; " if takes_settings else ""
        return f"{message}; {way}{command.prog} --help lists the options"
    if takes_settings:
        return f"{message}; a setting is one word, key=value, such as seed=1"
    return message


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """(other words, overrides). For the commands of `_OVERRIDABLE`, `key=value` words may be anywhere."""
    if not words or words[0] not in _OVERRIDABLE:
        return words, []
    # A word behind an option that takes a value is that value, although it may look like an override: `--limit NAME=4`.
    valued = {w for a in _parsers()[1].choices[words[0]]._actions if a.nargs != 0 for w in a.option_strings}
    other_words, overrides = [words[0]], list[str]()
    for before, word in pairwise(words):
        (overrides if _OVERRIDE.match(word) and before not in valued else other_words).append(word)
    return other_words, overrides


def _parsers() -> tuple[ArgumentParser, Subparsers]:
    """(the parser of the program, the parsers of its commands)."""
    # For the type checker: `add_subparsers` of the subclass would give another type than `Subparsers`.
    make = cast("type[ArgumentParser]", _CommandParser)
    top = make(
        prog="posttrain",
        description="RL post-training for language models: the whole loop, from one laptop command.",
        epilog=f"example:\n  posttrain run ladder seed=1 algorithm=dapo rl.steps=40\n\n{EXIT_CODES}",
        formatter_class=HelpText,
    )
    top.add_argument("--version", action=ShowVersion, help="versions of posttrain, Python and what a run computes with")
    top.set_defaults(command=welcome)
    sub = top.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add(sub)
    return top, sub
