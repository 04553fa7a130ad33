"""A parcel: what one push of weights holds and where it lies; the protocols of who handles it, and their errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from posttrain.engine.files.fingerprint import Spot, digest_of
from posttrain.system.errors import EngineError

Buffer = Any
"""Bytes that can be written to: a bytearray or a private map of a file."""


@dataclass(frozen=True)
class ParcelEntry:
    """One tensor of a parcel."""

    name: str
    dtype: str
    """Such as `bfloat16`: what is served, after the cast."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the block at which its bytes begin."""
    checksum: str
    """Digest of the tensor as it is served (`engine.files.fingerprint.fingerprints`), whatever the coding. Where the
    parcel is not `audited`, the digest covers only some of its rows."""
    coding: str = "whole"
    """How the bytes are to be read: `whole`: they are the tensor's own; else by a coding of `delta`."""
    size: int = 0
    """Bytes in the block."""


@dataclass(frozen=True)
class Parcel:
    """All tensors of one version, as the sender announces them. It can be pickled: the weights lie elsewhere."""

    version: int
    base: int | None
    """The version that the receiver must hold, where this one has only what changed since; None: all is here."""
    transport: str
    """`shared`, `file` or `collective`."""
    place: str
    """The name of the block of memory, the path of the file, or the address and number of a broadcast."""
    entries: tuple[ParcelEntry, ...]
    sender: str = ""
    """The writer of the parcel, for errors: process and machine."""
    base_digest: str = ""
    followed: bool = False
    """Whether deltas against this version may follow. If so, a receiver keeps the tensors that it read."""
    audited: bool = True
    """Whether checksums cover every bit, and not only the rows of `spot`."""

    @property
    def spot(self) -> Spot | None:
        """The rows that the checksums cover; None: everything."""
        return None if self.audited else Spot(self.version)

    @property
    def digest(self) -> str:
        """The digest of all checksums. For an audited parcel it is the `fingerprint` of the tensors as served."""
        return digest_of({e.name: e.checksum for e in self.entries})

    @property
    def size(self) -> int:
        """Bytes that travel, without the table of entries."""
        return sum(e.size for e in self.entries)


class WeightSender(Protocol):
    """The learner's side; see `sender.ParcelSender`."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Parcel: ...
    def whole(self, version: int) -> Parcel: ...
    def retire(self, version: int) -> None: ...
    def clock(self) -> Mapping[str, float]: ...
    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine's side; see `receiver.ParcelReceiver`."""

    def read(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]: ...


class Sink(Protocol):
    """A block that is being written, until `announce` makes it readable at once and returns its place, or `drop`
    removes it. `write` raises ParcelWriteError, which names the tensor, where there is no room."""

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None: ...
    def announce(self) -> str: ...
    def drop(self) -> None: ...


class Carrier(Protocol):
    """The sender's side of a transport. `begin` makes a new block, `remove` removes an announced one, `close` all."""

    @property
    def transport(self) -> str: ...
    def begin(self, version: int) -> Sink: ...
    def remove(self, place: str) -> None: ...
    def close(self) -> None: ...


Fetch = Callable[[Parcel], Buffer]
"""The receiver's side of a transport: the bytes of the block. ParcelGoneError where there is none."""


class ParcelError(EngineError):
    """Weights did not arrive as they were sent. The message names version, other side and tensor. Exit code 6."""


class ParcelDamageError(ParcelError):
    """The bytes are not those that were sent: a checksum, a size, a header is wrong."""


class ParcelGoneError(ParcelError):
    """The parcel was retired before it was read, or its sender died. A newer one can be read."""


class ParcelBaseError(ParcelError):
    """A delta against weights that this receiver does not hold. The sender's `whole(version)` is the answer."""


class ParcelOrderError(ParcelError):
    """A version older than one that was published, or read, before."""


class ParcelTimeoutError(ParcelError):
    """The other side did not come in time."""


class ParcelWriteError(ParcelError):
    """The parcel could not be written, mostly because there is no room."""


def write_at(fd: int, data: memoryview | bytes, at: int) -> None:
    """Write all of the data at a place of a file, in as many pieces as the kernel needs."""
    # pwrite takes at most about 2 GiB at once on Linux.
    remaining = memoryview(data)
    while len(remaining):
        done = os.pwrite(fd, remaining, at)
        remaining, at = remaining[done:], at + done


@contextmanager
def written_or_refused(version: int, tensor: str, helps: str) -> Iterator[None]:
    """ParcelWriteError where what is written inside cannot be. `helps` says what helps."""
    try:
        yield
    except OSError as problem:
        raise ParcelWriteError(
            f"weights of version {version}: {tensor or 'the table'!r} could not be written ({problem.strerror})."
            f" {helps}"
        ) from problem
