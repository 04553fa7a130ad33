"""Scores of one batch divided over ranks: each rank scores its share of the batch, and gets the scores of all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import Ranks
from posttrain.system.errors import InvariantError

R = TypeVar("R")


def divided(
    packed: Packed,
    ranks: Ranks,
    room: int,
    compute: Callable[[Packed], R],
    per: Literal["token", "segment"] = "token",
) -> R:
    """`compute(packed)` by all ranks together. Each computes whole units, balanced by tokens (`Packed.shares`), in as
    many passes as the rank with the most has, so that weights come together for all at the same time.

    Args:
        room: packed tokens of one pass.
        compute: makes one pass. It returns an array, or a dataclass or mapping of arrays. Their first axis is the
            spoken tokens of the batch that it is given, or its segments (`per`).

    Raises:
        InvariantError: on every rank, where the ranks were given other tokens.
    """
    if ranks.world == 1:
        return compute(packed)
    # Every rank makes the same shares of the batch, so none has to be told its own.
    shares = packed.shares(ranks.world)
    own_share = packed.select(shares[ranks.rank])
    parts = own_share.split(room) if own_share.episodes else []
    # One exchange for both: whether all have the same tokens, and how many passes the slowest rank makes.
    table = ranks.every((_digest(packed), len(parts)))
    if any(digest != table[0][0] for digest, _ in table):
        raise InvariantError(
            "ranks were asked to score different tokens, and each computes a share of the same ones: give every rank"
            " the whole batch, packed once"
        )
    results = [compute(part) for part in parts]
    # Weights come together in exchanges of all ranks, so each makes as many passes as the one with the most.
    for _ in range(max(n for _, n in table) - len(parts)):
        compute(_smallest(packed))  # so that others can compute theirs
    places = [_places(packed, share, per) for share in shares]
    pieces = [piece for of_rank in ranks.every(results) for piece in of_rank]
    # The pieces come in the order of the ranks. places[i] is where result i belongs in the batch, so sorting by it puts
    # the results into the order of the batch.
    order = np.argsort(np.concatenate(places), kind="stable")
    return _joined(pieces, order)


def _places(packed: Packed, episodes: np.ndarray, per: str) -> np.ndarray:
    """Returns the places of the results of these episodes in the results of the whole batch."""
    episode_of_result = packed.sequence_M if per == "token" else packed.sequence_S
    return np.flatnonzero(np.isin(episode_of_result, episodes))


def _joined(pieces: list[R], order: np.ndarray) -> R:
    """The pieces as one result, its entries taken in this order."""
    first = pieces[0]
    if isinstance(first, Mapping):
        tables = cast("list[Mapping[str, np.ndarray]]", pieces)
        return cast("R", {name: np.concatenate([t[name] for t in tables])[order] for name in tables[0]})
    if not is_dataclass(first):
        return cast("R", np.concatenate(cast("list[np.ndarray]", pieces))[order])
    kind: Any = type(first)
    columns = ([getattr(p, f.name) for p in pieces] for f in fields(first))
    return kind(*(np.concatenate(column)[order] for column in columns))


def _smallest(packed: Packed) -> Packed:
    """The unit with the fewest packed tokens, alone."""
    sizes = np.bincount(packed.sequence_S, weights=packed.lengths_S, minlength=packed.episodes)
    least = min(range(packed.units), key=lambda u: float(sizes[packed.members(u)].sum()))
    return packed.select(packed.members(least))


def _digest(packed: Packed) -> str:
    """A digest of the batch's tokens, lengths and places, with its contract."""
    hasher = hashlib.blake2b(digest_size=16)
    for x in (packed.ids_N, packed.lengths_S, packed.source_M, packed.sequence_S):
        hasher.update(np.ascontiguousarray(x).tobytes())
    return f"{hasher.hexdigest()} {packed.sampling}"
