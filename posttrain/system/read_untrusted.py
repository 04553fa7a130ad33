"""Reads files that somebody else may have made: with a limit of size, without waiting, with errors of posttrain's own.

Reading a pipe or a device in place of a file could hang or never end. A huge file would exhaust memory, and deeply
nested JSON the stack.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.system.errors import PosttrainError

MiB = 1 << 20


@contextmanager
def opened(path: Path, error: type[PosttrainError]) -> Generator[BinaryIO]:
    """A regular file, open for reading. Raises `error` for anything else, such as a pipe, without waiting."""
    try:
        # Checked twice. Before opening, since even opening a device can have effects. And on the open file, since the
        # file may have been replaced in between.
        require_regular(path, os.stat(path), error)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            require_regular(path, os.fstat(handle), error)
            yield file
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem


def require_regular(path: Path, status: os.stat_result, error: type[PosttrainError]) -> None:
    """Raises `error` where there is something else than a regular file, and names what it is."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise error(f"{path} is {kind}, and a file is wanted there")


def private(path: Path, kind: Callable[[int], bool]) -> bool:
    """Returns whether a file or folder belongs to this user, and nobody else may write it. `kind`: `stat.S_ISREG` or
    `stat.S_ISDIR`; a link is none of the two."""
    status = path.lstat()
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def read_bytes(path: Path, most: int, error: type[PosttrainError]) -> bytes:
    """The whole file; `error` where it has more than `most` bytes, which are then not read."""
    with opened(path, error) as file:
        # The size is only a hint: files of /proc have 0, and a file may grow while it is read.
        size = os.fstat(file.fileno()).st_size
        data = bytearray()
        while size <= most and len(data) <= most:  # `read` allocates at once what is asked for
            # Reading one byte more than allowed is enough to know that the file is too large.
            if not (piece := file.read(min(max(size - len(data), 1 << 16), most - len(data)) + 1)):
                break
            data += piece
        if size > most or len(data) > most:
            raise error(f"{path} has {max(size, len(data)):,} bytes; at most {most:,} are read there")
        return bytes(data)


def read_lines(path: Path, most: int, error: type[PosttrainError]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end) one at a time; `error` with file and line for more than `most` bytes."""
    with opened(path, error) as file:
        number = 0
        # A line is never read further than to its limit, however long it is.
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise error(
                    f"{path}:{number}: the line has more than {most:,} bytes, and no more are read; shorten it or leave"
                    " it out"
                )
            yield number, line


def parse(data: bytes | str, place: str, error: type[PosttrainError]) -> Any:
    """The parsed JSON. `error` with the place where it is none, nested too deeply, or has a number too long to read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise error(f"{place} is damaged: its lists and objects are nested too deeply to be read") from None
    except ValueError as problem:
        raise error(f"{place} is damaged: {problem}") from problem


def parse_object(data: bytes | str, place: str, error: type[PosttrainError]) -> dict[str, Any]:
    """Like `parse`, for JSON that must be an object."""
    parsed = parse(data, place, error)
    if not isinstance(parsed, dict):
        raise error(f"{place} is damaged: an object is wanted there, and it holds {type(parsed).__name__}")
    return cast("dict[str, Any]", parsed)
