"""An exact digest of weights, to check that the engine serves the same bits that the trainer pushed.

It is integer arithmetic over the raw bits, so device, threads and the order of summation do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.cpu import compile_native
from posttrain.system.errors import InvariantError

ROW = 8192
"""64-bit words of a row. Every row is summed with the same weight vector."""
BLOCK = 64
"""Rows that are summed at once (4 MiB), so that temporaries stay in cache."""


@dataclass(frozen=True)
class Spot:
    """Some rows of every tensor, drawn by a number that both sides know, such as the version.

    It finds a tensor that is of another version. Where only half of a tensor is, it finds that with a probability of
    1 - 2**-rows. It does not find a single wrong word in a row that was not drawn. Each number draws other rows.
    """

    number: int
    one_in: int = 64
    """One row of this many is read, at least one of each tensor; the words after the last full row always are."""

    def rows(self, count: int) -> Tensor:
        """int64, ascending: which of `count` rows are read."""
        # Philox gives the same numbers on every machine, so both sides draw the same rows without sending them.
        draws = np.random.Generator(np.random.Philox(key=self.number))
        drawn = draws.choice(count, -(-count // self.one_in), replace=False) if count else np.empty(0, np.int64)
        return torch.from_numpy(np.sort(drawn))


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest (32 characters) of all names, dtypes, shapes and bits, whatever the order of the iterable.

    One changed word always changes the digest, because its weight is odd and so invertible modulo 2**64. Swapped,
    shifted or stale words change it with a probability above 1 - 2**-32.
    """
    return digest_of(fingerprints(tensors))


def digest_of(digests: Mapping[str, str]) -> str:
    """The fingerprint of tensors, from their digests by name."""
    # By name, because trainer and engine have different orders. The separators keep the borders of names and digests.
    hasher = hashlib.blake2b(digest_size=16)
    for name, digest in sorted(digests.items()):
        hasher.update(f"{name}\x1f{digest}\x1e".encode())
    return hasher.hexdigest()


def fingerprints(tensors: Iterable[tuple[str, Tensor]], spot: Spot | None = None) -> dict[str, str]:
    """The digest of every tensor by name, to find which one is stale. Reads from the device once, at the end. With a
    `spot` the digests are of its rows alone, and equal to those of the same spot only."""
    sums: dict[str, Tensor] = {}
    descriptions: dict[str, str] = {}
    for name, tensor in tensors:
        if name in sums:
            raise InvariantError(f"tensor {name!r} is listed twice: a fingerprint needs every name once")
        # Bits alone would not tell a tensor from its transposed or recast form, nor the rows of one spot from others.
        descriptions[name] = f"{tensor.dtype!s} {tuple(tensor.shape)} {'' if spot is None else spot}"
        sums[name] = _row_sums(tensor, spot)
    if not sums:
        return {}
    # All sums of a device go to the host in one copy. A copy for each tensor would wait for the device each time.
    by_device = {
        device: torch.cat([s for s in sums.values() if s.device == device]).cpu()
        for device in {s.device for s in sums.values()}
    }
    # Each device's sums lie in the order in which its tensors came.
    at = dict.fromkeys(by_device, 0)
    out: dict[str, str] = {}
    for name, s in sums.items():
        rows = by_device[s.device][at[s.device] : at[s.device] + len(s)]
        at[s.device] += len(s)
        out[name] = hashlib.blake2b(descriptions[name].encode() + rows.numpy().tobytes(), digest_size=16).hexdigest()
    return out


def _row_sums(tensor: Tensor, spot: Spot | None) -> Tensor:
    """int64 [2 (rows + 1)]: two weighted sums of the tail's words, then of every full row of words, or the spot's."""
    # `whole` words of 64 bits fill rows of ROW, and less than a row is left as the tail. The body keeps its dtype until
    # it is known to begin at a multiple of 8 bytes; the tail goes through bytes, because its length need not be one.
    raw = tensor.detach().contiguous().view(-1)
    whole = raw.numel() * raw.element_size() // (8 * ROW) * ROW
    in_rows = whole * 8 // raw.element_size()
    body, tail = raw[:in_rows], raw[in_rows:].view(torch.uint8)
    # Zeros fill the last word. They cannot be mistaken for data, because the shape is in the digest.
    padded = torch.zeros((tail.numel() + 7) // 8 * 8, dtype=torch.uint8, device=raw.device)
    padded[: tail.numel()] = tail
    weights = _weights(str(raw.device))
    sums = [_sums(padded.view(torch.int64)[None], weights)]
    if whole:
        # A view as int64 must begin at a multiple of 8 bytes of its storage, and a slice of 16-bit numbers need not.
        body = body if body.storage_offset() * body.element_size() % 8 == 0 else body.clone()
        words = body.view(torch.int64).view(-1, ROW)
        # Rows are picked before they are summed, so a spot reads only its share of the memory.
        words = words if spot is None else words[spot.rows(len(words)).to(words.device)]
        sums += [_sums(block, weights) for block in words.split(BLOCK)]
    return torch.cat(sums)


def _sums(words: Tensor, weights: Tensor) -> Tensor:
    """int64 [R, n <= ROW] -> [2 R]. The second sum is over the high half of each word: in the first one the top bit
    contributes 2**63 whatever its weight, so an even number of flipped signs would cancel."""
    # For a tail the second sum takes the weights from the end of the vector, so that it is no function of the first.
    # For a full row both sums have the same weights.
    rows, n = words.shape
    # The compiled kernels, where there are any, read each word once for both sums. int64 wraps around in both forms, so
    # the bits are the same.
    if words.device.type == "cpu" and not isinstance(kernels := compile_native.find(), str):
        words, out = words.contiguous(), torch.empty(2 * rows, dtype=torch.int64)
        pointers = weights.data_ptr(), weights[ROW - n :].data_ptr()
        kernels.digest_rows(words.data_ptr(), *pointers, out.data_ptr(), rows, n)
        return out
    return torch.cat([_weighted(words, weights[:n]), _weighted(words >> 32, weights[ROW - n :])])


def _weighted(words: Tensor, weights: Tensor) -> Tensor:
    """words @ weights, modulo 2**64. Integer matrix products exist only on CPU, where they are fast.
    The bits are the same."""
    return words.mv(weights) if words.device.type == "cpu" else (words * weights).sum(1)


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """int64 [ROW] of odd pseudo-random weights."""
    # An odd number has an inverse modulo 2**64: no change of a single word is multiplied to 0. Both sides have the key.
    odd = np.random.Generator(np.random.Philox(key=0x706F7374)).integers(0, 2**64, ROW, dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
