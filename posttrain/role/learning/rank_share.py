"""The part of a minibatch that this rank computes: what all ranks must have together, and how their results join. With
one rank this does nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.core.batch import Batch
from posttrain.core.exchange.ranks import Ranks, check_same
from posttrain.core.streams import WEIGHT
from posttrain.role.learner_passes import Passes
from posttrain.system.errors import InvariantError

if TYPE_CHECKING:
    from posttrain.role.trainer import Packing

ROUNDING = 1e-9
"""Largest gap between the sums of the weights on all ranks and of the minibatch, relative to their absolute sum."""


def check_shares(ranks: Ranks, batch: Batch, mine: np.ndarray, micros: Sequence[Batch]) -> None:
    """Check that all ranks have the same minibatch, and that their micro-batches are all of it, each episode once, with
    the weights that it has there.

    Args:
        mine: numbers of the episodes of the minibatch that this rank computes.
        micros: its micro-batches, which hold these episodes.

    Raises:
        InvariantError: on every rank, where that is not so.
    """
    if ranks.world == 1:
        return
    advice = "Every rank is given the whole minibatch, packed once: make it from the same groups, seed and step"
    # First that all ranks speak of the same minibatch; only then do sums over ranks mean anything.
    check_same(ranks, digest(batch), "minibatch", advice)
    weights = [float(x) for m in micros if WEIGHT in m for x in m[WEIGHT]]
    # By rank: its episodes, its number of spoken tokens, the sum of its weights.
    table = ranks.every((mine.tolist(), sum(m.spoken for m in micros), math.fsum(weights)))
    count = np.bincount([e for episodes, _, _ in table for e in episodes], minlength=batch.episodes)
    spoken = sum(n for _, n, _ in table)
    # A unit that is on two ranks, or on none, would change the gradient by its part, and no loss would look wrong.
    if spoken != batch.spoken or len(count) != batch.episodes or not np.all(count == 1):
        raise InvariantError(
            f"the {ranks.world} ranks hold {spoken} spoken tokens of the minibatch's {batch.spoken};"
            f" {int((count == 0).sum())} of its {batch.episodes} episodes are on no rank and"
            f" {int((count > 1).sum())} on several: `Packed.shares` dropped or doubled a unit"
        )
    if WEIGHT not in batch:
        return
    total, wanted = math.fsum(x for _, _, x in table), math.fsum(batch[WEIGHT])
    # `not <=` is True for NaN too. The sums may cancel, so rounding is measured by the sizes of the weights.
    if not abs(total - wanted) <= ROUNDING * math.fsum(np.abs(batch[WEIGHT])):
        raise InvariantError(
            f"the weights of the {ranks.world} ranks sum to {total:.12g}, and those of the minibatch to {wanted:.12g}:"
            " a rank was normalised by its own tokens. Normalise over the whole minibatch, before it is sharded"
        )


def digest(batch: Batch) -> str:
    """Digest of everything that a loss reads of a minibatch."""
    hasher = hashlib.blake2b(digest_size=16)
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    # Everything with numbers, by name and in the order of names, with
    # type and shape: arrays of other types can have equal bytes.
    hashed_arrays = {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)}
    hashed_arrays |= {} if batch.kept is None else {"kept": batch.kept.ids, "offsets": batch.kept.offsets}
    hashed_arrays |= {f"stream {s.name}": x for s, x in batch.streams.items()}
    for name in sorted(hashed_arrays):
        hasher.update(f"{name} {hashed_arrays[name].dtype} {hashed_arrays[name].shape};".encode())
        hasher.update(np.ascontiguousarray(hashed_arrays[name]).tobytes())
    return hasher.hexdigest()


def smallest_unit(batch: Batch) -> Batch:
    """The unit with the fewest packed tokens, alone. A rank with fewer micro-batches than others computes it with the
    loss times 0, so that all ranks make as many passes."""
    sizes = np.bincount(batch.sequence_S, weights=batch.lengths_S, minlength=batch.episodes)
    least = min(range(batch.units), key=lambda u: float(sizes[batch.members(u)].sum()))
    return batch.select(batch.members(least))


def of_all_ranks(ranks: Ranks, parts: list[Terms], passes: Passes, packing: Packing) -> list[Terms]:
    """The terms of the micro-batches of all ranks, in order of the ranks. `passes` and `packing` get the entries of the
    other ranks too, so that gauges and observers see the whole minibatch on every rank."""
    if ranks.world == 1:
        return parts
    # Exchanged as plain objects between processes; the losses are read as numbers from here on.
    mine = [Terms(p.loss.cpu(), p.gauges) for p in parts]
    table = ranks.every((mine, passes, packing.sizes, packing.computed))
    passes.join([p for _, p, _, _ in table])
    packing.sizes = [n for _, _, sizes, _ in table for n in sizes]
    packing.computed = sum(n for _, _, _, n in table)
    return [part for terms, _, _, _ in table for part in terms]
