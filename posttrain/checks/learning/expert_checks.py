"""Checks that the experts of a mixture are those that the sampler chose, and that routers and experts learn.

The sampler's choices are judged in one place only: in a pass of the learner that follows them. In it every router has
the sampler's hidden states but for rounding. So where it would have chosen otherwise, both experts score alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.checks.learning.gradient_and_update_checks import gradient_norm, may_be_rounded_away
from posttrain.checks.sampling.sampler_checks import sampler_agrees
from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.expert_choices import NEAR, UNKNOWN, RoutedPass, Routers, known_rows
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.types import OPPOSED, OUTSIDE, SHOWN, Segment
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    PackedEvent,
    PlayedEvent,
    PushedEvent,
)
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

TOKENS = 2048
"""Most tokens of a step that are read."""
FOLLOWS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.2}
"""Largest difference of log-probs of two passes over the same experts."""
LEARNS_FROM = 8
"""Tokens with a gradient of their own from which an expert must learn."""
LOUD = 1e-3
"""Share of the largest gradient of a minibatch below which a token's is not counted."""
AT_ONCE = 64
"""Experts whose update is followed in a step."""


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Some segments of a step that the policy said itself, with their sampler's choices."""

    packed: Packed
    mu_M: np.ndarray
    """Log-probs of the sampler."""
    fresh_N: np.ndarray
    """bool: tokens of segments whose spoken tokens all come from the present weights."""

    @classmethod
    def of(cls, e: Experience, version: int) -> StepTokens | None:
        """At most `TOKENS` tokens of a step; None if no segment has its experts. `version`: of the present weights."""
        segments, total = list[Segment](), 0
        for s in (s for g in e.groups for x in g.judged for s in x.segments):
            # The sampler that recorded the choices is this run's: demonstrations and other models have none or others.
            recorded = s.routed is not None and s.mask.any() and not np.isin(s.version, (SHOWN, OUTSIDE, OPPOSED)).any()
            # Segments are taken whole. One that does not fit is left out, and a shorter one may still be taken.
            if recorded and total + len(s.ids) <= TOKENS:
                segments.append(s)
                total += len(s.ids)
        if not segments:
            return None
        fresh = np.array([bool(np.all(s.version[s.mask] == version)) for s in segments])
        return cls(
            Packed.of(segments),
            # Log-probs of spoken tokens alone, in the order of `Packed`.
            np.concatenate([s.logp[s.mask] for s in segments]),
            # One flag for each packed token, not for each spoken one: experts compute the prompt as well.
            np.repeat(fresh, [len(s.ids) for s in segments]),
        )


def every_token_has_its_experts(packed: Packed) -> None:
    """The choices of all tokens that a spoken one depends on are known."""
    assert packed.routed_N is not None
    # Of each segment the last place that predicts a spoken token. What stands behind it changes no log-prob.
    known_N, last_S = known_rows(packed.routed_N), np.full(len(packed.lengths_S), -1)
    np.maximum.at(last_S, packed.segment_M, packed.source_M)
    # A spoken token depends on every token before it, so all of these must be known.
    needed = np.arange(len(known_N)) <= np.repeat(last_S, packed.lengths_S)
    if lost := int(np.count_nonzero(needed & ~known_N)):
        raise InvariantError(
            f"the experts of {lost} of {int(needed.sum())} tokens are not known, although the engine that computed them"
            " records its routers' choices. The learner would choose for them by itself: find who drops them on the way"
        )


def choices_are_the_samplers(followed: RoutedPass, packed: Packed, fresh_N: np.ndarray, dtype: str) -> Gauges:
    """The sampler's choices are those that the present weights make: no other expert scores higher, but for rounding.

    Args:
        followed: a pass of the learner that follows the choices.
        fresh_N: the tokens that the learner's weights computed in the sampler.
    """
    assert packed.routed_N is not None
    known = known_rows(packed.routed_N)
    # First that the pass did what it was asked: without that its scores mean nothing.
    if bool(np.any(followed.used[known] != packed.routed_N[known])):
        raise InvariantError(
            "a pass that was given the sampler's experts computed tokens by others: the routers' choices are not taken"
            " up. Look for a layer that chooses again, or a hook that was removed"
        )
    # Older weights rightly chose other experts. So only tokens of the present weights are judged.
    chosen = np.flatnonzero(fresh_N & known)
    if not len(chosen):
        return {}
    regret = followed.regret[chosen]
    # Rounding grows with the logits, so the bound does.
    bound = NEAR[dtype] * max(1.0, followed.scale)
    # Written so that a NaN is wrong.
    if not float(regret.max()) <= bound:
        n, r = (int(i) for i in np.unravel_index(int(regret.argmax()), regret.shape))
        raise InvariantError(
            f"the sampler's experts are not those of its weights: at position {int(packed.positions_N[chosen[n]])},"
            f" router {r}, an expert that was not chosen scores {float(regret[n, r]):.3g} higher than a chosen one"
            f" (bound {bound:.2g} in {dtype}); so at {float((regret > bound).mean()):.1%} of the choices. They are of"
            " other tokens, other layers or other weights, and replaying them would train another model"
        )
    return {"experts/regret": Gauge(float(regret.max()), 1)}


def learner_follows(roles: ReinforceRoles, routers: Routers, packed: Packed) -> Gauges:
    """The learner's scoring pass computes tokens by the experts it is given, whatever they are."""
    # One segment is enough: the choices of all its tokens are replaced.
    segment = packed.select([0])
    assert segment.routed_N is not None
    known = known_rows(segment.routed_N)[:, None, None]
    # Every choice moved on by one: experts that no router chose. Only a pass that follows them agrees with the other.
    shifted = replace(
        segment, routed_N=np.where(known, (segment.routed_N + 1) % routers.experts, segment.routed_N).astype(np.int16)
    )
    wanted, scored = routers.read(shifted, replay=True).logp, roles.learner.score(shifted)
    gap, bound = float(np.abs(wanted - scored).max()), FOLLOWS[roles.run.model.dtype]
    if not gap <= bound:
        raise InvariantError(
            f"model.router_replay={roles.run.model.router_replay}, and the learner does not follow the experts it is"
            f" given: its log-probs differ by {gap:.3g} from those of a pass that does (bound {bound:g}). Ratios would"
            " be those of another model than the sampler's"
        )
    return {"canary/router_replay": Gauge(gap, 1)}


def load_gauges(routed: np.ndarray, experts: int) -> Gauges:
    """Gauges of how evenly tokens are spread over the experts, mean over routers.

    Args:
        routed: [T, R, K]: the K known choices of each token at each of R routers.
    """
    # For each router [R, E]: how often each expert was chosen.
    count = np.stack([np.bincount(routed[:, r].ravel(), minlength=experts) for r in range(routed.shape[1])])
    share = count / np.maximum(count.sum(1, keepdims=True), 1)
    # An expert without tokens adds 0: log 1. Divided by log E, so that an even spread is 1.
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), 1) / np.log(max(experts, 2))
    routers = len(share)
    return {
        # 1 where the choices are spread evenly over the experts, more where one has more than its part.
        "experts/load_most": Gauge(float(share.max(1).sum()) * experts, routers),
        "experts/load_entropy": Gauge(float(entropy.sum()), routers),
        "experts/dead": Gauge(float((count == 0).sum()), count.size),
    }


def differing(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """How often the sets of experts differ; `a` and `b` are [T, R, K].

    Returns the share of the T * R choices that differ, and the share of the tokens of which any choice differs.
    """
    # As sets: the order within the K experts is that of their weights and may change by rounding.
    other = np.any(np.sort(a, 2) != np.sort(b, 2), 2)
    return float(other.mean()), float(other.any(1).mean())


@dataclass(frozen=True, eq=False)
class FollowedExpert:
    """The element of an expert's weights with the largest gradient, and its value before the optimizer step."""

    parameter: str
    expert: int
    at: int
    """Its place in the flattened parameter, which stacks all experts."""
    before: float


def experts_learn(
    batch: Batch,
    routers: Routers,
    trained: Mapping[str, Any],
    expected: Any,
    first: int,
    heard: np.ndarray,
    certain: Callable[[], np.ndarray] | None = None,
) -> list[FollowedExpert]:
    """Routers and experts have a gradient if they computed tokens that the loss learns from. Returns the elements that
    must move in the optimizer step. Where ranks hold whole experts, each calls it at once and follows its own.

    Args:
        trained: what the optimizer updates, by parameter. Frozen ones are not in it.
        expected: a function of (name, gradient, place) to the move that the step will make there; None if not known.
        first: the place at which the walk over the followed experts begins. After the last one comes the first.
        heard: bool [M]: the tokens that the loss learns from (`learned_from`).
        certain: how often the learner has chosen each expert without doubt, where its passes did not follow the choices
            of the batch: `certain_load`. It is asked where an expert seems not to learn.
    """
    assert batch.routed_N is not None
    # An expert that is never chosen has no gradient, and rightly so. Hence the tokens of each are counted first.
    count, certain_counts = load_of(batch, heard, batch.routed_N, routers.experts), None
    followed = list[FollowedExpert]()
    for r, (gate, names) in enumerate(zip(routers.names, routers.stacked, strict=True)):
        grads = {n: trained[n].grad for n in (gate, *names) if n in trained}
        # Of all experts, for the checks of the layer; and of this rank's own, whose weights it can follow.
        busy = np.flatnonzero(count[r] >= LEARNS_FROM)
        busy_here = np.flatnonzero(count[r][routers.held] >= LEARNS_FROM)
        if not len(busy):
            continue
        # An exchange of all ranks, so it comes before anything that one of them alone might raise.
        largest = {n: routers.of_all(_by_expert(g)) for n, g in grads.items() if n != gate and g is not None}
        weighs = batch.routed_N.shape[2] > 1  # the weight of one expert may always be 1
        # A frozen router is not among the gradients and has nothing to learn.
        learns = gate not in grads or (grads[gate] is not None and bool(grads[gate].any()))
        if weighs and not learns and any(s.any() for s in largest.values()):
            raise InvariantError(
                f"router {gate} has no gradient, and the experts of its layer have one: the weights of the experts are"
                " not computed by the learner's router. Replay the choice alone, or freeze the router"
                " (optimizer.freeze)"
            )
        for name, sizes in largest.items():
            # A layer with no gradient anywhere is frozen or cut off, which other checks tell.
            still = [e for e in busy.tolist() if not sizes[e] and sizes.any()]
            if still and certain is not None:
                # A pass without replay costs a forward pass: it is made only when an expert looks wrong, and once for
                # all layers.
                certain_counts = certain() if certain_counts is None else certain_counts
                still = [e for e in still if certain_counts[r][e] >= LEARNS_FROM]
            if still:
                raise InvariantError(
                    f"expert {still[0]} of {name} has no gradient, although it computed {int(count[r][still[0]])}"
                    " tokens that the loss learns from: it would never learn"
                )
            followed += _followed(name, grads[name], trained[name], busy_here, expected)
    # Another part of the experts at each step, so that in time all of them are followed.
    start = first % max(len(followed), 1)
    return (followed[start:] + followed[:start])[:AT_ONCE]


def learned_from(batch: Batch, passes: Passes) -> np.ndarray:
    """bool [M]: the tokens that the loss learns from: it has a gradient by their log-prob, and that can move. Others
    are silenced by a trust region or by a choice of tokens, or are certain (as where one token alone was kept).

    >>> asked, logp = np.array([0.5, 0.0, 0.5]), np.array([-1.0, -1.0, 0.0])
    >>> (felt := np.abs(asked) * -np.expm1(logp)) > LOUD * felt.max()
    array([ True, False, False])
    """
    asked_M, logp_M = (passes.joined(batch, column) for column in (passes.logp_grad, passes.logp))
    # A softmax passes on asked * (1 - p): a token that is certain asks nothing of the weights.
    felt_M = np.abs(asked_M) * -np.expm1(np.minimum(logp_M, 0.0))
    return felt_M > LOUD * felt_M.max(initial=0.0)


def load_of(batch: Batch, heard: np.ndarray, routed_N: np.ndarray, experts: int) -> np.ndarray:
    """int64 [R, E]: how often each expert was chosen for a token that predicts one of `heard`.

    Rows of `routed_N` that are UNKNOWN do not count.
    """
    # The experts of the place that predicts the token, whose hidden state its log-prob is read from.
    rows = routed_N[batch.source_M[heard]]
    chosen = [rows[:, r][rows[:, r] != UNKNOWN] for r in range(routed_N.shape[1])]
    return np.stack([np.bincount(x.ravel(), minlength=experts) for x in chosen])


def certain_load(batch: Batch, heard: np.ndarray, alone: RoutedPass, experts: int, dtype: str) -> np.ndarray:
    """`load_of` the choices that the learner's routers make now, without those that rounding decides.

    Args:
        alone: a pass of the learner over the batch that follows no choices.
    """
    # The least of the chosen logits leads all others by more than rounding.
    sure = alone.regret < -NEAR[dtype] * max(1.0, alone.scale)
    return load_of(batch, heard, np.where(sure[:, :, None], alone.own, UNKNOWN), experts)


def _by_expert(gradient: Any) -> np.ndarray:
    """[E]: the largest |gradient| of each expert."""
    return gradient.detach().abs().flatten(1).amax(1).float().cpu().numpy()


def _followed(name: str, gradient: Any, tensor: Any, busy: np.ndarray, expected: Any) -> list[FollowedExpert]:
    """Of each busy expert the element with the largest gradient, if the step moves it by more than rounding."""
    out, width = list[FollowedExpert](), gradient[0].numel()
    for e in busy.tolist():
        # Index into the flattened stack of all experts: expert e begins at e * width.
        at = e * width + int(gradient[e].detach().abs().argmax())
        value = float(tensor.detach().flatten()[at])
        move = expected(name, gradient.detach(), at)
        # Where the gradient is no number, the optimizer may leave the step out.
        if move is not None and not math.isnan(move) and not may_be_rounded_away(move, value):
            out.append(FollowedExpert(name, e, at, value))
    return out


def experts_moved(followed: Sequence[FollowedExpert], trained: Mapping[str, Any]) -> Gauges:
    """The optimizer's step moved every expert that it should."""
    still = [f for f in followed if float(trained[f.parameter].detach().flatten()[f.at]) == f.before]
    if still:
        raise InvariantError(
            f"expert {still[0].expert} of {still[0].parameter} has a gradient and did not move in an optimizer step,"
            f" nor did {len(still) - 1} others of {len(followed)}: the optimizer leaves some of a layer's experts out"
        )
    return {"canary/experts_moved": Gauge(len(followed), 1)} if followed else {}


class ExpertsCheck(Observer):
    """Checks a mixture of experts whose engine records its routers' choices.

    The choices are the sampler's, the learner follows them where it should, and routers and experts learn. It also
    reports the gauges of load, mismatch and drift.
    """

    def __init__(self) -> None:
        self._tokens: StepTokens | None = None
        self._own_choices: np.ndarray | None = None
        self._followed: list[FollowedExpert] = []

    def needs(self, roles: ReinforceRoles, event: PackedEvent) -> Needs:
        return Needs(gradients=_is_checked(event))

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        routers = roles.learner.routers()
        if routers is None:
            return None
        match event:
            case PlayedEvent(e):
                with roles.clock.of("check"):
                    return self._played(roles, routers, e)
            case DifferentiatedEvent(packed, passes) if _is_checked(packed) and passes.logp_grad:
                batch = packed.batch
                heard = learned_from(batch, passes)
                self._followed = experts_learn(
                    batch,
                    routers,
                    roles.trainer.trained(),
                    _moves(roles, event.share),
                    AT_ONCE * packed.index,
                    heard,
                    _certain(roles, routers, batch, heard),
                )
            case LearnedEvent() if self._followed:
                # Let go before anything is raised: it holds numbers of weights that are gone.
                followed, self._followed = self._followed, []
                return ObserverReport(experts_moved(followed, roles.trainer.trained()))
            case PushedEvent() if self._tokens is not None and self._own_choices is not None:
                with roles.clock.of("check"):
                    return self._pushed(routers, self._tokens, self._own_choices)
        return None

    def _played(self, roles: ReinforceRoles, routers: Routers, e: Experience) -> ObserverReport | None:
        """The checks and gauges of a step's choices, before it is learned from."""
        self._tokens = tokens = StepTokens.of(e, roles.trainer.version)
        if tokens is None:
            return None
        packed, dtype = tokens.packed, roles.run.model.dtype
        assert packed.routed_N is not None
        every_token_has_its_experts(packed)
        # Two passes of the same tokens: by the sampler's experts, and by the learner's own.
        followed, alone = routers.read(packed, replay=True), routers.read(packed, replay=False)
        self._own_choices, known = alone.own, known_rows(packed.routed_N)
        # Turns that went on under new weights have experts of several versions, none of which can be judged.
        fresh = tokens.fresh_N if not _other_caches(roles) else np.zeros_like(tokens.fresh_N)
        gauges = choices_are_the_samplers(followed, packed, fresh, dtype)
        if roles.run.model.router_replay == "start":  # what is learned from has other experts than the sampler's
            exact = lambda: routers.followed().exact(packed)  # noqa: E731
            # From packed tokens to spoken ones: the flag of the place that predicts each.
            fresh_M = fresh[packed.source_M]
            gauges |= sampler_agrees(
                packed, tokens.mu_M, followed.logp, fresh_M, dtype=dtype, exact=exact, text=roles.text
            )
        if roles.run.model.router_replay != "none" and due(e.index):
            # The scoring pass is the one that training compares with, so it is the one that must follow.
            gauges |= learner_follows(roles, routers, packed)
        choices, rows = differing(packed.routed_N[known], alone.own[known])
        gauges |= load_gauges(packed.routed_N[known], routers.experts)
        gauges |= {"experts/differ": Gauge(choices, 1), "experts/tokens_differ": Gauge(rows, 1)}
        for name, logp in (("experts/gap_replayed", followed.logp), ("experts/gap_alone", alone.logp)):
            gauges[name] = Gauge(float(np.abs(logp.astype(np.float64) - tokens.mu_M).sum()), len(logp))
        return ObserverReport(gauges)

    def _pushed(self, routers: Routers, tokens: StepTokens, before: np.ndarray) -> ObserverReport:
        """Reports how far the step's updates moved the routers, on the step's own tokens."""
        self._tokens = self._own_choices = None
        # The same tokens before and after, so every choice that differs is the work of the updates.
        choices, rows = differing(before, routers.read(tokens.packed, replay=False).own)
        return ObserverReport({"experts/drift": Gauge(choices, 1), "experts/rerouted": Gauge(rows, 1)})


def _is_checked(packed: PackedEvent) -> bool:
    """Returns whether the check looks at a minibatch: the first of a due step, if its experts are known."""
    return packed.first and due(packed.index) and packed.batch.routed_N is not None


def _other_caches(roles: ReinforceRoles) -> bool:
    """Returns whether turns go on under new weights, so that a sequence's experts may be those of several versions."""
    return getattr(roles.run.engine, "update", "drain") != "drain" and bool(roles.stage.staleness)


def _certain(
    roles: ReinforceRoles, routers: Routers, batch: Batch, heard: np.ndarray
) -> Callable[[], np.ndarray] | None:
    """`certain_load` of a learner that chooses by itself; None of one that follows the choices of the batch."""
    model = roles.run.model
    if model.router_replay != "none":
        return None
    return lambda: certain_load(batch, heard, routers.read(batch, replay=False), routers.experts, model.dtype)


def _moves(roles: ReinforceRoles, share: float) -> Any:
    """A function that gives the move of one number in the next optimizer step, as `experts_learn` asks for it.

    It gives None where an optimizer's definition holds only for whole updates (`ExpectedUpdate.along`).
    """
    optimizer, config = roles.trainer.optimizer, roles.stage.optimizer
    norm = gradient_norm(optimizer, {n: p.grad for n, p in roles.trainer.trained().items() if p.grad is not None})
    # As in `StepGradients.of`: an optimizer from outside need not know of `share`.
    share_argument = {} if share == 1 else {"share": share}

    def move(name: str, gradient: Any, at: int) -> float | None:
        update = optimizer.expected_update(config, name, gradient, norm, at, **share_argument)
        return None if update.along else float(update.move)

    return move
