"""Files in a folder that machines share: written beside their name, then renamed, so a name has a whole block or none.

The folder belongs to one sender at a time, which holds its lock. What a killed sender left there, the next one removes.
"""

from __future__ import annotations

import os
import secrets
import weakref
from contextlib import AbstractContextManager
from pathlib import Path

from posttrain.engine.transfer.block import largest
from posttrain.engine.transfer.parcel import (
    Buffer,
    Parcel,
    ParcelDamageError,
    ParcelGoneError,
    write_at,
    written_or_refused,
)
from posttrain.system import read_untrusted
from posttrain.system.files import Lock

FILE = "file"
NAME, PART = "*.weights", ".*.weights.part"
"""Patterns of the names of whole blocks, such as `3-0f1e2d3c4b5a6978.weights`, and of those that are being written."""


class FolderCarrier:
    """A `parcel.Carrier` for machines that share a folder. RunFolderError where another process sends weights through
    it, or it cannot be written."""

    transport = FILE

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        # The lock first: only its holder may take files that it finds for left over by an earlier sender.
        self._lock = Lock(folder)
        for path in (*self.folder.glob(NAME), *self.folder.glob(PART)):
            path.unlink(missing_ok=True)
        self._held = set[Path]()
        """Files of this sender that are there, under the names that they have."""
        # It holds the set and not the object, so the object can be collected, and it runs at the end of Python too.
        self._finalizer = weakref.finalize(self, _remove_all, self._held, self._lock, os.getpid())

    def begin(self, version: int) -> FolderSink:
        return FolderSink(self._held, self.folder / f"{version}-{secrets.token_hex(8)}.weights", version)

    def remove(self, place: str) -> None:
        path = Path(place)
        if path in self._held:
            self._held.discard(path)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._finalizer()


class FolderSink:
    """A `parcel.Sink`: a file that has a name which no receiver reads until it is whole."""

    def __init__(self, held: set[Path], path: Path, version: int) -> None:
        self._held, self._path, self._version = held, path, version
        self._part = path.with_name(f".{path.name}.part")
        with self._writing():
            self._fd: int | None = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        held.add(self._part)

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        assert self._fd is not None
        with self._writing(tensor):
            write_at(self._fd, data, at)

    def announce(self) -> str:
        """Close the file and give it its name. A network file system reports a full disk only by fsync."""
        assert self._fd is not None
        with self._writing():
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None
            # Both names are held: whenever the process ends, the file is removed under the name that it has.
            self._held.add(self._path)
            os.replace(self._part, self._path)
        self._held.discard(self._part)
        return str(self._path)

    def _writing(self, tensor: str = "") -> AbstractContextManager[None]:
        """Inside, an error of the disk becomes a ParcelWriteError."""
        helps = f"Free some space in {self._path.parent}, or name another folder"
        return written_or_refused(self._version, tensor, helps)

    def drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        for path in (self._part, self._path):
            self._held.discard(path)
            path.unlink(missing_ok=True)


def fetch_file(parcel: Parcel) -> Buffer:
    """The file's bytes. They are copied, because a map of a file dies by a signal when somebody cuts the file."""
    path = Path(parcel.place)
    if not os.path.lexists(path):
        raise ParcelGoneError(
            f"the weights of version {parcel.version} are gone: {parcel.sender} retired {path}, or this machine does"
            " not share its folder. Read a newer version, or name a folder that both machines see"
        )
    most = largest(parcel)
    with read_untrusted.opened(path, ParcelDamageError) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ParcelDamageError(
                f"{path} has {size:,} bytes, and the weights of version {parcel.version} have at most {most:,}. Publish"
                " the weights again"
            )
        return read_all(file.fileno(), size)


def read_all(fd: int, size: int) -> bytearray:
    """The first `size` bytes of a file, fewer where it ends before."""
    block, at = bytearray(size), 0
    with memoryview(block) as room:
        # 0 bytes: somebody has cut the file meanwhile. What is missing is found by `read_block`.
        while count := os.preadv(fd, [room[at:]], at) if at < size else 0:
            at += count
    del block[at:]
    return block


def _remove_all(held: set[Path], lock: Lock, owner: int) -> None:
    """Remove what is left. A process that was forked from the owner leaves the owner's files alone."""
    if os.getpid() == owner:
        for path in held:
            path.unlink(missing_ok=True)
        lock.release()
    held.clear()
