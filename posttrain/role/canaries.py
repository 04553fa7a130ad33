"""Canaries: invariants checked in every user's run. A violated one stops it, saying what it means and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.batch import Batch, Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Scorer
from posttrain.core.types import Gauge, Gauges, Group

BOUND: Mapping[str, float] = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest |log-prob of learner - of sampler| of one token with equal weights, by dtype. Measured: docs/canaries.md."""
MEAN_BOUND: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 0.02}
"""The same, averaged over a step's tokens."""


def sampler_agrees(
    batch: Batch | Packed, mu_M: np.ndarray, learner_M: np.ndarray, fresh_M: np.ndarray, *, dtype: str, text: Callable[[np.ndarray], str]
) -> Gauges:
    """Sampler and learner agree on every token said by the weights the learner holds now (so rho = 1 within the bound).

    Args:
        mu_M, learner_M: float32 log-probs of the sampler and of the learner.
        fresh_M: bool, which tokens were said by the weights the learner holds.
        text: decodes token ids, for the message.
    """
    gap = np.where(fresh_M, np.abs(learner_M.astype(np.float64) - mu_M), 0.0)
    gap = np.where(np.isfinite(gap), gap, np.inf)
    count = float(fresh_M.sum())
    worst, mean = float(gap.max(initial=0.0)), float(gap.sum() / max(1.0, count))
    if worst > BOUND[dtype] or mean > MEAN_BOUND[dtype]:
        m = int(np.argmax(gap))
        at = int(batch.source_M[m]) + 1
        position = int(batch.positions_N[at])
        before = text(batch.ids_N[at - min(position, 12) : at])
        raise InvariantError(
            f"sampler and learner disagree about the same weights. Worst token: {text(batch.target_M[m : m + 1])!r} after {before!r} "
            f"(position {position}): sampler log-prob {mu_M[m]:.6f}, learner {learner_M[m]:.6f}. Worst gap {worst:.3g} "
            f"(bound {BOUND[dtype]:g} in {dtype}), mean gap {mean:.3g} (bound {MEAN_BOUND[dtype]:g}) over {int(count)} tokens. "
            "The importance ratio is not 1 on-policy, so every gradient would be that of another distribution. Check that both sides "
            "use the same sampling transform (temperature, top-p), that the last weight sync arrived, and that the model has no dropout"
        )
    return {"canary/logp_gap": Gauge(mean * count, count), "canary/logp_gap_worst": Gauge(worst, 1)}


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
    covered = sum(e.spoken for g in groups for e in (*g.episodes, *filter(None, [g.greedy])) if not e.shown)
    if covered != said_tokens:
        raise InvariantError(
            f"the masks of this step cover {covered} tokens, but the engine said {said_tokens}. Some observation is trained on, or some "
            "spoken token is not. Tokens must enter a transcript through see() and say() only"
        )


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
                f"{', ...' if len(still) > 5 else ''}. They are frozen or cut off from the loss. Check requires_grad, and that the "
                "learning rate is > 0 at step 1"
            )
        return {"canary/moved": Gauge(len(names) - len(still), len(names))}
