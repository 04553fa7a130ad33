"""Ownership of the blocks of the key-value cache. numpy only; the rows themselves are in `key_value_cache`.

A block is `BLOCK` consecutive rows. A row holds the keys and values of one token. Blocks are shared by reference count.
A block that only the prefix tree owns is spare: a later request may use its content, and it may be evicted at any time.
"""

from __future__ import annotations

import numpy as np

from posttrain.system.errors import InvariantError

BLOCK = 16
"""Rows of a block."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


def rows_of(blocks: np.ndarray) -> np.ndarray:
    """int64 rows of these blocks, in order: [1, 0] with blocks of 2 rows gives [2, 3, 0, 1]."""
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()


class Blocks:
    """A stack of free blocks and a reference count for each. Each call costs O(blocks touched)."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Most blocks that the byte budget allows."""
        self.capacity = 0
        """Blocks that exist."""
        self._count = np.zeros(0, np.int32)
        """Owners of each block."""
        self._cached = np.zeros(0, bool)
        """Whether one of the owners is the prefix tree."""
        self._free = np.zeros(0, np.int64)
        """The stack: its first `free` entries are the blocks without an owner, and the last of these is taken first."""
        self.free = 0

    @property
    def spare(self) -> int:
        """Blocks that only the prefix tree owns."""
        return int(np.count_nonzero(self._cached & (self._count == 1)))

    @property
    def in_use(self) -> int:
        """Blocks that at least one sequence owns a share of."""
        return self.capacity - self.free - self.spare

    def fits(self, n: int) -> bool:
        """Returns whether `n` more blocks can be taken, if spare ones are evicted."""
        # The first test is cheap, and mostly true; `in_use` looks at every block. `most - capacity` do not exist yet.
        return n <= self.free + self.most - self.capacity or n <= self.most - self.in_use

    def owners(self, block: int) -> int:
        """How many own a share of the block: sequences, prompts, and the prefix tree."""
        return int(self._count[block])

    def grow(self, capacity: int) -> None:
        """Add blocks up to `capacity`; the lowest new one is taken first."""
        free = np.empty(capacity, np.int64)
        new = capacity - self.capacity
        # Taken from the end of the stack: blocks that were free before come first, then the new ones from the lowest.
        free[:new] = np.arange(capacity - 1, self.capacity - 1, -1)
        free[new : new + self.free] = self._free[: self.free]
        self._count = np.concatenate([self._count, np.zeros(new, np.int32)])
        self._cached = np.concatenate([self._cached, np.zeros(new, bool)])
        self._free, self.free, self.capacity = free, self.free + new, capacity

    def clear(self) -> None:
        """Forget all blocks: none exists afterwards.

        Raises:
            InvariantError: a block has an owner.
        """
        if self.free != self.capacity:
            raise InvariantError(
                f"{self.capacity - self.free} cache blocks have owners, so the cache cannot be given up: end every turn"
                " and empty the prefix tree first"
            )
        self._count, self._cached, self._free = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.int64)
        self.capacity = self.free = 0

    def take(self, n: int) -> np.ndarray:
        """int64 [n]: blocks that were free. Each now has one owner."""
        if n > self.free:
            raise InvariantError(
                f"{n} cache blocks taken, {self.free} free: the scheduler must make room before it takes"
            )
        taken = self._free[self.free - n : self.free][::-1].copy()
        self.free -= n
        self._count[taken] = 1
        return taken

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of these distinct blocks."""
        self._count[blocks] += 1

    def cache(self, blocks: np.ndarray) -> None:
        """The prefix tree becomes an owner of these distinct blocks."""
        self._count[blocks] += 1
        self._cached[blocks] = True

    def uncache(self, blocks: np.ndarray) -> None:
        """The prefix tree gives up these distinct blocks."""
        self._cached[blocks] = False
        self.release(blocks)

    def release(self, blocks: np.ndarray) -> None:
        """One owner fewer for each. Blocks without an owner are free. A block may be listed more than once."""
        # `at`, because a plain -= counts a repeated block once.
        np.subtract.at(self._count, blocks, 1)
        owners_left = self._count[blocks]
        if owners_left.min(initial=1) > 0:
            return
        if owners_left.min() < 0:
            raise InvariantError("a cache block was released more often than it was owned")
        free = np.unique(blocks[owners_left == 0])
        self._free[self.free : self.free + len(free)] = free
        self.free += len(free)
