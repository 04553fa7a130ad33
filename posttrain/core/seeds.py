"""Law 8: every random number is a function of where it is used, never of who else is running.

A key is the hash of (seed, stream, coordinates); the coordinates of a sampled token are (task, visit, sibling, turn),
and its position in the turn is the counter. Retries, neighbours, batch size and resumption cannot change a draw.
"""

from __future__ import annotations

import hashlib

import numpy as np

Coordinate = int | str


def key(seed: int, stream: str, *coordinates: Coordinate) -> int:
    """128-bit Philox key of a place. Coordinates keep their type and border, so (1, 23) and (12, 3) differ."""
    # repr and a separator that no repr contains: ("a", "b") and ("ab",), or 1 and "1", are different places.
    text = "\x1f".join([repr(seed), repr(stream), *(repr(c) for c in coordinates)])
    # A cryptographic hash: neighbouring places have unrelated keys, on every machine, unlike Python's `hash`.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, stream: str, *coordinates: Coordinate) -> np.random.Generator:
    """A numpy generator that belongs to one place."""
    return np.random.Generator(np.random.Philox(key=key(seed, stream, *coordinates)))


def uniforms(place: int, count: int) -> np.ndarray:
    """The first `count` uniforms of a key, float64 [count] in [0, 1); entry t belongs to position t.

    A longer request extends a shorter one: `uniforms(k, 5)[:3] == uniforms(k, 3)`.
    """
    # Philox is a counter: entry t is a function of key and t, however many are drawn at once.
    return np.random.Generator(np.random.Philox(key=place)).random(count)


def torch_seed(seed: int, stream: str, *coordinates: Coordinate) -> int:
    """A 63-bit seed for a torch generator (weight initialisation is the only place that needs one)."""
    return key(seed, stream, *coordinates) & (2**63 - 1)
