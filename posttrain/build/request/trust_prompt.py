"""Trust in a run folder that a command is given. What the folder names outside itself (code, addresses, files) is used
only where this user made the folder on this machine, or allows it.

Every command that builds something from the `Run` of a folder gets it from `admitted`. A command that only reads
(`show`, `export` of a model without code of its own) needs no permission.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from posttrain.build.request.own_pieces import check_files, import_again, piece_asks
from posttrain.config import overrides as dotted
from posttrain.config.run import Run
from posttrain.record import provenance
from posttrain.record.external_access import Ask, Kind, asks, grave, values
from posttrain.record.run_reader import RunFile, missing_episodes, run_file
from posttrain.record.runtime_objects import own_pieces
from posttrain.system.errors import UntrustedError
from posttrain.system.terminal_output import tell

MOST = 20
"""Most lines printed of what a folder asks for; of the rest only their number."""
STAGES = "stages"
"""In `parts`, stands for all stages of the run."""


def to_stderr(line: str) -> None:
    """Print to standard error, so that standard output holds only the command's table or JSON."""
    tell(line, file=sys.stderr)


def admitted(
    folder: Path | str,
    *overrides: str,
    parts: Sequence[str] = (),
    allow: bool = False,
    links: bool = False,
    change: Callable[[Run], Run] = lambda run: run,
) -> Run:
    """The run of a folder with overrides in place.

    Args:
        parts: the fields of `Run` that the command uses, `stages` among them; empty: all. With `stages` the Python
            files of the algorithm's own pieces are imported.
        allow: the user gave --trust. What the folder asks for is listed and allowed.
        links: count symbolic links in the folder too, for a command that writes into it.
        change: the command's own changes of the run.

    Raises:
        ConfigError: a file that defines a piece of the algorithm is gone or was changed.
        UntrustedError: the folder asks for something that is neither in this user's note of the run nor allowed now.
    """
    run_json = run_file(folder)
    # The classes of pieces whose file was not imported yet. A command that reads no stage needs none of them.
    absent = run_json.absent if not parts or STAGES in parts else ()
    run = change(dotted.apply(run_json.run, list(overrides)))
    # Without a note nothing was ever allowed, so everything is asked.
    noted = (provenance.recall(run_json.identity) or provenance.Note()).asked
    imports = [ask for ask in piece_asks(absent) if ask.digest not in noted]
    wanted = [*imports, *_wanted(run_json, run, parts, noted), *(_links(Path(folder)) if links else ())]
    # Before the first import: code that runs could change all that is decided after it.
    _permit(folder, run_json, wanted, allow)
    if not absent:
        return run
    check_files(Path(folder), absent)
    import_again(Path(folder), absent)
    # Read once more, now with the classes of its pieces.
    return change(dotted.apply(run_file(folder).run, list(overrides)))


def _permit(folder: Path | str, run_json: RunFile, wanted: Sequence[Ask], allow: bool) -> None:
    """UntrustedError for what the folder asks for; where the user allows it, it is listed."""
    if not wanted:
        return
    lines = _listed(wanted)
    if not allow:
        raise UntrustedError("\n".join((f"{folder} {_whose(run_json)}. It asks for this:", *lines, _HELP)))
    for line in (f"{folder} {_whose(run_json)}. It asks for this, and --trust allows it:", *lines):
        to_stderr(line)


def permit_file(file: str, run: Run, given: Collection[str], allow: bool) -> None:
    """List what a run file asks for, before any of it is used.

    Args:
        run: the run of the file with overrides in place.
        given: full paths of the settings that the command itself gives.
        allow: the user gave --trust.

    Raises:
        UntrustedError: it names an address together with a secret, or code of a model, and the command does not.
    """
    # What the command itself names was written by the user. A dot is added on both sides, so that `env` does not cover
    # `env2`.
    asked = [a for a in asks(run) if not any(f"{a.path}.".startswith(f"{p}.") for p in given)]
    list_file(file, asked)
    # Of all requests together, since an address is grave only with a secret, which the command itself may name.
    if (serious := [a for a in grave(asks(run)) if a in asked]) and not allow:
        raise UntrustedError("\n".join((f"{file} asks for this, and the command does not:", *_listed(serious), _SAY)))


def list_file(file: str, wanted: Sequence[Ask]) -> None:
    """Print what a run file asks for."""
    for line in (f"{file} asks for this:", *_listed(wanted)) if wanted else ():
        to_stderr(line)


def _listed(wanted: Sequence[Ask]) -> list[str]:
    lines = [f"  {a.kind:<8} {a.path}: {a.what}" for a in wanted[:MOST]]
    return [*lines, f"  ... and {len(wanted) - MOST} more"] if len(wanted) > MOST else lines


_SAY = (
    "A file from elsewhere could send your keys away, or run foreign code. To allow it, add --trust (from Python"
    " trust=True), or write the same settings behind the file's name on the command line"
)
_HELP = (
    "Look at what it names first: code runs with all your rights. To allow everything that is listed, add --trust (from"
    " Python trust=True), or give other values where the command takes overrides. posttrain show and export work"
    " without it"
)


def _whose(run_json: RunFile) -> str:
    if provenance.recall(run_json.identity) is None:
        return "was not made by you on this machine, as far as your notes of your runs say"
    return "asks for more than when you made it"


def _wanted(run_json: RunFile, run: Run, parts: Sequence[str], noted: Collection[str]) -> Iterator[Ask]:
    """Yields the requests of the folder that come from no override and are not in the user's note (`noted`)."""
    stored, now = values(run_json.run), values(run)
    stages = {s.name for s in run.stages}
    for ask in asks(run):
        head = ask.path.split(".")[0]
        read = not parts or head in parts or (head in stages and STAGES in parts)
        # Three ways out: the command does not read it, it was allowed when the run was made, or an override has put
        # another value there, which is the user's own word.
        if read and ask.digest not in noted and ask.path in stored and stored[ask.path] == now[ask.path]:
            yield ask


def _links(folder: Path) -> Iterator[Ask]:
    """Symbolic links in a folder that will be written into: a write or removal through one acts outside the folder."""
    # `os.walk` does not follow links, so a link to a folder is found here among its names and not entered.
    for place, inner, names in os.walk(folder):
        for path in sorted(Path(place, n) for n in (*inner, *names)):
            if path.is_symlink():
                yield Ask(
                    str(path.relative_to(folder)),
                    Kind.OUTSIDE,
                    f"is a link, and what is written there goes to {os.path.realpath(path)}",
                )


def remember_run(folder: Path, run: Run) -> Iterator[str]:
    """Write this user's note of a run that was just made. Yields a line where it cannot be written."""
    run_json = run_file(folder)
    asked = [*asks(run), *piece_asks(own_pieces(run_json.facts))]
    if why := provenance.remember(run_json.identity or "", run_json.digest, asked):
        yield f"note: going on with this run will need --trust, because no note of it could be written: {why}"


def edit_notes(folder: Path) -> Iterator[str]:
    """Lines about run.json of a resumed run: entries that were changed since they were written."""
    run_json = run_file(folder)
    note = provenance.recall(run_json.identity)
    if run_json.edited:
        yield (
            f"note: run.json was edited since the run was made: {', '.join(run_json.edited)}. What follows is another"
            " run than what came before"
        )
        return
    # Its own digests fit, and the note outside the folder has another: whoever edited it wrote them anew.
    if note is not None and note.written != run_json.digest:
        yield (
            "note: run.json is not as it was when you made the run, and its digests were written anew. What follows is"
            " another run"
        )


def missing_notes(folder: Path) -> Iterator[str]:
    """Lines about episode files that the index of a resumed run lists and its folder does not have."""
    if missing := missing_episodes(folder):
        names = ", ".join(row.path.name for row in missing[:3]) + (", ..." if len(missing) > 3 else "")
        yield (
            f"note: {len(missing)} episode file{'s are' if len(missing) > 1 else ' is'} missing from"
            f" {folder / 'episodes'}: {names}"
        )
