"""Measures how much a step changed the policy: in the distribution of what it had just said, and in its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.types import Episode, Segment
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent, PushedEvent
from posttrain.role.roles import ReinforceRoles

EPISODES, TOKENS = 16, 512
"""Most episodes of a step that are scored before and after it, and the spoken tokens after which no more are taken."""
SLICE = 4096
"""Elements of each tensor that are compared."""
LIMIT = 20.0
"""Log-ratios are clamped to this before exp."""


@dataclass(frozen=True, eq=False)
class PolicyBefore:
    """The policy before a step, on some of the step's episodes, and a slice of its weights."""

    version: int
    packed: Packed | None
    logp_M: np.ndarray
    weights: Mapping[str, torch.Tensor]


class ChangeGauges(Observer):
    """Measures `policy/kl_step` and `optim/update`. It draws nothing and changes nothing."""

    def __init__(self) -> None:
        self._before: PolicyBefore | None = None

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e):
                with roles.clock.of("check"):
                    self._before = before(roles, e)
            case PushedEvent() if self._before is not None:
                policy_before, self._before = self._before, None
                # A step that moved nothing (no credit, a skipped update) has no change to measure.
                if roles.trainer.version != policy_before.version:
                    with roles.clock.of("check"):
                        return ObserverReport(change(roles, policy_before))
        return None


def before(roles: ReinforceRoles, e: Experience) -> PolicyBefore:
    """Returns the state that is compared after the step."""
    # The first sibling of each group: siblings share their prompt and are alike.
    segments = chosen([x for g in e.groups for x in g.episodes[:1]])
    packed = Packed.of(segments) if segments else None
    logp = log_probs(roles, segments, packed) if packed is not None else np.zeros(0, np.float32)
    weights = {n: t.detach().flatten()[:SLICE].clone() for n, t in roles.trainer.trained().items()}
    return PolicyBefore(roles.trainer.version, packed, logp, weights)


def log_probs(roles: ReinforceRoles, segments: Sequence[Segment], packed: Packed) -> np.ndarray:
    """[M]: of the learner before the step. In float32 the sampler's own are these but for rounding, where it had the
    same weights (`SamplerCheck` compares them in every step), and save a forward pass."""
    # The versions must be the learner's: other weights have other log-probs. In a mixture of experts two passes may
    # choose other experts for a token, so there the learner's own are computed.
    same_weights = all(bool((s.version[s.mask] == roles.trainer.version).all()) for s in segments)
    if same_weights and roles.run.model.dtype == "float32" and roles.learner.routers() is None:
        return np.concatenate([s.logp[s.mask] for s in segments])
    return roles.learner.score(packed)


def chosen(episodes: Sequence[Episode]) -> list[Segment]:
    """Segments of the first episodes, of one sampling contract, that the policy said itself."""
    out: list[Segment] = []
    for e in [e for e in episodes if not e.shown and e.spoken][:EPISODES]:
        # A packed batch has one sampling contract. Segments of others are left out.
        out += [s for s in e.segments if s.spoken and (not out or s.sampling == out[0].sampling)]
        if sum(s.spoken for s in out) >= TOKENS:
            break
    return out


def divergence(before_M: np.ndarray, after_M: np.ndarray) -> Gauge:
    """The estimate r - 1 - log r of the divergence, over the tokens. A token with a log-prob that is no number, or that
    neither policy can say (top-k and top-p at their borders), is left out: one of them would make the mean NaN.

    >>> divergence(np.array([-1.0, -np.inf, np.nan, -2.0]), np.array([-1.0, -np.inf, -1.0, -np.inf])).count
    2.0
    """
    with np.errstate(invalid="ignore"):
        gap = after_M.astype(np.float64) - before_M
    # Clamped before exp, as every ratio is.
    gap = np.clip(gap[~np.isnan(gap)], -LIMIT, LIMIT)
    # With r = after / before, r - 1 - log r is never negative, and its mean under the policy before is their KL.
    return Gauge(float(np.sum(np.exp(gap) - 1 - gap)), float(len(gap)))


def change(roles: ReinforceRoles, policy_before: PolicyBefore) -> Gauges:
    """The gauges of a step that moved weights."""
    out: Gauges = {}
    if policy_before.packed is not None:
        out["policy/kl_step"] = divergence(policy_before.logp_M, roles.learner.score(policy_before.packed))
    moved = size = 0.0
    for name, now in roles.trainer.trained().items():
        old = policy_before.weights[name]
        new = now.detach().flatten()[:SLICE]
        # In float64: the squares of small moves vanish beside those of the weights.
        moved += float((new - old).double().square().sum())
        size += float(old.double().square().sum())
    return out | ({"optim/update": Gauge((moved / size) ** 0.5, 1)} if size else {})
