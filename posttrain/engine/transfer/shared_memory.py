"""Shared memory of one machine: one block for each version, which its readers map and do not copy.

- A block's name is drawn at random, and only its owner may open it.
- It is written with `pwrite`, so that a full `/dev/shm` is an error and not a signal that kills the process.
- It is removed by `remove`, by `close`, or at the exit of the interpreter. Where the process is killed, the resource
  tracker of `multiprocessing` removes it, since the tracker outlives the process. A tracker that many processes share
  ends only with the last of them. So each new sender also removes the blocks whose owner is gone: an owner holds a lock
  on its blocks, which the kernel releases when it ends.
- A reader maps it by itself. Before Python 3.13 `multiprocessing.shared_memory` registers the block with the reader's
  own tracker, which then removes it although it is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import weakref
from _posixshmem import shm_open, shm_unlink
from multiprocessing import resource_tracker

from posttrain.engine.transfer.parcel import (
    Buffer,
    Parcel,
    ParcelDamageError,
    ParcelGoneError,
    write_at,
    written_or_refused,
)

SHARED = "shared"
PREFIX = "/pt-weights-"
NAME = re.compile(re.escape(PREFIX) + r"[\w-]{16}", re.ASCII)
"""The name of a block: `/pt-weights-` and 16 random characters, such as `/pt-weights-Drmhze6EPcv0fN_8`."""
FOLDER = "/dev/shm"
"""Where Linux lists the blocks. Elsewhere they cannot be listed, and orphans stay until the machine restarts."""
_KIND = "shared_memory"
"""The type of the blocks that the resource tracker removes by name."""


class SharedCarrier:
    """A `parcel.Carrier` for processes of one machine and one user."""

    transport = SHARED

    def __init__(self) -> None:
        remove_orphans()
        self._held: dict[str, int] = {}
        """The locked descriptor of each block that is there, by the block's name."""
        self._finalizer = weakref.finalize(self, _remove_all, self._held, os.getpid())

    def begin(self, version: int) -> SharedSink:
        name, fd = _create()
        self._held[name] = fd
        return SharedSink(self, version, name, fd)

    def remove(self, place: str) -> None:
        if (fd := self._held.pop(place, None)) is not None:
            _remove(place, fd)

    def close(self) -> None:
        self._finalizer()


class SharedSink:
    """A `parcel.Sink`: a new block of memory. Its name is known to others only after `announce`."""

    def __init__(self, carrier: SharedCarrier, version: int, name: str, fd: int) -> None:
        self._carrier, self._version, self._name, self._fd = carrier, version, name, fd

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        helps = f"Give {FOLDER} more memory (docker: --shm-size), or send weights by file"
        with written_or_refused(self._version, tensor, helps):
            write_at(self._fd, data, at)

    def announce(self) -> str:
        return self._name

    def drop(self) -> None:
        self._carrier.remove(self._name)


def fetch_shared(parcel: Parcel) -> Buffer:
    """The block, mapped. It stays readable as long as something refers to it, also when it is removed."""
    if not NAME.fullmatch(parcel.place):
        raise ParcelDamageError(
            f"{parcel.place!r} is no block of weights in shared memory (its name begins with {PREFIX!r}). Use parcels"
            " as they were published"
        )
    try:
        fd = shm_open(parcel.place, os.O_RDONLY, mode=0o600)
    except FileNotFoundError:
        raise ParcelGoneError(
            f"the weights of version {parcel.version} are gone: {parcel.sender} retired them, or died, or"
            " runs on another machine. Read a newer version, or send weights by file where machines differ"
        ) from None
    try:
        size = os.fstat(fd).st_size
        # A private map: what would be written into it never reaches the block. An empty file cannot be mapped.
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else bytearray()
    finally:
        os.close(fd)


def remove_orphans() -> None:
    """Remove the blocks of this user whose sender is gone."""
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        if not NAME.fullmatch(f"/{name}"):
            continue
        try:
            # O_NOFOLLOW: the folder is open to all users, and one could lay a link there under such a name.
            fd = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or removed meanwhile
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                # The lock can be had only of a block without an owner, whose last descriptor has released it.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shm_unlink(f"/{name}")
        except OSError:  # its sender lives, or somebody else removed it first
            pass
        finally:
            os.close(fd)


def _create() -> tuple[str, int]:
    """(name, descriptor) of a new block, locked. The lock says that its owner lives."""
    while True:
        name = PREFIX + secrets.token_urlsafe(12)
        fd = shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        os.set_inheritable(fd, False)
        resource_tracker.register(name, _KIND)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # A block without a name has been removed before it was locked.
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # `remove_orphans` of another process came between the two calls
        resource_tracker.unregister(name, _KIND)


def _remove(name: str, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        shm_unlink(name)
    resource_tracker.unregister(name, _KIND)
    os.close(fd)


def _remove_all(held: dict[str, int], owner: int) -> None:
    """Remove what is left. A process that was forked from the owner leaves the owner's blocks alone."""
    while held:
        name, fd = held.popitem()
        if os.getpid() == owner:
            _remove(name, fd)
