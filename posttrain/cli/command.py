"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction

EXIT_CODES = """\
exit codes: 0 done, 1 a bug (with traceback), 2 wrong usage or configuration,
3 an invariant broke, 4 data or model cannot be read, 5 the run folder,
6 the engine, 7 the reward function, 130 Ctrl-C, 143 SIGTERM"""


def add_command(
    sub: Subparsers,
    name: str,
    call: object,
    text: str,
    example: str,
    add_help: bool = True,
) -> ArgumentParser:
    p = sub.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=add_help,
    )
    p.set_defaults(command=call)
    return p


def add_trust(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --trust, for folders made by somebody else."""
    p.add_argument(
        "--trust",
        action="store_true",
        help="of a run folder that was not made here by you: allow the code, addresses, secrets and files that it asks "
        "for, which are listed",
    )
