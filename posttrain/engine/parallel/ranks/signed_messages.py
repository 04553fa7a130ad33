"""Signs what ranks send each other as pickles: a pickle may call any function, and whoever reaches the ports of
torch.distributed could send one. Only what somebody with the key of these ranks wrote is read as a pickle."""

from __future__ import annotations

import hmac
import io
import os
import pickle
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from posttrain.record.provenance import notes_folder
from posttrain.system.errors import ConfigError, EngineError

VARIABLE = "POSTTRAIN_RANKS_KEY"
"""The environment variable that may hold the key of ranks that somebody else starts."""
FILE = "ranks.key"
SHORTEST = 32
"""Bytes of a key at least."""
SIGNED = 32
"""Bytes of a signature (HMAC-SHA256)."""


def fresh_key() -> bytes:
    """A key for the ranks of one run."""
    return secrets.token_hex(SHORTEST).encode()


def users_key() -> bytes:
    """The key of ranks that torchrun or others start: of `POSTTRAIN_RANKS_KEY`, or of a private file in the user's
    home, which the first rank makes. ConfigError where the key is too short, or no file can be made."""
    try:
        key = os.environ.get(VARIABLE, "").encode() or _key_of_file(notes_folder().parent / FILE)
        if len(key) < SHORTEST:
            raise PermissionError(f"this one has {len(key)} characters")
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"ranks need a key that nobody else can read, and {error}. Set {VARIABLE} to the same characters on all"
            f" machines, drawn at random, at least {SHORTEST} of them"
        ) from error
    return key


def _key_of_file(path: Path) -> bytes:
    """The key in a file, which is made where it is not there. PermissionError where others can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # Written beside under another name and linked when it is whole: several ranks may start at once, the first link
        # wins, and the others read that file. No rank ever reads half a key.
        with tempfile.NamedTemporaryFile(dir=path.parent) as part, suppress(FileExistsError):
            part.write(fresh_key())
            part.flush()
            os.link(part.name, path)
    # Checked on the open file, so that it cannot be exchanged. A link is not followed, and a pipe does not block.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not a file that this user alone can read (chmod 600)")
        return file.read(4096).strip()


@contextmanager
def signed(key: bytes) -> Iterator[None]:
    """Inside, torch.distributed signs each pickle that it sends, and reads none without the signature of this key.

    Raises:
        EngineError: torch does not write pickles as this expects.
    """
    # torch has no setting for this: all its exchanges of Python objects go through these two names.
    before: Any = c10d._pickler, c10d._unpickler  # pyright: ignore[reportPrivateUsage]
    ours: Any = partial(_Writer, key), partial(_Reader, key)
    c10d._pickler, c10d._unpickler = ours  # pyright: ignore[reportPrivateUsage]
    try:
        # A trial, because the names are private: without it pickles might go unsigned without a word.
        written, _ = c10d._object_to_tensor(None, torch.device("cpu"), None)  # pyright: ignore[reportPrivateUsage]
        if bytes(written.numpy())[:SIGNED] != _signature(key, bytes(written.numpy())[SIGNED:]):
            raise EngineError(f"torch {torch.__version__} does not sign what ranks send each other: take torch 2.13")
        yield
    finally:
        c10d._pickler, c10d._unpickler = before  # pyright: ignore[reportPrivateUsage]


class _Writer:
    """Stands in place of torch's pickler: writes the signature of a pickle, then the pickle."""

    def __init__(self, key: bytes, file: io.BytesIO) -> None:
        self._key, self._file = key, file

    def dump(self, value: Any) -> None:
        # Room for the signature first, so that the pickle is written once and not copied behind it.
        self._file.write(bytes(SIGNED))
        pickle.Pickler(self._file, pickle.HIGHEST_PROTOCOL).dump(value)
        with self._file.getbuffer() as data:
            data[:SIGNED] = _signature(self._key, data[SIGNED:])


class _Reader(_Writer):
    """Stands in place of torch's unpickler, with a key and a file too. EngineError where the signature is wrong."""

    def load(self) -> Any:
        with self._file.getbuffer() as data:
            # The signature is checked over all bytes before the unpickler sees the first of them. compare_digest takes
            # the same time wherever the bytes differ, so that timing tells nothing about the right signature.
            genuine = hmac.compare_digest(data[:SIGNED], _signature(self._key, data[SIGNED:]))
        if not genuine:
            raise EngineError(
                "what came from another rank was not signed with the key of these ranks, so it was not read. Somebody"
                f" else reached their ports, or machines have different keys: give all of them one {VARIABLE} (at least"
                f" {SHORTEST} characters), or one home"
            )
        self._file.seek(SIGNED)
        return pickle.load(self._file)


def _signature(key: bytes, data: Any) -> bytes:
    return hmac.digest(key, data, "sha256")
