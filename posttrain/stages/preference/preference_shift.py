"""The mean log-ratio of completions under the prompts of other rows, computed a second time."""

from __future__ import annotations

import numpy as np

from posttrain.core.batch import Batch, Packed
from posttrain.core.transcript import shown_segment
from posttrain.core.types import Segment
from posttrain.role.learning.reference_scores import ReferenceScores
from posttrain.role.roles import PreferenceRoles
from posttrain.system.errors import InvariantError


def under_other_prompts(batch: Batch, longest: int) -> list[Segment]:
    """Each prompt of a minibatch, followed by the completion of the nearest row before it, in a circle, with another
    prompt. A sequence of more than `longest` tokens is left out."""
    ids_E = [batch.ids_of(e) for e in range(batch.episodes)]
    spoken_E = np.bincount(batch.sequence_M, minlength=batch.episodes)
    parts = [(ids[: len(ids) - n], ids[len(ids) - n :]) for ids, n in zip(ids_E, spoken_E.tolist(), strict=True)]
    out: list[Segment] = []
    for i, (prompt, _) in enumerate(parts):
        # A negative index counts from the end, so the last row comes before the first.
        before = [parts[i - k] for k in range(1, len(parts))]
        other = next((text for asked, text in before if asked.tolist() != prompt.tolist()), None)
        if other is None or len(prompt) + len(other) > longest:
            continue
        mask = np.arange(len(prompt) + len(other)) >= len(prompt)
        out.append(shown_segment(np.concatenate([prompt, other]), mask, batch.sampling))
    return out


def elsewhere(roles: PreferenceRoles, batch: Batch) -> tuple[float, float]:
    """(mean of log pi - log ref over the completions under other prompts, their mean length in tokens)."""
    segments = under_other_prompts(batch, roles.context)
    packed, reference = Packed.of(segments), roles.reference
    if isinstance(reference, ReferenceScores):
        if lost := reference.missing(segments):
            raise InvariantError(
                f"{len(lost)} of {len(segments)} completions under the prompts of others have no reference log-probs,"
                f" and {roles.stage.algorithm.name} compares with them: other completions were scored in their place"
            )
        reference_M = reference.of(segments)
    else:
        assert reference is not None
        reference_M = reference.score(packed)
    ratio_M = roles.learner.score(packed).astype(np.float64) - reference_M
    return float(ratio_M.sum() / len(segments)), packed.spoken / len(segments)
