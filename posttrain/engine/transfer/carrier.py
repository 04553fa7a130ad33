"""The place of the bytes of a parcel: the port that each transport implements, and the code that transports with a file
share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from posttrain.engine.transfer.block import Buffer
from posttrain.engine.transfer.parcel import Parcel, ParcelWriteError


class Sink(Protocol):
    """A block that is being written. Nobody else knows of it before `announce`."""

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        """Put bytes at a place of the block. ParcelWriteError, which names the tensor, where there is no room."""
        ...

    def announce(self) -> str:
        """Make the whole block readable at once; returns its place."""
        ...

    def drop(self) -> None:
        """Remove the block that was begun."""
        ...


class Carrier(Protocol):
    """The sender's side of a transport."""

    @property
    def transport(self) -> str:
        """See `Parcel.transport`."""
        ...

    def begin(self, version: int) -> Sink:
        """A new block."""
        ...

    def remove(self, place: str) -> None:
        """Remove a block that was announced."""
        ...

    def close(self) -> None:
        """Remove all blocks."""
        ...


Fetch = Callable[[Parcel], Buffer]
"""The receiver's side of a transport: the bytes of the block. ParcelGoneError where there is none."""


def write_at(fd: int, data: memoryview | bytes, at: int) -> None:
    """Write all of it at a place of a file, whatever the kernel takes at once."""
    left = memoryview(data)
    while len(left):
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


@contextmanager
def written_or_refused(version: int, tensor: str, helps: str) -> Iterator[None]:
    """ParcelWriteError where what is written inside cannot be. `helps` says what helps."""
    try:
        yield
    except OSError as problem:
        raise ParcelWriteError(
            f"weights of version {version}: {tensor or 'the table'!r} could not be written ({problem.strerror})."
            f" {helps}",
            version=version,
            tensor=tensor,
        ) from problem
