"""What the parsers of all commands share: the form of help texts, `add_command`, and the option --trust."""

from __future__ import annotations

import argparse
import re
import textwrap
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction

EXIT_CODES = """\
exit codes: 0 done, 1 a bug (with traceback), 2 wrong usage or configuration,
3 an invariant broke, 4 data or model cannot be read, 5 the run folder,
6 the engine, 7 the reward function, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"""


class HelpText(RawDescriptionHelpFormatter):
    """Help as wide as the terminal. A long example command is continued with `\\`, so that it can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(part for line in text.splitlines() for part in fitted(line, width))


def fitted(line: str, width: int) -> list[str]:
    """A line of help in lines of at most `width` columns.

    >>> fitted("  posttrain run grpo model=my-model  # a comment", 30)
    ['  # a comment', '  posttrain run grpo \\\\', '    model=my-model']
    """
    if len(line) <= width:
        return [line]
    lead = line[: len(line) - len(line.lstrip())]
    if not line.lstrip().startswith("posttrain "):
        return _wrapped(line.strip(), width, lead, lead)
    # After a comment the command could not be continued with `\`, so the comment stands on a line before it.
    command, comment = re.fullmatch(r"(.*?)( +#.*)?", line.strip()).groups(default="")  # type: ignore[union-attr]
    comment_lines = [f"{lead}# {comment.strip(' #')}"] if comment else []
    if len(lead + command) <= width:
        return [*comment_lines, lead + command]
    lines = _wrapped(command, width - 2, lead, f"{lead}  ")  # 2 columns for the ` \` at the end
    return [*comment_lines, *(f"{x} \\" for x in lines[:-1]), lines[-1]]


def _wrapped(text: str, width: int, first: str = "", then: str = "") -> list[str]:
    """The text in lines, where no word is broken. `first`, `then`: what the first line and the others begin with."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def add_command(
    sub: Subparsers, name: str, call: Callable[[Namespace], int], text: str, example: str, add_help: bool = True
) -> ArgumentParser:
    """Add a command to the program; returns its parser.

    Args:
        call: the function of the command: options -> exit code.
        text: what the command does, for its help and the list of commands.
        example: command lines for its help.
        add_help: whether it gets the usual --help; `run` has its own.
    """
    # `allow_abbrev=False`: with abbreviations, a new option could change what an abbreviation in an old command means.
    p = sub.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=HelpText,
        allow_abbrev=False,
        add_help=add_help,
    )
    p.set_defaults(command=call)
    return p


def add_trust(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --trust, for folders and files made by somebody else."""
    p.add_argument(
        "--trust",
        action="store_true",
        help="of a run folder or a YAML file that was not made here by you: allow the code, addresses, secrets and "
        "files that it asks for, which are listed",
    )
