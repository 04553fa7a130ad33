"""Pieces of algorithms that the user's own Python files define: what run.json records of them, and how a run folder
gets them again.

Their code runs with all rights of the user. So a file is imported only if it is as it was when the run was begun, and
the user made the run on this machine or allows it with `--trust`. A command that only reads needs no class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.core.asks import Ask, Kind
from posttrain.core.errors import ConfigError
from posttrain.core.given import OBJECTS, OwnPiece, file_digest
from posttrain.core.pieces.absent import known_pieces
from posttrain.core.run import Reinforce, Run
from posttrain.core.shell import command_line
from posttrain.verifier.user_code import user_module


def own_classes(run: Run) -> dict[str, type]:
    """The classes of all pieces of the run that are no part of posttrain, by their names."""
    algorithms = [a for s in run.stages if isinstance(s, Reinforce) for a in s.algorithm.lineage()]
    found = (type(p) for a in algorithms for p in a.pieces)
    return {c.__name__: c for c in found if not c.__module__.startswith("posttrain.")}


def piece_asks(pieces: Sequence[OwnPiece]) -> Iterator[Ask]:
    """What recorded pieces ask for: that a file is imported, with the text that it had."""
    for p in pieces:
        if p.file:
            texts = ", ".join(f"{file} with digest {digest}" for file, digest in sorted(p.files.items()))
            yield Ask(f"{OBJECTS}.{p.name}", Kind.CODE, f"runs the Python file {p.file} ({texts})")


def check_files(folder: Path, pieces: Sequence[OwnPiece]) -> None:
    """ConfigError where the file of a piece is not as it was when the run was begun, or there is none."""
    for p in pieces:
        if not p.file:
            raise ConfigError(
                f"{folder}: the algorithm of this run has the piece {p.name}, whose class was defined in a notebook or"
                " in the program that began the run, so there is no file to import. Define it again and hand the"
                f" algorithm from Python: posttrain.run(resume={str(folder)!r}, algorithm=YOUR_ALGORITHM); or put the"
                f" class into a file: {_again(folder, 'mine.py')}"
            )
        for name, digest in p.files.items():
            there = Path(name).is_file()
            if there and file_digest(Path(name)) == digest:
                continue
            raise ConfigError(
                f"{folder}: the algorithm of this run has the piece {p.name} of {name}, and that file"
                f" {'was changed since the run was begun' if there else 'is not there'}. Put it back as it was, or go"
                f" on with what it is now by naming it: {_again(folder, p.file)}"
            )


def _again(folder: Path, file: str) -> str:
    return command_line("run", "--resume", folder, f"algorithm={file}:NAME")


def import_again(folder: Path, pieces: Sequence[OwnPiece]) -> None:
    """Import the files of these pieces, which `check_files` found unchanged."""
    for file in dict.fromkeys(p.file for p in pieces):
        user_module(Path(file), "algorithm")
    known = known_pieces()
    for p in pieces:
        if p.name not in known:
            raise ConfigError(
                f"{folder}: {p.file} was imported and defines no piece {p.name}, which the algorithm of this run has."
                f" Name the file that does: {_again(folder, 'mine.py')}"
            )
