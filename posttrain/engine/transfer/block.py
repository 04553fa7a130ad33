"""The bytes of a parcel, the same in memory, in a file and on the wire.

    byte 0     head, 64 bytes: magic, version, where the table begins, its size, its digest
    byte 64    the tensors, each beginning at a multiple of 64
    then       the table: the parcel's fields and entries, as JSON

The head is written last. So a block that was not finished has no magic, and is refused.

A block may come from somebody else. Every size, dtype, shape and offset is checked against the block's own size before
any tensor is made of it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from posttrain.engine.transfer.parcel import Buffer, Parcel, ParcelDamageError, ParcelEntry
from posttrain.system import read_untrusted

HEAD = struct.Struct("<8sqQQ16s16x")
"""Magic, version, start of the table, its size, its blake2b."""
MAGIC = b"ptparcl1"
ALIGN = 64
"""A tensor begins at a multiple of this many bytes."""
LARGEST_TABLE = 64 * read_untrusted.MiB
"""Most bytes of a table: room for about 300,000 tensors."""
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
WHOLE = "whole"
"""The coding of a tensor whose own bytes are sent. All other codings are those of `delta`."""


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    # Through uint8, because numpy has no bfloat16 and no float8.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def aligned(at: int) -> int:
    """The next place at which a tensor may begin."""
    return -(-at // ALIGN) * ALIGN


def tensor_of(block: Buffer, entry: ParcelEntry, offset: int | None = None) -> Tensor:
    """The tensor whose own bytes lie at `offset` (default: the entry's), without a copy."""
    count, dtype = prod(entry.shape), DTYPES[entry.dtype]
    # torch.frombuffer refuses an empty tensor.
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    at = entry.offset if offset is None else offset
    return torch.frombuffer(block, dtype=dtype, count=count, offset=at).reshape(entry.shape)


def largest(parcel: Parcel) -> int:
    """Most bytes that the block of this parcel can have."""
    # A receiver knows this from the parcel before it has the block, and takes no more memory than that.
    return aligned(max((e.offset + e.size for e in parcel.entries), default=HEAD.size)) + LARGEST_TABLE


def table_bytes(parcel: Parcel) -> bytes:
    """The table: everything of the parcel but where it lies."""
    rows = [[e.name, e.dtype, list(e.shape), e.offset, e.checksum, e.coding, e.size] for e in parcel.entries]
    about = {
        "version": parcel.version,
        "base": parcel.base,
        "base_digest": parcel.base_digest,
        "sender": parcel.sender,
        "followed": parcel.followed,
        "audited": parcel.audited,
        "entries": rows,
    }
    return json.dumps(about, separators=(",", ":")).encode()


def head_bytes(version: int, at: int, table: bytes) -> bytes:
    """The head of a block whose table begins at byte `at`."""
    return HEAD.pack(MAGIC, version, at, len(table), hashlib.blake2b(table, digest_size=16).digest())


def read_block(block: Buffer, transport: str, place: str) -> Parcel:
    """The parcel that a block holds. ParcelDamageError where it is not finished, is no block, or is damaged."""

    def refuse(why: str) -> ParcelDamageError:
        return ParcelDamageError(f"the block of weights at {place} cannot be read: {why}. Publish the weights again")

    if len(block) < HEAD.size:
        raise refuse(f"it has {len(block)} bytes, fewer than a head")
    # First the sizes, by which alone bytes are read; then the digest, so that damage is not parsed; then the table.
    magic, version, at, size, digest = HEAD.unpack(bytes(block[: HEAD.size]))
    if magic != MAGIC:
        raise refuse("it was not finished, or is no block of weights")
    if size > LARGEST_TABLE or at < HEAD.size or at + size > len(block):
        raise refuse(f"its table of {size:,} bytes at {at:,} does not lie within {len(block):,} bytes")
    table = bytes(block[at : at + size])
    if hashlib.blake2b(table, digest_size=16).digest() != digest:
        raise refuse("its table is damaged")
    about = read_untrusted.parse_object(table, f"the table of {place}", ParcelDamageError)
    try:
        parcel = _parcel(about, transport, place)
    except (KeyError, TypeError, ValueError) as problem:
        raise refuse(f"its table is not one of weights ({problem!r})") from problem
    if parcel.version != version:
        raise refuse(f"its head says version {version}, its table version {parcel.version}")
    check_entries(parcel, at, refuse)
    return parcel


def _parcel(about: dict[str, Any], transport: str, place: str) -> Parcel:
    """The parcel of a table. KeyError, TypeError or ValueError where a field is missing or of another type."""
    entries = tuple(ParcelEntry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in about["entries"])
    for e in entries:
        texts, numbers = (e.name, e.dtype, e.checksum, e.coding), (*e.shape, e.offset, e.size)
        # `type(x) is int`, because JSON's true is an int in Python.
        if not all(isinstance(x, str) for x in texts) or not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError(f"an entry holds something else than texts and numbers from 0: {e!r:.200}")
    version, base = about["version"], about["base"]
    if type(version) is not int or not (base is None or type(base) is int):
        raise ValueError("a version is no number")
    texts = (about["sender"], about["base_digest"])
    if not all(isinstance(x, str) for x in texts):
        raise ValueError("a name is no text")
    followed, audited = about["followed"] is True, about["audited"] is True
    return Parcel(version, base, transport, place, entries, *texts, followed=followed, audited=audited)


def check_entries(parcel: Parcel, end: int, refuse: Callable[..., ParcelDamageError]) -> None:
    """Refuse names that come twice, unknown dtypes, wrong sizes, and bytes that overlap or lie outside of [64, end)."""
    names = {e.name for e in parcel.entries}
    if len(names) != len(parcel.entries):
        raise refuse("a name is listed twice")
    for e in parcel.entries:
        if e.dtype not in DTYPES:
            raise refuse(f"tensor {e.name!r} is said to be of dtype {e.dtype!r}")
        full = prod(e.shape) * DTYPES[e.dtype].itemsize
        if e.coding == WHOLE and e.size != full:
            raise refuse(f"tensor {e.name!r} of {e.dtype} {e.shape} has {e.size:,} bytes instead of {full:,}")
        if e.coding != WHOLE and parcel.base is None:
            raise refuse(f"tensor {e.name!r} is coded as {e.coding!r}, and no base is named")
        if e.offset < HEAD.size or e.offset % ALIGN or e.offset + e.size > end:
            raise refuse(f"tensor {e.name!r} at {e.offset:,} does not lie within the block")
    # In the order of their places only neighbours can overlap.
    placed = sorted((e for e in parcel.entries if e.size), key=lambda e: e.offset)
    for a, b in pairwise(placed):
        if a.offset + a.size > b.offset:
            raise refuse(f"tensors {a.name!r} and {b.name!r} share bytes")
