"""Names the episodes whose gradient is not finite, by task and sibling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.core.batch import Batch
from posttrain.core.scored import Credit
from posttrain.core.streams import MU
from posttrain.core.types import Episode
from posttrain.role.trainer import NonFiniteGradient
from posttrain.system.errors import InvariantError


def key(episode: Episode) -> bytes:
    """The spoken tokens and their log-probs as bytes. Finds an episode again in a batch."""
    said = [x for s in episode.segments for x in (s.ids[s.mask], s.logp[s.mask])]
    return b"".join(x.tobytes() for x in (*said[::2], *said[1::2]))


@contextmanager
def named(batch: Batch, credit: Credit, where: str) -> Iterator[None]:
    """Around an optimizer step: turns its `NonFiniteGradient` into an InvariantError that names the step's episodes."""
    try:
        yield
    except NonFiniteGradient as error:
        of = {key(e.episode): e.episode for g in credit.groups for e in g.episodes}
        said = [batch.sequence_M == e for e in error.culprits]
        found = [of.get(batch.target_M[at_M].tobytes() + batch[MU][at_M].tobytes()) for at_M in said]
        names = [
            f"task {e.task.id!r} visit {e.visit} sibling {e.sibling} (reward {e.reward:g})"
            for e in found
            if e is not None
        ]
        raise InvariantError(error.told(names, f" ({where})")) from error
