"""Weights that stay in the run folder, such as those a stage began with. Every checkpoint has their fingerprints, which
are compared when they are read again."""

from __future__ import annotations

from posttrain.role.events import RestoredEvent
from posttrain.role.weights.saved_weights import load_weights, save_weights
from posttrain.stages.progress import Progress
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import InvariantError


def keep(parts: RunParts, progress: Progress, name: str) -> None:
    """Keep the learner's weights for the whole run under a name.

    Raises:
        InvariantError: other weights have this name already.
    """
    now = parts.learner.fingerprint()
    if (then := progress.kept.get(name, now)) != now:
        raise InvariantError(
            f"the weights kept as {name!r} have fingerprint {then}, and others ({now}) would take their place: what is"
            " compared with the start of a stage would be compared with the policy of today. Go on from an older"
            " checkpoint"
        )
    progress.kept = {**progress.kept, name: now}
    parts.book.keep(name, lambda folder: save_weights(folder, parts.learner))


def load_kept(parts: RunParts, progress: Progress, name: str) -> None:
    """Load the weights that were kept under a name into the learner, and compare them with their fingerprint."""
    load_weights(parts.book.kept(name), parts.learner)
    then = progress.kept.get(name, "")  # an older version wrote none
    parts.watch.emit(RestoredEvent(f"weights kept as {name!r}", then, parts.learner.fingerprint))
