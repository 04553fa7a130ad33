"""How far the rollout may run ahead of the learner."""

from __future__ import annotations

from posttrain.core.errors import ConfigError


def capacity(*, behind: int, version: int, batch: int, accepted: int, running: int) -> int:
    """Samples the rollout may still start, so that none is learned from more than `behind` versions after it was begun
    (A26, AReaL).

        (behind + version + 1) * batch - (accepted + running), not below 0

    Version v learns from samples v * batch ... (v + 1) * batch - 1 of the stream, so a sample begun now, at place
    accepted + running, is learned from at version place // batch.

    Args:
        behind: versions a sample may be behind; 0 is the synchronous loop.
        version: of the weights that sample now.
        batch: samples that one version is made from.
        accepted: samples finished since version 0, learned from or waiting. running: begun and not finished.

    >>> capacity(behind=0, version=0, batch=4, accepted=0, running=0)
    4
    >>> capacity(behind=4, version=2, batch=8, accepted=20, running=10)
    26
    >>> capacity(behind=1, version=3, batch=8, accepted=32, running=8)
    0
    """
    if batch < 1 or min(behind, version, accepted, running) < 0:
        raise ConfigError(
            f"capacity: batch={batch} must be >= 1, and behind={behind}, version={version}, accepted={accepted},"
            f" running={running} >= 0"
        )
    return max(0, (behind + version + 1) * batch - (accepted + running))


def versions_behind(*, place: int, version: int, batch: int) -> int:
    """How many versions later than `version` the sample at `place` of the stream is learned from.

    >>> [versions_behind(place=p, version=2, batch=8) for p in (16, 23, 24, 55)]
    [0, 0, 1, 4]
    """
    return place // batch - version
