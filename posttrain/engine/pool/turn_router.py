"""Chooses the engine that a turn goes to: the one where the beginning of the turn is cached, as long as that engine is
not much busier than others.

`choose` is a pure function of what is known of the engines, so its properties are laws (tests/laws/test_placement.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 16
"""Tokens of a block: engines share cached beginnings by whole blocks, the embedded one by `cache_blocks.BLOCK`."""
CALLS_AHEAD = 8
"""An engine may be ahead of the least busy one by this many turns of the present size, and still get the turn."""
KEPT = 4096
"""Beginnings that are remembered of each engine."""


@dataclass(frozen=True)
class EngineLoad:
    """The facts that are known of an engine when a turn is given to one."""

    busy: int
    """Tokens that it was asked for and has not answered yet, with the tokens of the prompts."""
    cached: int
    """Tokens of this turn's beginning that it has computed before."""
    ready: bool = True


def choose(tokens: int, engines: Sequence[EngineLoad]) -> int | None:
    """The number of the engine for a turn of at most `tokens`; None where none is ready.

    Engines that are more than `CALLS_AHEAD` such turns ahead of the least busy one are left out. Of the others, the one
    that has cached most of the turn's beginning is taken; among equals the least busy one, and then the first.

    >>> choose(10, [EngineLoad(30, 16), EngineLoad(0, 0)])
    0
    >>> choose(10, [EngineLoad(90, 16), EngineLoad(0, 0)])
    1
    """
    ready = [i for i, e in enumerate(engines) if e.ready]
    if not ready:
        return None
    least = min(engines[i].busy for i in ready)
    # A cached beginning saves a prompt at most, so it is worth a limited lead only: without the bound all turns of a
    # long shared prompt would go to one engine.
    near = [i for i in ready if engines[i].busy - least <= CALLS_AHEAD * tokens]
    return min(near, key=lambda i: (-engines[i].cached, engines[i].busy, i))


class Beginnings:
    """The beginnings that one engine has computed since its last weights. The oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def add(self, ids: np.ndarray) -> None:
        """The engine computes int32 [T] `ids`, and has their beginnings cached from now on."""
        for _, digest in _blocks(ids):
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def cached(self, ids: np.ndarray) -> int:
        """Returns the number of first tokens of `ids` that the engine has computed."""
        cached_tokens = 0
        for length, digest in _blocks(ids):
            if digest in self._known:
                cached_tokens = length
            # Each beginning was added together with its shorter ones, so the first unknown block ends the search. The
            # last piece may be shorter than a block and is known only to the turn that had exactly these ids.
            elif length % BLOCK == 0:
                break
        return cached_tokens

    def forget(self) -> None:
        self._known.clear()


def _blocks(ids: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """(length, digest) of the beginnings that end at a block, and of all of `ids`."""
    running_digest = hashlib.blake2b(digest_size=8)
    raw = np.ascontiguousarray(ids, np.int32)
    for start in range(0, len(raw), BLOCK):
        piece = raw[start : start + BLOCK]
        # The digest runs on, so each one is of everything up to there, not of its block alone.
        running_digest.update(piece.tobytes())
        yield start + len(piece), running_digest.digest()
