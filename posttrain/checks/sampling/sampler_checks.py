"""Checks that sampler, learner and reference agree on the same weights, and that rollouts hold what the engine sampled.

The noise band is how far sampler and learner differ on the same weights by rounding. On policy, a ratio against the
sampler is 1 plus this noise. A trust region or a correction that is narrower than the band clips tokens by their
rounding, not because the policy moved. In bfloat16, GSPO's bounds 3e-4 / 4e-4 clipped 72 to 94 % of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from posttrain.algorithm.loss.mismatch_correction import correct
from posttrain.algorithm.loss.push_factor import TrustInputs, importance, push
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.ports import Reference
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, VERSION, WEIGHT
from posttrain.core.types import OPPOSED, SHOWN, Group, Stop
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    Observer,
    ObserverReport,
    PackedEvent,
    PlayedEvent,
    ScoredEvent,
)
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.learning.logprob_tolerance import LEAST, Exact, Gap, allowed, as_sampled
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import ConfigError, InvariantError

MOST = 0.01
"""Largest share of tokens that noise alone may clip."""


def noise_band(a: Algorithm, mu_M: np.ndarray, learner_M: np.ndarray, sequence_M: np.ndarray, dtype: str) -> Gauges:
    """The noise band of a run at its first step, when both sides hold the same weights.

    ConfigError if a trust region or a correction of `a` is narrower: if the noise alone clips more than `MOST` of the
    tokens.

    Args:
        mu_M, learner_M: log-probs of the same tokens by sampler and learner.
        sequence_M: the episode of each token, ascending.
    """
    if not len(mu_M):
        return {}
    # The log-ratio of learner to sampler, which would be 0 without rounding.
    gap_M = np.asarray(learner_M, np.float64) - mu_M
    # The 99th percentile: a few tokens may have far larger gaps by rounding alone.
    band = float(np.quantile(np.abs(gap_M), 0.99))
    mu, learner, sequence = (torch.as_tensor(np.asarray(x, np.float64)) for x in (mu_M, learner_M, sequence_M))
    factors: list[torch.Tensor] = []
    # Both signs of credit: a trust region bounds them on different sides.
    for sign in (1.0, -1.0):
        streams = {MU: mu, ADVANTAGE: torch.full_like(mu, sign), WEIGHT: torch.ones_like(mu)}
        batch = Streams(sequence.long(), int(sequence_M.max()) + 1, streams=streams)
        # Only a trust region that compares with the sampler, and can silence tokens, sees this noise. One with
        # `clip.top` also reads log-probs of other tokens than the sampled ones, which are not given here.
        if a.anchor == "behaviour" and a.silences and not a.stores_top:
            ratio = importance(a.ratio, learner - mu, batch)
            factors.append(push(a.clip, TrustInputs(ratio, learner - mu, batch[ADVANTAGE], learner, batch)).push_M)
        if a.correction:
            # The learner is both the start and the present policy, so c = learner / mu is this noise and nothing else.
            factors.append(correct(a.correction, learner, learner, batch).used_M)
    worst = max((float((x == 0).double().mean()) for x in factors), default=0.0)
    if worst > MOST:
        raise ConfigError(
            f"{a.name}: {worst:.1%} of the tokens would fall silent although no weight has moved. Sampler and learner"
            f" differ by up to {band:.2g} nats a token in {dtype} (99 % of tokens), and clip={a.clip},"
            f" correction={a.correction} are narrower than that. Compare with the learner's own log-probs"
            " (anchor=start), widen the bounds, or use model.dtype=float32"
        )
    return {"mismatch/band": Gauge(band, 1)}


def sampler_agrees(
    batch: Batch | Packed,
    mu_M: np.ndarray,
    learner_M: np.ndarray,
    fresh_M: np.ndarray,
    *,
    dtype: str,
    exact: Exact,
    text: Callable[[np.ndarray], str],
    same: bool = False,
) -> Gauges:
    """Sampler and learner agree on every token sampled with the learner's present weights: rho = 1 within the bound.

    Args:
        mu_M, learner_M: float32 log-probs of the sampler and of the learner.
        fresh_M: bool, which tokens were sampled with the weights the learner holds.
        exact: the learner's log-probs in float64, for `logprob_tolerance.allowed`.
        text: decodes token ids, for the message.
        same: both must have the same bits.
    """

    # Exact log-probs cost a float64 pass, so they are computed only where the gap exceeds the least bound.
    def exactly() -> np.ndarray | None:
        exact_M = exact()
        return None if exact_M is None else exact_M[fresh_M]

    gap = Gap.of(mu_M[fresh_M], learner_M[fresh_M])
    bound = Gap(0.0, 0.0) if same else allowed(dtype, gap, learner_M[fresh_M], exactly, batch.sampling.temperature)
    count = float(fresh_M.sum())
    if not gap.within(bound):
        # Tokens of other weights may differ by any amount. A difference that is no number is the worst.
        apart = np.where(fresh_M, np.abs(learner_M.astype(np.float64) - mu_M), 0.0)
        m = int(np.argmax(np.where(np.isfinite(apart), apart, np.inf)))
        at = int(batch.source_M[m]) + 1
        position = int(batch.positions_N[at])
        before = text(batch.ids_N[at - min(position, 12) : at])
        raise InvariantError(
            f"sampler and learner disagree about the same weights. Worst token: {text(batch.target_M[m : m + 1])!r}"
            f" after {before!r} (position {position}): sampler log-prob {mu_M[m]:.6f}, learner {learner_M[m]:.6f}."
            f" Worst gap {gap.worst:.3g} (bound {bound.worst:.2g} in {dtype}), mean gap {gap.mean:.3g} (bound"
            f" {bound.mean:.2g}) over {int(count)} tokens. The importance ratio is not 1 on-policy, so every gradient"
            " would be that of another distribution. Check that both sides use the same sampling transform"
            " (temperature, top-p), that the last weight sync arrived, and that the model has no dropout"
        )
    return {"canary/logp_gap": Gauge(gap.mean * count, count), "canary/logp_gap_worst": Gauge(gap.worst, 1)}


def reference_unmoved(reference: Reference) -> None:
    """The reference still has the digest it was made with."""
    now = reference.fingerprint()
    if now != reference.digest:
        raise InvariantError(
            f"the reference has changed: its digest was {reference.digest} when it was made and is {now}. A trained or"
            " refreshed reference makes every KL term a lie. Look for code that shares its tensors with the learner or"
            " puts them in an optimizer"
        )


def keeps_caches(engine: object) -> bool:
    """Returns whether turns go on under new weights over the caches of the old ones (engine.update=stale).

    Their tokens then have log-probs of neither version. The gauge `engine/stale_gap` tells how far off these are.
    """
    return getattr(engine, "update", "") == "stale"


def no_distance_yet(
    learner_logp: np.ndarray, reference_logp: np.ndarray, dtype: str, exact: Exact, temperature: float
) -> None:
    """KL to the reference is 0 while learner and reference hold the same weights."""
    gap = Gap.of(reference_logp, learner_logp)
    bound = allowed(dtype, gap, learner_logp, exact, temperature)
    if not gap.worst <= bound.worst:
        raise InvariantError(
            "the reference scores differently from the learner although both hold the same weights (worst log-prob gap"
            f" {gap.worst:.3g}, bound {bound.worst:.2g} in {dtype}). The KL term would start wrong. Check that the"
            " reference was loaded from the checkpoint the stage starts from, in the same dtype and without dropout"
        )


def masks_cover_what_was_said(groups: Sequence[Group], said_tokens: int) -> None:
    """The masks of a step's episodes cover exactly the tokens that the engine counted as sampled.

    Tokens of other seats are in no mask; they are added to the count. What an opponent said is not this engine's.
    """
    # What an opponent said, or a demonstration shows, this engine did not sample. A group's greedy answer it did.
    played = [e for g in groups for e in (*g.episodes, *filter(None, [g.greedy])) if e.own]
    covered = sum(e.spoken for e in played) + sum(t.tokens for e in played for t in e.seats if t.policy)
    # Turns that had ended before their sibling was aborted were counted by the engine too.
    covered += sum(g.aborted_tokens for g in groups)
    if covered != said_tokens:
        raise InvariantError(
            f"the masks of this step cover {covered} tokens, but the engine said {said_tokens}. Some observation is"
            " trained on, or some spoken token is not. Tokens must enter a transcript through see() and say() only"
        )


def said_by_these_weights(groups: Sequence[Group], promised: Sequence[int]) -> None:
    """Every spoken token was said by one of the promised versions of the weights.

    The last promised version is the learner's; it is the only one if samples may not be older than the learner. With
    `staleness=K` the promised versions are those of the learner at the beginning of this step and of the K steps before
    it.
    """
    now, others = promised[-1], sorted({*promised[:-1]} - {promised[-1]})
    # Tokens of demonstrations and of opponents have marks in the place of a version.
    known = {*promised, SHOWN, OPPOSED}
    for g in groups:
        for e in g.episodes:
            for s in e.segments:
                if unpromised := [v for v in s.version[s.mask].tolist() if v not in known]:
                    also = f" and samples may also be of {', '.join(map(str, others))}" if others else ""
                    raise InvariantError(
                        f"task {g.task.id!r} has tokens said by version {unpromised[0]}, while the learner holds"
                        f" version {now}{also}. Either a weight sync did not happen, or tokens are stamped with another"
                        " version than the one that said them; both make every ratio wrong"
                    )


def stops_are_true(groups: Sequence[Group], stop_ids: Sequence[int], max_tokens: int) -> None:
    """An episode that stopped by itself ends in a stop token. One cut off, or ended by a stop string, does not."""
    stops = set(stop_ids)
    for g in groups:
        for e in g.episodes:
            s = e.segments[-1]
            # An episode that ended otherwise (the world ended it, an error) says nothing of its last token.
            if not stops or e.stop not in (Stop.SAID, Stop.STRING, Stop.LENGTH) or not s.mask.any() or s.shown:
                continue
            # Unspoken tokens may follow the last spoken one, so that one is looked for.
            ends_in_stop = int(s.ids[-1] if s.mask[-1] else s.ids[np.flatnonzero(s.mask)[-1]]) in stops
            if ends_in_stop != (e.stop is Stop.SAID):
                raise InvariantError(
                    f"task {g.task.id!r} ended with reason {e.stop.value!r}, but its last token"
                    f" {'is' if ends_in_stop else 'is not'} a stop token ({s.spoken} tokens said, at most {max_tokens}"
                    " a turn). Length shaping and filters read the reason: find who drops the token or the reason"
                )


def _band_line(band: Gauges, dtype: str) -> tuple[str, ...]:
    """The noise band as a line for people, where rounding is coarser than float32."""
    if "mismatch/band" not in band or dtype == "float32":
        return ()
    size = band["mismatch/band"].mean
    return (f"noise band: sampler and learner differ by up to {size:.2g} nats for 99 % of tokens in {dtype}",)


def _price_line(price: float | None, fresh_M: np.ndarray) -> tuple[str, ...]:
    """Says what `exact=true` achieves and costs, as a line for people."""
    if price is None:
        return ()
    return (
        f"exact: sampler and learner agree bit for bit on {int(fresh_M.sum())} tokens; scoring them as the sampler does"
        f" takes {price:.2g} times as long as the learner's own forward pass, and comes on top of it",
    )


def _comparable_pass(roles: ReinforceRoles, micro: Batch, logp_M: np.ndarray, fresh_M: np.ndarray) -> np.ndarray:
    """The log-probs of a training pass, in a form that `sampler_agrees` can compare with the sampler's.

    In a mixture of experts the learner may choose other experts than the sampler, and is then another model. Then
    A + B is returned. A, the training pass less the learner's score, both by the learner's experts, must be 0. B, the
    score by the sampler's experts, must be the sampler's log-probs. So `sampler_agrees` finds what is wrong in either.
    """
    follower, gap = as_sampled(roles.learner), Gap.of(micro[MU][fresh_M], logp_M[fresh_M])
    replays_start = roles.run.model.router_replay == "start"
    may_differ = micro.routed_N is not None and (replays_start or follower is not roles.learner)
    # Where the gap is within the least bound anyway, no further pass is made.
    if not may_differ or gap.within(LEAST[roles.run.model.dtype]):
        return logp_M
    apart_M = logp_M.astype(np.float64) - roles.learner.score(micro)
    # With `router_replay=start` the minibatch has none of the sampler's choices to follow. The sampler's own log-probs
    # stand for B and cancel: only A is compared here, and `ExpertsCheck` compares learner and sampler.
    return (apart_M + (micro[MU] if replays_start else follower.score(micro))).astype(np.float32)


class SamplerCheck(Observer):
    """Sampler, learner and reference agree when they hold the same weights; rollouts hold what the engine sampled."""

    def __init__(self, *, fresh: bool) -> None:
        self._fresh = fresh
        """Whether learner, sampler and reference still hold the same weights."""

    def needs(self, roles: ReinforceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=event.first)

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e):
                # The engine counts by itself what it said, so nothing that builds transcripts can hide a token.
                masks_cover_what_was_said(e.played, int(e.engine["engine/tokens"].sum))
                # The last version is asked of the learner and not taken from the promise: fresh tokens are of its
                # weights.
                said_by_these_weights(e.played, (*e.promised[:-1], roles.trainer.version))
                stops_are_true(e.played, roles.sampling.stop_ids or (), roles.sampling.max_tokens)
            case ScoredEvent(e, groups):
                if roles.reference is not None:
                    reference_unmoved(roles.reference)
                # Once: after the first update they hold other weights, and the step's first minibatch is compared
                # instead.
                if self._fresh and any(g.episodes for g in groups):
                    self._fresh = False
                    return self._same_weights(roles, e, groups)
            case DifferentiatedEvent(packed, passes) if packed.first:
                return ObserverReport(self._ratio_is_one(roles, packed, passes))
        return None

    def _same_weights(self, roles: ReinforceRoles, e: Experience, groups: Sequence[ScoredGroup]) -> ObserverReport:
        """Before the first optimizer step of a stage: rho = 1, and KL 0 to a reference that began as the policy.

        The learner scores the same tokens in up to four ways, each for one question:
        as_sampled_M: in a mixture of experts by those that the sampler chose. Does the sampler agree?
        own_forward_M: with `exact=true` by its own forward pass, not the sampler's. Does that agree too?
        learner_M: as it scores the episodes of a step. How wide is the noise band?
        own_experts_M: by the experts that its own routers choose, as a reference's do. Does the reference agree?
        """
        episodes = [s for g in groups for s in g.episodes]
        segments = [s for g in groups for x in g.group.judged for s in x.segments]  # with the sampler's own experts
        packed = Packed.of(segments, [i for i, x in enumerate(episodes) for _ in x.episode.segments])
        learner_M, follower = roles.learner.score(packed), as_sampled(roles.learner)
        version = np.concatenate([s.version[s.mask] for s in segments])
        mu = np.concatenate([s.logp[s.mask] for s in segments])
        # Tokens of earlier weights, as in groups that waited in a queue, are not compared.
        fresh, dtype = version == roles.trainer.version, roles.run.model.dtype
        exact = lambda: follower.exact(packed)  # noqa: E731
        same = roles.run.exact
        as_sampled_M = learner_M if follower is roles.learner else follower.score(packed)
        gauges = sampler_agrees(packed, mu, as_sampled_M, fresh, dtype=dtype, exact=exact, text=roles.text, same=same)
        if same:  # then `score` is the sampler's own pass, and this one shares no code with it
            own_forward_M = roles.learner.packed_score(packed)
            sampler_agrees(packed, mu, own_forward_M, fresh, dtype=dtype, exact=exact, text=roles.text)
        # Episodes are numbered anew without holes, as sums over episodes need it.
        sequence = np.unique(packed.sequence_M[fresh], return_inverse=True)[1]
        band = noise_band(roles.stage.algorithm, mu[fresh], learner_M[fresh], sequence, dtype)
        # Only a reference that began as the policy is at a distance of 0.
        if roles.reference is not None and roles.own_reference and REFERENCE in episodes[0]:
            reference = np.concatenate([x for s in episodes for x in s[REFERENCE]])
            routers = roles.learner.routers()  # a reference follows no choices
            own_experts_M = learner_M if routers is None else routers.read(packed, replay=False).logp
            no_distance_yet(
                own_experts_M, reference, dtype, lambda: roles.learner.exact(packed), packed.sampling.temperature
            )
        return ObserverReport(
            merge(gauges, band), (*_band_line(band, dtype), *_price_line(roles.learner.price(packed), fresh))
        )

    def _ratio_is_one(self, roles: ReinforceRoles, packed: PackedEvent, passes: Passes) -> Gauges:
        """On the first optimizer step after a push, every token sampled with the current weights has rho = 1."""
        gauges, dtype, same = list[Gauges](), roles.run.model.dtype, roles.run.exact
        for micro, logp in zip(passes.micros, passes.logp, strict=True):
            exact = lambda batch=micro: as_sampled(roles.learner).exact(batch)  # noqa: E731
            fresh = micro[VERSION] == packed.version
            if keeps_caches(roles.run.engine):
                # A segment with a token of other weights has a cache of theirs, and so no log-prob that the learner
                # could have.
                fresh &= ~np.isin(micro.segment_M, micro.segment_M[~fresh])
            learner = _comparable_pass(roles, micro, logp.astype(np.float32), fresh)
            mu, text = micro[MU], roles.text
            gauges.append(sampler_agrees(micro, mu, learner, fresh, dtype=dtype, exact=exact, text=text, same=same))
        return merge(*gauges)
