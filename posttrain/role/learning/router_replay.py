"""Router choices of the learner at the start of a step, in place of the sampler's (`model.router_replay=start`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import Learner
from posttrain.core.types import Episode
from posttrain.system.errors import InvariantError


def at_start(episodes: Sequence[Episode], learner: Learner) -> list[Episode]:
    """The same episodes with the experts that the learner's routers choose now, for all of their tokens."""
    routers = learner.routers()
    if routers is None:
        raise InvariantError("model.router_replay=start, and the learner has no routers")
    segments = [s for e in episodes for s in e.segments]
    own_N = routers.read(Packed.of(segments), replay=False).own
    parts = iter(np.split(own_N, np.cumsum([len(s.ids) for s in segments])[:-1]))
    return [replace(e, segments=tuple(replace(s, routed=next(parts)) for s in e.segments)) for e in episodes]
