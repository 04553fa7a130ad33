"""Canaries: invariants checked in every user's run. A violated one stops it, saying what it means and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Scorer
from posttrain.core.types import Gauge, Gauges, Group

BOUND: Mapping[str, float] = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest |log-prob of learner - of sampler| of one token with equal weights, by dtype. Measured: docs/canaries.md."""
MEAN_BOUND: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 0.02}
"""The same, averaged over a step's tokens."""


def sampler_agrees(groups: Sequence[Group], learner_logp: np.ndarray, *, version: int, dtype: str, token: Callable[[int], str]) -> Gauges:
    """Sampler and learner agree on every token said by the weights the learner holds now (so rho = 1 within the bound).

    Args:
        learner_logp: float32, the learner's log-prob of every spoken token of the groups' judged episodes, in order.
        token: text of a token id, for the message.
    """
    segments = [(e, s) for g in groups for e in g.judged for s in e.segments]
    mu = np.concatenate([s.logp[s.mask] for _, s in segments])
    fresh = np.concatenate([s.version[s.mask] for _, s in segments]) == version
    gap = np.where(fresh, np.abs(learner_logp.astype(np.float64) - mu), 0.0)
    worst, mean = float(gap.max(initial=0.0)), float(gap.sum() / max(1, fresh.sum()))
    if not worst <= BOUND[dtype] or not mean <= MEAN_BOUND[dtype]:
        at = int(np.argmax(gap))
        ends = np.cumsum([s.spoken for _, s in segments])
        which = int(np.searchsorted(ends, at, side="right"))
        episode, segment = segments[which]
        position = int(np.flatnonzero(segment.mask)[at - (ends[which] - segment.spoken)])
        raise InvariantError(
            f"sampler and learner disagree about the same weights (version {version}): worst token {token(int(segment.ids[position]))!r} "
            f"at position {position} of task {episode.task.id!r}, sibling {episode.sibling}: sampler log-prob {mu[at]:.6f}, "
            f"learner {learner_logp[at]:.6f}; worst gap {worst:.3g} (bound {BOUND[dtype]:g} in {dtype}), mean gap {mean:.3g} "
            f"(bound {MEAN_BOUND[dtype]:g}). The importance ratio is not 1 on-policy, so every gradient would be of another distribution. "
            "Check that the sampling transform (temperature, top-p) is the same on both sides, that the last weight sync arrived, "
            "and that the model has no dropout"
        )
    return {"canary/logp_gap": Gauge(mean * float(fresh.sum()), float(fresh.sum())), "canary/logp_gap_worst": Gauge(worst, 1)}


def reference_unmoved(reference: Scorer, digest: str) -> None:
    """The reference still has the digest it was born with."""
    now = reference.fingerprint()
    if now != digest:
        raise InvariantError(
            f"the reference has changed: its digest was {digest} at the start of the stage and is {now}. A trained or refreshed reference "
            "makes every KL term a lie. Look for code that shares its tensors with the learner or puts them in an optimizer"
        )


def no_distance_yet(learner_logp: np.ndarray, reference_logp: np.ndarray, dtype: str) -> None:
    """KL to the reference is 0 while learner and reference are the same weights."""
    gap = float(np.max(np.abs(learner_logp.astype(np.float64) - reference_logp), initial=0.0))
    if not gap <= BOUND[dtype]:
        raise InvariantError(
            f"the reference scores differently from the learner although both hold the same weights (worst log-prob gap {gap:.3g}, "
            f"bound {BOUND[dtype]:g} in {dtype}). The KL term would start wrong. Check that the reference was loaded from the checkpoint "
            "the stage starts from, in the same dtype and without dropout"
        )


def masks_cover_what_was_said(groups: Sequence[Group], said_tokens: int) -> None:
    """The masks of a step's episodes cover exactly the tokens the engine says it sampled for them."""
    covered = sum(e.spoken for g in groups for e in g.episodes)
    if covered != said_tokens:
        raise InvariantError(
            f"the masks of this step cover {covered} tokens, but the engine said {said_tokens}. Some observation is trained on, or some "
            "spoken token is not. Tokens must enter a transcript through see() and say() only"
        )


def weights_are_normalised(batch: Batch | None, expected: float | None) -> None:
    """Token weights of a minibatch are finite and, where the aggregation is a mean and no episode stayed away, sum to 1."""
    if batch is None:
        return
    total = float(batch.weight_M.sum())
    if not np.all(np.isfinite(batch.weight_M)) or (expected is not None and not math.isclose(total, expected, rel_tol=1e-9)):
        raise InvariantError(f"token weights of a minibatch sum to {total!r}, not {expected}: the denominator is not that of the minibatch")


@dataclass
class Movement:
    """Every trainable parameter moves in the first optimizer step."""

    before: dict[str, Any]

    @staticmethod
    def watch(parameters: Mapping[str, Any]) -> Movement:
        return Movement({name: p.detach().clone() for name, p in parameters.items()})

    def check(self, parameters: Mapping[str, Any], *, unread: Sequence[str] = ()) -> Gauges:
        """Compare after the step. `unread` are prefixes of parameters the algorithm has no term for (the value head)."""
        names = [n for n in parameters if not n.startswith(tuple(unread))] if unread else list(parameters)
        still = [n for n in names if bool((parameters[n].detach() == self.before[n]).all())]
        if still:
            raise InvariantError(
                f"{len(still)} of {len(names)} trainable parameters did not move in the first optimizer step: {', '.join(still[:5])}"
                f"{', ...' if len(still) > 5 else ''}. They are frozen or cut off from the loss. Check requires_grad, the learning rate "
                "(it must be > 0 at step 1) and, in bfloat16, that updates are larger than the weights' rounding"
            )
        return {"canary/moved": Gauge(len(names) - len(still), len(names))}
