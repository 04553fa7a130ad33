"""Lossless deltas of tensors: which elements changed since the base, and by how much, as integers.

The bits of both tensors are read as integers of the dtype's width. An optimizer step moves a served weight by few
units in the last place, so the differences of changed elements are small integers of either sign. They are written as
2 |d| - (d < 0), which is small for small d. Where at most a quarter of the elements changed, only these are written,
each with its gap: the number of unchanged elements before it. Differences and gaps are cut into planes: first the
lowest byte of all numbers, then the next, ... The high planes are zero almost everywhere. All are one stream of zlib.

    same     nothing changed: no bytes
    sparse   count (8 bytes), then the stream of gaps (int32) and differences
    dense    the stream of the differences of all elements
    whole    the tensor's own bytes, where no other coding is smaller

Applying a delta is integer arithmetic modulo 2**bits, so the result is exact whatever the numbers are, NaN included.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.transfer.block import WHOLE, raw

SAME, SPARSE, DENSE = "same", "sparse", "dense"
COUNT = struct.Struct("<Q")
FEW = 0.25
"""Share of changed elements above which the places cost more than the zeros between them."""
WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
"""By the bytes of one element: the integer dtype of that width."""


def encode(new: Tensor, old: Tensor | None) -> tuple[str, memoryview | bytes]:
    """(coding, bytes) of `new`, a contiguous CPU tensor, against `old`. A tensor is sent whole where `old` is None,
    or of another dtype or shape."""
    whole = WHOLE, raw(new)
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape) or not new.numel():
        return whole
    # Compared as bits: NaN would differ from itself, and -0.0 would equal 0.0.
    a, b = _words(new), _words(old)
    changed = np.flatnonzero(a != b)
    if not len(changed):
        return SAME, b""
    # Gaps are written as int32.
    if len(changed) <= FEW * len(a) and len(a) < 2**31:
        # changed [n], ascending. A gap is the number of unchanged elements between two changed ones.
        gaps = np.diff(changed, prepend=-1).astype(np.int32) - 1
        coded = SPARSE, COUNT.pack(len(changed)) + _squeeze(gaps, _folded(a[changed] - b[changed]))
    else:
        # The subtraction wraps around, and so does the addition in `decode`.
        coded = DENSE, _squeeze(_folded(a - b))
    return coded if len(coded[1]) < new.nbytes else whole


def decode(coding: str, data: memoryview, old: Tensor) -> Tensor:
    """The new tensor. `old` is left as it is; with `same` it is returned. ValueError where the bytes are no delta of a
    tensor of this size."""
    if coding == SAME:
        if len(data):
            raise ValueError(f"a tensor that is the same has no bytes, and {len(data)} came")
        return old
    b = _words(old)
    if coding == DENSE:
        (steps,) = _unsqueeze(data, (b.dtype, len(b)))
        return _tensor(b + _unfolded(steps), old)
    if coding != SPARSE:
        raise ValueError(f"no coding is called {coding!r}")
    if len(data) < COUNT.size:
        raise ValueError("it ends within the count of changed elements")
    (count,) = COUNT.unpack(data[: COUNT.size])
    # The count decides how much memory the stream may take, so it is checked first.
    if count > len(b):
        raise ValueError(f"it changes {count:,} elements, and there are {len(b):,}")
    gaps, steps = _unsqueeze(data[COUNT.size :], (np.dtype(np.int32), count), (b.dtype, count))
    # The inverse of the gaps. Without a negative one the places ascend, so the last one tells whether all lie inside,
    # and none comes twice, which `+=` below would lose.
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and (int(gaps.min()) < 0 or int(places[-1]) >= len(b)):
        raise ValueError("it changes elements outside of the tensor")
    out = b.copy()
    out[places] += _unfolded(steps)
    return _tensor(out, old)


def _words(tensor: Tensor) -> np.ndarray:
    """Its bits as integers [numel], without a copy."""
    return np.frombuffer(raw(tensor), WORDS[tensor.element_size()]) if tensor.numel() else np.empty(0, np.int8)


def _tensor(words: np.ndarray, like: Tensor) -> Tensor:
    """The inverse of `_words`: a tensor of the dtype and shape of `like`."""
    return torch.from_numpy(words).view(like.dtype).reshape(like.shape)


def _folded(d: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
    # The right shift keeps the sign: all ones for a negative number, which turns its other bits around.
    return (d << 1) ^ (d >> (8 * d.itemsize - 1))


def _unfolded(z: np.ndarray) -> np.ndarray:
    """The inverse of `_folded`."""
    # Unsigned, so that the shift to the right brings in a zero.
    unsigned = z.view(f"u{z.itemsize}")
    return (unsigned >> 1).view(z.dtype) ^ -(z & 1)


def _squeeze(*numbers: np.ndarray) -> bytes:
    """All planes of these numbers, as one stream. Only run lengths and Huffman codes are used: looking for longer
    matches takes several times as long, and saves next to nothing on such planes."""
    # Level 1, memory 9. -15: a bare stream without zlib's own checksum, since the tensor's digest is checked.
    stream = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    parts: list[bytes] = []
    for x in numbers:
        # [elements, bytes of one]: column i is the plane of byte i, the lowest first.
        planes = x.view(np.uint8).reshape(-1, x.itemsize)
        parts += [stream.compress(np.ascontiguousarray(planes[:, i]).data) for i in range(x.itemsize)]
    return b"".join([*parts, stream.flush()])


def _unsqueeze(data: memoryview, *pairs: tuple[np.dtype, int]) -> list[np.ndarray]:
    """The numbers of a stream, for each (dtype, count). No more bytes are made than were asked for."""
    size = sum(d.itemsize * n for d, n in pairs)
    stream = zlib.decompressobj(-15)
    try:
        # One byte more than is wanted: so a stream that holds more is seen, and never unpacked whole.
        unpacked = stream.decompress(data, size + 1)
    except zlib.error as problem:
        raise ValueError(f"its stream is damaged ({problem})") from problem
    if len(unpacked) != size or not stream.eof:
        raise ValueError(f"its stream does not hold the {size:,} bytes that it should")
    out, at = list[np.ndarray](), 0
    for dtype, count in pairs:
        planes = np.frombuffer(unpacked, np.uint8, dtype.itemsize * count, at).reshape(dtype.itemsize, count)
        out.append(np.ascontiguousarray(planes.T).view(dtype).reshape(-1))
        at += planes.size
    return out
