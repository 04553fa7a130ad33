"""Who owns which block of the key-value cache. numpy only; the rows themselves are in `cache`.

A block is `BLOCK` consecutive rows, row r holding keys and values of one token. Blocks are shared by reference count.
"""

from __future__ import annotations

import numpy as np

from posttrain.core.errors import InvariantError

BLOCK = 16
"""Rows of a block."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


def rows_of(blocks: np.ndarray) -> np.ndarray:
    """int64 rows of these blocks, in order: [1, 0] with blocks of 2 rows gives [2, 3, 0, 1]."""
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()


class Blocks:
    """A stack of free blocks and a reference count for each; take, share and release cost O(blocks touched)."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Blocks the byte budget allows."""
        self.capacity = 0
        """Blocks that exist."""
        self._count = np.zeros(0, np.int32)
        self._free = np.zeros(0, np.int64)
        self._n_free = 0

    @property
    def in_use(self) -> int:
        return self.capacity - self._n_free

    def short(self, n: int) -> int:
        """Capacity needed before `n` more blocks can be taken, at least doubled; 0 where there is room."""
        if n <= self._n_free:
            return 0
        need = self.in_use + n
        if need > self.most:
            raise InvariantError(f"{need} cache blocks needed, {self.most} allowed: admission must reserve before it admits")
        return min(self.most, max(need, 2 * self.capacity))

    def grow(self, capacity: int) -> None:
        """Add blocks up to `capacity`; the lowest new one is taken first."""
        free = np.empty(capacity, np.int64)
        new = capacity - self.capacity
        free[:new] = np.arange(capacity - 1, self.capacity - 1, -1)
        free[new : new + self._n_free] = self._free[: self._n_free]
        self._count = np.concatenate([self._count, np.zeros(new, np.int32)])
        self._free, self._n_free, self.capacity = free, self._n_free + new, capacity

    def take(self, n: int) -> np.ndarray:
        """int64 [n]: blocks nobody owned, each now owned once."""
        if n > self._n_free:
            raise InvariantError(f"{n} cache blocks taken, {self._n_free} free")
        taken = self._free[self._n_free - n : self._n_free][::-1].copy()
        self._n_free -= n
        self._count[taken] = 1
        return taken

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of these distinct blocks."""
        self._count[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """One owner fewer for each; blocks without owner are free. A block may be listed more than once."""
        np.subtract.at(self._count, blocks, 1)
        if np.any(self._count[blocks] < 0):
            raise InvariantError("a cache block was released more often than it was owned")
        free = np.unique(blocks[self._count[blocks] == 0])
        self._free[self._n_free : self._n_free + len(free)] = free
        self._n_free += len(free)
