"""File operations of a run folder: atomic files, directories written whole, appended lines, and a lock.

A kill at any time leaves the old or the new state. Temporary files of a killed process begin with a dot and are removed
at the next open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.system import read_untrusted
from posttrain.system.errors import RunFolderError

DIGESTS = "digests.json"
LARGEST_JSON = 256 * read_untrusted.MiB
"""Largest JSON file of a run folder. A checkpoint's state has the curriculum's pass rate of every task."""
LONGEST_LINE = 64 * read_untrusted.MiB
"""Longest line of the record."""
FULL = {
    errno.ENOSPC: ("the disk is full", "Free some space"),
    errno.EDQUOT: ("the quota of the disk is used up", "Free some space"),
    errno.EFBIG: ("a file has reached the largest size that is allowed here", "Raise the limit (ulimit -f)"),
    errno.EROFS: ("the disk cannot be written", "Mount it for writing"),
    errno.EIO: ("the disk failed (input/output error)", "Mend it"),
}
"""The reasons why nothing more can be written to a disk, and what helps, by error number."""


def sync(path: Path) -> None:
    """Wait until a file or folder, as it is now, would survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """The whole file or none of it. `durable`: also after a power cut."""
    # Beside the target and not in a temporary folder: a rename is atomic only within one file system.
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        if durable:
            # Before the rename: after a power cut the new name must not stand for a file without its content.
            sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        # The rename itself is durable only when its folder is.
        sync(path.parent)


def write_json(path: Path, data: Any) -> None:
    write_file(path, json.dumps(data, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. RunFolderError names a file that is missing, is no file, or has no JSON object."""
    data = read_untrusted.read_bytes(path, LARGEST_JSON, RunFolderError)
    return read_untrusted.parse_object(data, str(path), RunFolderError)


def full(error: BaseException) -> tuple[str, str] | None:
    """Returns the reason why nothing more can be written, and what helps; None for another error. Errors of libraries
    in other languages are recognised by their message."""
    if isinstance(error, OSError) and error.errno in FULL:
        return FULL[error.errno]
    # Rust's libraries, such as safetensors, have the number only in their text.
    match = re.search(r"\bos error (\d+)\b", str(error))
    if match and int(match[1]) in FULL:
        return FULL[int(match[1])]
    return FULL[errno.ENOSPC] if "No space left on device" in str(error) else None


@contextmanager
def disk_full_is_reported(what: Path, still_good: Callable[[], str]) -> Generator[None]:
    """Turns the error of a full disk into a RunFolderError with what was being written and what is still good."""
    try:
        yield
    except RunFolderError:
        raise
    except Exception as error:
        if (reason := full(error)) is None:
            raise
        why, advice = reason
        raise RunFolderError(
            f"{why}: {what} was not written. {still_good()}. {advice} and go on with --resume"
        ) from error


# --- directories written whole ----------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    h = hashlib.blake2b(digest_size=32)
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def share(folder: Path) -> None:
    """Give every file under a folder the mode of a new file (by the user's umask): libraries write theirs as 0600."""
    # Reading the umask means setting it, for all threads of the process. So a new file is made, and its mode is read.
    probe = folder / ".mode.part"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode != mode:
            path.chmod(mode & 0o777)


def write_directory(target: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a hidden folder beside `target`, add a digest per file, make it durable, and rename it to
    `target`. An existing one is replaced. A kill between the two renames leaves it under a hidden name, from which
    `sweep` brings it back."""
    staged, old = target.with_name(f".staged-{target.name}-{os.getpid()}"), target.with_name(f".old-{target.name}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        write(staged)
        share(staged)
        # Digests are taken of what lies on the disk, after `write` is through and before anything is renamed.
        files = sorted(p for p in staged.rglob("*") if p.is_file())
        digests = {p.relative_to(staged).as_posix(): digest(p) for p in files}
        (staged / DIGESTS).write_text(json.dumps(digests, indent=1))
        for path in (*files, staged / DIGESTS, *(p for p in staged.rglob("*") if p.is_dir()), staged):
            sync(path)
        if target.exists():
            # An old one beside a whole one was left by a kill before its removal.
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(staged, target)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if old.exists() and not target.exists():
            os.replace(old, target)
        raise
    sync(target.parent)
    # Only now: until the new one has the name, the old one is the state to go on from.
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory. It is renamed first, so a kill in between leaves only a hidden folder."""
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    os.replace(path, trash)
    shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes; a folder that was about to be replaced has its name again."""
    for path in folder.glob(".*"):
        name = path.name.removeprefix(".old-")
        if name != path.name and path.is_dir() and not path.is_symlink() and not (folder / name).exists():
            os.replace(path, folder / name)
        elif is_temporary(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def is_temporary(path: Path) -> bool:
    """Returns whether a killed process may have left this file or directory, which `sweep` removes."""
    hidden_folder = path.name.startswith((".staged-", ".trash-", ".old-"))
    return hidden_folder or (path.name.startswith(".") and path.name.endswith(".part") and not path.is_dir())


def damage(folder: Path) -> str:
    """The first file of a written directory that is not as it was written, and how; '' where all are."""
    try:
        listed = read_json(folder / DIGESTS)
    except RunFolderError as error:
        return str(error)
    if not listed:
        return f"{folder / DIGESTS} is damaged: it lists no file"
    for name, expected in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if digest(path) != expected:
            return f"{path} is damaged (its digest differs from the one written with it)"
    return ""


# --- appended lines ---------------------------------------------------------------------------------------------------


def json_line(data: Any) -> bytes:
    """Data as one line of JSON, with its end."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class Lines:
    """A file that grows by whole lines. A line that does not fit on the disk leaves no trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A link in a foreign folder could lead out of it, and opening a pipe would wait for its other end.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        read_untrusted.require_regular(path, os.fstat(self._fd), RunFolderError)
        self.position = os.fstat(self._fd).st_size

    def append(self, data: Any) -> None:
        """Write data as one line of JSON."""
        line = json_line(data)
        unwritten = memoryview(line)
        try:
            while unwritten:
                # A write may take only a part, on a full disk or after a signal.
                unwritten = unwritten[os.write(self._fd, unwritten) :]
        except OSError:
            # The part that was written is taken back, so that the next line does not stand behind half a line.
            os.ftruncate(self._fd, self.position)
            raise
        self.position += len(line)

    def truncate(self, position: int) -> None:
        """Remove what was written after this position, such as the steps after a checkpoint."""
        if position > self.position:
            raise RunFolderError(
                f"{self.path} has {self.position} bytes, but the checkpoint was made at {position}: lines are missing"
            )
        os.ftruncate(self._fd, position)
        self.position = position

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, data) of every whole line. A last line without its end was being written, and is left out."""
    if not os.path.lexists(path):
        return
    for number, line in read_untrusted.read_lines(path, LONGEST_LINE, RunFolderError):
        if line.endswith(b"\n"):
            yield number, read_untrusted.parse(line, f"{path}:{number}", RunFolderError)


# --- one owner at a time ----------------------------------------------------------------------------------------------


class Lock:
    """`folder/lock`, held with flock while this process runs. The lock of a dead process can be taken by another."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        try:
            self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            read_untrusted.require_regular(self.path, os.fstat(self._fd), RunFolderError)
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror}") from error
        try:
            # flock ends with the process, however it ends, so no lock of a dead one stays.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 1000, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if not isinstance(error, BlockingIOError):  # such as a network's, mounted without locks
                why = f"{error.strerror}. Take a folder on a file system that has locks"
                raise RunFolderError(f"cannot lock {self.path}: {why}") from error
            raise RunFolderError(f"{folder} is in use by another process ({owner}). Wait for it, or stop it") from error
        # Who holds it, for the message of the next one that wants it.
        text = f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock holds without the owner's name
            os.pwrite(self._fd, text.encode(), 0)
        _HELD.add(self)

    def release(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            self.forget()

    def forget(self) -> None:
        """Close this process's handle. A forked child does so at once, or it would keep the lock after its owner."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    """Close the handles of all locks. A forked child calls it, so that it keeps no lock of its parent."""
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
