"""Records which run folders this user made on this machine: a private note per run, outside its folder.

    $XDG_STATE_HOME/posttrain/runs/ID.json          (~/.local/state where XDG_STATE_HOME is not set)

ID is the random identity in run.json, so a run is still known after it was moved or copied. The note has digests of all
that the run asked for (`record.external_access`), and of run.json. An edited run.json may use what it asked for before,
and nothing more. Every user has their own notes. Another machine has none, unless it shares the home directory.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from posttrain.record.external_access import Ask
from posttrain.system.read_untrusted import private

_IDENTITY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Note:
    """A user's note of a run. `asked`: digests of `Ask`; `written`: digest of its run.json."""

    asked: frozenset[str] = frozenset()
    written: str = ""


def notes_folder() -> Path:
    """The folder of the notes; RuntimeError where this user has no home."""
    named = os.environ.get("XDG_STATE_HOME", "")
    # A relative path would depend on where the program was started. The standard says to ignore it.
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    return base / "posttrain" / "runs"


def remember(identity: str, written: str, asked: Iterable[Ask]) -> str:
    """Write the note of a run that was just made, where it asks for anything. Returns '', or why that could not be."""
    digests = sorted(a.digest for a in asked)
    # A run that asks for nothing needs no word of the user, and so no note.
    if not digests:
        return ""
    try:
        folder = notes_folder()
        # Mode 0700: nobody else may read what this user runs, or write a note here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = folder / f".{identity}.part"
        # No link is followed: whoever placed one there would choose the file that is written.
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"asked": digests, "written": written}, file)
        # Renamed into place, so that a reader never sees half a note.
        os.replace(unfinished, folder / f"{identity}.json")
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def recall(identity: object) -> Note | None:
    """The note of a run; None where there is none, or where somebody else could have written it."""
    # The identity becomes a part of a file name, and it comes from a folder that may be a stranger's.
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        return None
    try:
        path = notes_folder() / f"{identity}.json"
        # Somebody else could have written it, so it says nothing about this user.
        if not (private(path.parent, stat.S_ISDIR) and private(path, stat.S_ISREG)):
            return None
        data = json.loads(path.read_bytes())
        return Note(frozenset(map(str, data["asked"])), str(data["written"]))
    # Without a readable note the run counts as a stranger's, which is the safe side.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
