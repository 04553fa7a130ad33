"""The prefix tree: which cached blocks hold which beginnings of sequences.

An edge is the tokens of one block. A node is the block that holds their keys and values, computed after all tokens
above it. Inner nodes are full; a leaf may be partial, so that an episode's next turn finds all of its last one. A
sequence that leaves a cached one inside a block copies the rows before it. The roots are weight versions, so blocks of
other weights are never found. The least recently used blocks are evicted first, and a leaf before its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from posttrain.engine.embedded.cache.cache_blocks import BLOCK, Blocks

LOOKED_AT = 64
"""Most blocks below one node that are compared with a sequence."""
EVICT_BLOCKS = 64
"""Fewest blocks that are evicted at once, so that the search for them is rare."""


@dataclass(eq=False, slots=True)
class _Node:
    """One block of the tree, below its parent."""

    edge: tuple[int, bytes]
    """(serial of the parent, token ids of the block)"""
    serial: int
    """Its number in the order of insertion, never used twice. Edges name their parent by it."""
    block: int
    parent: _Node | None
    children: int = 0


@dataclass(frozen=True, eq=False)
class Match:
    """The cached beginning of a sequence: whole blocks (int64), then `extra` rows at the start of block `tail`."""

    blocks: np.ndarray
    tail: int = -1  # no block
    extra: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the sequence whose keys and values are cached."""
        return len(self.blocks) * BLOCK + self.extra


class PrefixTree:
    """Owns one share of every block in it. `version`: of the weights that compute what is cached from now on."""

    def __init__(self, blocks: Blocks, version: int) -> None:
        self._blocks = blocks
        self._nodes: dict[tuple[int, bytes], _Node] = {}
        self._below: dict[tuple[int, int], list[_Node]] = {}
        """By (serial of the parent, first token), in the order in which they came."""
        self._order: OrderedDict[int, _Node] = OrderedDict()
        """By serial, least recently used first."""
        self._serial = 0
        # Below 0, so never the serial of a node, and another one for each version: nothing old can be found.
        self._root = -1 - version

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._nodes)

    def match(self, ids: np.ndarray, most: int) -> Match:
        """The longest cached beginning of int32 `ids`, at most `most` tokens of it."""
        if not self._nodes:
            return Match(np.zeros(0, np.int64))
        # Whole blocks, then the best partly equal one. Its rows are copied, since two sequences write behind them.
        path, last_serial = self._walk(ids, most // BLOCK)
        done = len(path) * BLOCK
        partial = self._partial_match(last_serial, ids[done : min(most, done + BLOCK)])
        blocks = np.array([n.block for n in path], np.int64)
        if partial is None:
            self._touch(path)
            return Match(blocks)
        node, extra = partial
        self._touch([*path, node])
        return Match(blocks, node.block, extra)

    def _partial_match(self, last_serial: int, wanted: np.ndarray) -> tuple[_Node, int] | None:
        """(the block below node `last_serial` that begins with most tokens of `wanted`, how many these are); None where
        no block begins with the first of them.

        A sequence that leaves a cached one inside a block need not compute the tokens before that place again. Only the
        newest `LOOKED_AT` blocks are compared.
        """
        best: tuple[_Node, int] | None = None
        for node in self._below.get((last_serial, int(wanted[0])), ())[-LOOKED_AT:] if len(wanted) else ():
            tokens = np.frombuffer(node.edge[1], np.int32)[: len(wanted)]
            differing = np.flatnonzero(tokens != wanted[: len(tokens)])
            same = int(differing[0]) if len(differing) else len(tokens)
            if best is None or same >= best[1]:  # of equal ones the newest, which stands last
                best = node, same
        return best

    def insert(self, ids: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Add a sequence: `blocks` hold the keys and values of all of `ids`. The tree becomes an owner of new ones.
        Returns int64, like `blocks`: the blocks in which the tree has `ids`. A caller that keeps blocks must keep
        these: a block with a child cannot be evicted, so it must not be spare while a caller holds the child."""
        # Two requests may have computed the same block at once. The tree keeps the first, and the caller takes that one
        # over and gives its own up (`Scheduler._take_over`): so no spare block lies above one that is in use.
        path, last_serial = self._walk(ids, len(ids) // BLOCK)
        new: list[int] = []
        for i in range(len(path), len(blocks)):
            # The last edge may be shorter than a block. `_partial_match` alone finds it.
            edge = (last_serial, ids[i * BLOCK : (i + 1) * BLOCK].tobytes())
            node = self._nodes.get(edge)
            if node is None:
                parent = path[-1] if path else None
                node = _Node(edge, self._serial, int(blocks[i]), parent)
                self._serial += 1
                if parent is not None:
                    parent.children += 1
                self._nodes[edge] = self._order[node.serial] = node  # type: ignore[assignment]
                self._below.setdefault((last_serial, int(ids[i * BLOCK])), []).append(node)
                new.append(node.block)
            path.append(node)
            last_serial = node.serial
        if new:
            self._blocks.cache(np.array(new, np.int64))
        self._touch(path)
        return np.array([n.block for n in path], np.int64)

    def evict(self, n: int) -> int:
        """Free up to `n` blocks that only the tree owns, least recently used first. Returns how many."""
        # `_order` has a child before its parent wherever both were used last together (`_touch`), so one walk frees
        # whole branches from their leaves: the child's removal has made the parent a leaf by the time it is reached.
        # Gathered first: a dictionary may not lose entries while it is walked over.
        gone: list[_Node] = []
        for node in self._order.values():
            if len(gone) >= n:
                break
            if not node.children and self._blocks.owners(node.block) == 1:
                gone.append(node)
                if node.parent is not None:
                    node.parent.children -= 1
        for node in gone:
            del self._nodes[node.edge], self._order[node.serial]
            self._forget(node)
        if gone:
            self._blocks.uncache(np.array([g.block for g in gone], np.int64))
        return len(gone)

    def renew(self, version: int) -> None:
        """Empty the tree. Blocks inserted from now on were computed by `version`."""
        if self._nodes:
            self._blocks.uncache(np.array([n.block for n in self._nodes.values()], np.int64))
        self._nodes.clear()
        self._below.clear()
        self._order.clear()
        self._root = -1 - version

    def _forget(self, node: _Node) -> None:
        """Take an evicted node from the list of its siblings."""
        key = (node.edge[0], int(np.frombuffer(node.edge[1], np.int32)[0]))
        self._below[key].remove(node)
        if not self._below[key]:
            del self._below[key]

    def _walk(self, ids: np.ndarray, most: int) -> tuple[list[_Node], int]:
        """(nodes of the cached full blocks of `ids`, at most `most`; serial of the last one or of the root)."""
        path: list[_Node] = []
        last_serial = self._root
        for i in range(most):
            node = self._nodes.get((last_serial, ids[i * BLOCK : (i + 1) * BLOCK].tobytes()))
            if node is None:
                break
            path.append(node)
            last_serial = node.serial
        return path, last_serial

    def _touch(self, path: list[_Node]) -> None:
        """Mark these as used now. A parent is marked after its child, so it is evicted later."""
        for node in reversed(path):
            self._order.move_to_end(node.serial)
