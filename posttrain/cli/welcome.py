"""The text that `posttrain` prints when it is given no command, and `posttrain --version`."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain.cli.screen_text import screen_width
from posttrain.system.shell import command_line, with_reasons
from posttrain.system.terminal_output import tell
from posttrain.system.version import VERSION

SHOWN = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose versions are printed: another version may change what a run computes."""
FIRST = (
    (("run", "ladder"), "train a tiny model in five stages, 3 minutes"),
    (("run", "--help"), "the recipes, also for your own model and data"),
    (("--help",), "all commands"),
)


def welcome(o: argparse.Namespace) -> int:
    """Three commands to begin with. Exit code 0, because nothing is wrong."""
    tell(f"posttrain {VERSION}: RL post-training for language models. To begin:\n")
    for line in with_reasons(((command_line(*words), why) for words, why in FIRST), screen_width() - 2):
        tell(f"  {line}")
    return 0


def versions() -> list[str]:
    """A line each for posttrain, Python, the packages that decide what a run computes, and the machine.

    No package is imported for it, so it works even if an import fails.
    """
    rows = [
        ("posttrain", f"{VERSION} ({Path(__file__).parents[1]})"),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        *((name, _installed(name)) for name in SHOWN),
        ("platform", platform.platform()),
    ]
    return [f"{name} {text}" for name, text in rows]


def _installed(name: str) -> str:
    try:
        # The metadata of a package is read without importing it.
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is not installed"


class ShowVersion(argparse.Action):
    """`--version`: prints the versions and ends."""

    def __init__(self, option_strings: list[str], dest: str, **named: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **named)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        tell("\n".join(versions()))
        parser.exit()
