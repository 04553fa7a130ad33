"""Pieces of algorithms that the user's own Python files define: which a run has, and how a resumed run imports them.

Their code runs with all rights of the user. So a file is imported only if it is as it was when the run was begun, and
the user made the run on this machine, or allows the import with `--trust`. A command that only reads a run folder needs
no class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from posttrain.config.run import Run
from posttrain.ladder.both_ladders import algorithms_of
from posttrain.ladder.pieces.unknown_pieces import known_pieces
from posttrain.record.external_access import Ask, Kind
from posttrain.record.runtime_objects import MOST_PIECES, OBJECTS, OwnPiece, file_digest
from posttrain.system.errors import ConfigError, RunFolderError
from posttrain.system.shell import command_line
from posttrain.verifier.user_code import module_name, user_module

_DIGEST = "__posttrain_digest__"
"""The name in an imported module of algorithms under which the digest of its text is stored."""


def own_classes(run: Run) -> dict[str, type]:
    """The classes of all pieces of the run's algorithms that are not posttrain's own, by their names.

    Raises:
        ConfigError: two of them have one name, or there are too many.
    """
    algorithms = [a for algorithm in algorithms_of(run.stages).values() for a in algorithm.lineage()]
    classes = dict.fromkeys(type(p) for a in algorithms for p in a.pieces)
    by_name: dict[str, type] = {}
    for c in classes:
        if c.__module__.startswith("posttrain."):
            continue
        if by_name.setdefault(c.__name__, c) is not c:
            raise ConfigError(
                f"two pieces of the run's algorithms are called {c.__name__}, and run.json tells them by their names:"
                " rename one"
            )
    if len(by_name) > MOST_PIECES:
        raise ConfigError(
            f"the run's algorithms have {len(by_name)} pieces of your own; at most {MOST_PIECES} are kept"
        )
    return by_name


def algorithm_module(path: Path) -> ModuleType:
    """Import a file of algorithms.

    An unchanged file that was imported before is not run again. So its classes stay the same objects, and two
    algorithms made of them can be equal.
    """
    digest = file_digest(path)
    module = sys.modules.get(module_name(path))
    # Changed or not is decided by the text, not by the time of the file.
    if module is None or vars(module).get(_DIGEST) != digest:
        module = user_module(path, "algorithm")
        vars(module)[_DIGEST] = digest
    return module


def piece_asks(pieces: Sequence[OwnPiece]) -> Iterator[Ask]:
    """Yields the requests of recorded pieces: that a file is imported, with the text that it had."""
    for p in pieces:
        if p.file:
            texts = ", ".join(f"{file} with digest {digest}" for file, digest in sorted(p.files.items()))
            yield Ask(f"{OBJECTS}.{p.name}", Kind.CODE, f"runs the Python file {p.file} ({texts})")


def check_files(folder: Path, pieces: Sequence[OwnPiece]) -> None:
    """Checks that the files of recorded pieces are as they were when the run was begun: ConfigError where one has
    changed or is gone, or a class has no file; RunFolderError for a record that no run writes."""
    for p in pieces:
        if not p.file:
            raise ConfigError(
                f"{folder}: the algorithm of this run has the piece {p.name}, whose class was defined in a notebook or"
                " in the program that began the run, so there is no file to import. Define it again and hand the"
                f" algorithm from Python: posttrain.run(resume={str(folder)!r}, algorithm=YOUR_ALGORITHM); or put the"
                f" class into a file: {_again(folder, 'mine.py')}"
            )
        # A relative path would name whatever lies in the folder where the command is run.
        if p.file not in p.files or not all(Path(name).is_absolute() for name in p.files):
            raise RunFolderError(f"{folder / 'run.json'} is damaged: the piece {p.name} has no digest of its file")
        # The imported file and that of the class, which may be a module beside it: all before anything is imported.
        for name, digest in p.files.items():
            exists = Path(name).is_file()
            if exists and file_digest(Path(name)) == digest:
                continue
            raise ConfigError(
                f"{folder}: the algorithm of this run has the piece {p.name} of {name}, and that file"
                f" {'was changed since the run was begun' if exists else 'is not there'}. Put it back as it was. To go"
                f" on with the run with what {'it is now' if exists else 'another file has'}, name it:"
                f" {_again(folder, p.file if exists else 'mine.py')}"
            )


def _again(folder: Path, file: str) -> str:
    """The command that resumes the run with the algorithm of a file."""
    return command_line("run", "--resume", folder, f"algorithm={file}:NAME")


def import_again(folder: Path, pieces: Sequence[OwnPiece]) -> None:
    """Import the files of these pieces, which `check_files` found unchanged."""
    for file in dict.fromkeys(p.file for p in pieces):
        algorithm_module(Path(file))
    known = known_pieces()
    for p in pieces:
        if p.name not in known:
            raise ConfigError(
                f"{folder}: {p.file} was imported and defines no piece {p.name}, which the algorithm of this run has."
                f" Name the file that does: {_again(folder, 'mine.py')}"
            )
