"""Checks of the reference of a preference loss: its weights or its stored log-probs do not change, and the policy
equals it before the first step, where the reference is the policy's own start. `elsewhere` is the mean log-ratio of
completions under the prompts of other rows, computed a second time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.checks.sampling.sampler_checks import reference_unmoved
from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Gauge
from posttrain.core.streams import REFERENCE, START
from posttrain.core.transcript import shown_segment
from posttrain.core.types import Segment
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport, PackedEvent
from posttrain.role.learner_passes import Needs
from posttrain.role.learning.logprob_tolerance import CEILING, Exact, Gap, allowed, unmeasured
from posttrain.role.learning.reference_scores import ReferenceScores
from posttrain.role.roles import PreferenceRoles
from posttrain.system.errors import InvariantError

REMEMBERED = 4
"""How many units of the first compared minibatch are kept, to compare their reference log-probs again."""


def segments_of(packed: Packed, episodes: Sequence[int]) -> list[Segment]:
    """The completions of a minibatch, built from its tokens alone. Each ends its sequence (`completion_ends_once`)."""
    out: list[Segment] = []
    for e in episodes:
        ids = packed.ids_of(e)
        mask = np.arange(len(ids)) >= len(ids) - int((packed.sequence_M == e).sum())
        out.append(shown_segment(ids, mask, packed.sampling))
    return out


def reference_says(held_M: np.ndarray, now_M: np.ndarray, bound: Gap, what: str) -> None:
    """Checks that the log-probs `held_M`, which the loss reads, are those that the reference gives now (`now_M`)."""
    gap = Gap.of(held_M, now_M)
    if not gap.worst <= bound.worst:
        raise InvariantError(
            f"{what} differ from those of the reference by up to {gap.worst:.3g} nats (bound {bound.worst:.2g}): they"
            " are of another model, other weights, or other tokens. The reference is the policy as the stage began, or"
            " the model that is named, never the policy of now"
        )


def starts_at_reference(
    learner_M: np.ndarray, reference_M: np.ndarray, dtype: str, exact: Exact, temperature: float = 1.0
) -> float:
    """Checks that every log-ratio to the reference is 0, up to rounding, where the policy is its own reference at the
    stage's start; returns the largest absolute value."""
    gap = Gap.of(reference_M, learner_M)
    bound = allowed(dtype, gap, learner_M, exact, temperature)
    if not gap.worst <= bound.worst:
        raise InvariantError(
            "the policy is its own reference when the stage begins, so every log-ratio is 0, and one is"
            f" {gap.worst:.3g} (bound {bound.worst:.2g} in {dtype}). The reference's log-probs are of another model, of"
            " other tokens (template, padding, tokenizer), or in another order"
        )
    return gap.worst


class ReferenceCheck(Observer):
    """Checks of a stage that learns from preferences, at every `due` step.

    The reference is still the one with which the stage began. Before the first step every log-ratio to it is 0. The
    log-probs in the stream `START`, the policy's at the start of the step, are those of its forward pass.
    """

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the stage starts here, not from a checkpoint."""
        self._remembered: Batch | None = None

    def needs(self, roles: PreferenceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=due(event.index))

    def on_event(self, roles: PreferenceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PackedEvent(index=index) if due(index) and roles.stage.algorithm.reads_reference:
                self._unmoved(roles, event)
            case DifferentiatedEvent(packed=packed, passes=passes) if due(packed.index):
                logp_M = passes.joined(packed.batch, passes.logp).astype(np.float32)
                return self._starts(roles, packed, logp_M)
        return None

    def _unmoved(self, roles: PreferenceRoles, event: PackedEvent) -> None:
        batch, dtype, reference = event.batch, roles.run.model.dtype, roles.reference
        assert reference is not None
        if self._remembered is None:
            # The first units of the first minibatch are kept with their reference log-probs, and scored again at every
            # later `due` step.
            members = [batch.members(u) for u in range(min(REMEMBERED, batch.units))]
            self._remembered = batch.select(np.concatenate(members))
        remembered = self._remembered
        if isinstance(reference, ReferenceScores):
            now_M, remembered_M = (reference.of(segments_of(b, range(b.episodes))) for b in (batch, remembered))
            # These log-probs were computed ahead and are read from memory, so they must be equal to the last bit.
            bounds = Gap(0, 0), Gap(0, 0)
        else:
            reference_unmoved(reference)
            now_M, remembered_M = reference.score(batch), reference.score(remembered)
            # The remembered units were first scored inside a larger minibatch, so their rounding differs more.
            bounds = unmeasured(dtype, batch.sampling.temperature), CEILING[dtype]
        reference_says(batch[REFERENCE], now_M, bounds[0], "the reference log-probs in the minibatch")
        reference_says(remembered[REFERENCE], remembered_M, bounds[1], "the reference log-probs of the first step")

    def _starts(self, roles: PreferenceRoles, packed: PackedEvent, logp_M: np.ndarray) -> ObserverReport | None:
        batch, dtype, gauges = packed.batch, roles.run.model.dtype, dict[str, Gauge]()
        exact = lambda: roles.learner.exact(batch)  # noqa: E731
        if START in batch:
            gap = Gap.of(batch[START], logp_M)
            if not gap.worst <= allowed(dtype, gap, logp_M, exact, batch.sampling.temperature).worst:
                raise InvariantError(
                    f"the policy's log-probs at the start of the step differ from its forward pass by {gap.worst:.3g}:"
                    " what is made of them over the minibatch would be of other weights or other tokens"
                )
        if self._first and packed.index == 1:
            # The ratios are 0 only if the reference is the policy's own start. A named reference is another model.
            is_own_start = roles.stage.algorithm.reads_reference and roles.stage.reference is None
            if is_own_start:
                worst = starts_at_reference(logp_M, batch[REFERENCE], dtype, exact, batch.sampling.temperature)
                gauges["canary/reference_gap"] = Gauge(worst, 1)
        self._first = False
        return ObserverReport(gauges)


def under_other_prompts(batch: Batch, longest: int) -> list[Segment]:
    """Each prompt of a minibatch, followed by the completion of the nearest row before it, in a circle, with another
    prompt. A sequence of more than `longest` tokens is left out. A completion is the tail of its sequence."""
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
