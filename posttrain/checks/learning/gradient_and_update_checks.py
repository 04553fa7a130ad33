"""Checks that an optimizer step is the configured one, and every parameter that matters gets a gradient and moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.checks.learning.rank_gradient import DEAF, cotangent, silent_in_parts, silent_on_all_ranks
from posttrain.checks.stage_history import due
from posttrain.config.stages.stage import Optimizer
from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import ALONE, Ranks, joint_norm, of_every, of_one_copy
from posttrain.core.exchange.row_gradient import held, number, place, square_sum
from posttrain.core.exchange.scores import ExpectedUpdate, Reads
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.ports import Learner
from posttrain.core.streams import ADVANTAGE
from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.learner.learner import HEADS
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.role.events import DifferentiatedEvent, Event, LearnedEvent, Observer, ObserverReport, PackedEvent
from posttrain.role.learning.logprob_tolerance import packed_text
from posttrain.role.roles import StageRoles
from posttrain.system.errors import InvariantError

NUDGE = 0.05
"""How far a parameter without a gradient is moved to see whether it matters, in standard deviations of its tensor."""
FELT = 1e-3
"""Nats by which some log-prob must change for the parameter to matter. It is far above rounding, and far below the
usual effect of such a move."""

IN_FULL = 1 << 21
"""The smallest parameters, up to this number of elements together, have their first update checked in full: 28 bytes
are held for each element. Of every other parameter only the element with the largest gradient is checked."""
SMALLEST = 1e-12
"""Weights nearer to 0 count as this large in bounds on rounding, since an update far below the rounding of other
weights may be lost in float32."""
ROUNDING = 3e-7
"""Rounding error of a float32 weight after an addition, relative to its size."""
UNDERFLOW = 1e-36
"""Optimizer state that is nowhere larger is not compared: below it float32 loses digits, or the whole number."""
UPDATE_BOUND = 0.02
"""Largest difference of a first optimizer step from the expected one, relative to the size of a full step
(`ExpectedUpdate.size`; for AdamW the learning rate)."""
ALONG_NOISE = 0.25
"""For an update that is judged as a whole (`ExpectedUpdate.along`): how far its length along the expected one may be
from the expected length by rounding alone, as a share. Muon computes in bfloat16. Measured over 3,000 ill-conditioned
gradients a shape it is off by up to .20 with 2 rows, .09 with 4, and .02 with 32."""


def gradient_reaches(learner: Learner, ids: np.ndarray) -> None:
    """Every trainable parameter that the log-probs depend on gets a gradient from them.

    A training batch can give a parameter no gradient for good reasons: all returns are 0, one token is kept, an expert
    is not chosen. So no batch is used here. The log-probs of a fixed sequence are differentiated. A parameter without
    a gradient is moved a little. If that changes the log-probs, the parameter is cut off from the loss, which is an
    error. A value head must get its gradient from the values.

    Args:
        ids: int32, the ids of the fixed sequence, at least two.
    """
    packed = packed_text(ids)
    learner.train_mode(True)
    # A value head changes no log-prob, and a reward head is no part of the policy: only the rest must hear the
    # log-probs.
    parameters = {n: p for n, p in learner.parameters().items() if not n.startswith(HEADS)}
    head = {n: p for n, p in learner.parameters().items() if n.startswith("value_head.")}
    # Several ranks exchange inside their passes, so they have ways of their own that all of them go.
    if isinstance(learner, ShardedLearner):
        silent = silent_on_all_ranks(learner, packed, parameters, head)
    elif isinstance(learner, TensorLearner):
        silent = silent_in_parts(learner, packed, parameters, head)
    else:
        scores = learner.forward(packed, Reads(value=bool(head)))
        if head:
            _reaches_head(scores.value, head)
        silent = _silent(scores.logp, parameters, cotangent(scores.logp))
    # What is scored here is scored without training mode, as every comparison before and after a move.
    learner.train_mode(False)
    unmoved = learner.score(packed)
    cut = [n for n in silent if _felt(learner, packed, parameters[n], unmoved)]
    if cut:
        raise InvariantError(
            f"{len(cut)} of {len(parameters)} trainable parameters get no gradient from the log-probs that they change:"
            f" {', '.join(cut[:5])}{', ...' if len(cut) > 5 else ''}. They are cut off from the loss and will stay as"
            " they are. Look for a detach, a hook, or a frozen copy between them and the log-probs"
        )


def _reaches_head(value: torch.Tensor | None, head: Mapping[str, Any]) -> None:
    """InvariantError if a parameter of the value head gets no gradient from the values."""
    # The values are another output than the log-probs, so a head that is cut off shows only here.
    deaf = [n for n, p in head.items() if not p.requires_grad]
    if not deaf and value is not None and value.requires_grad:
        deaf = _silent(value.sum(), head, keep=True)
    elif not deaf:
        # The values were computed without a gradient: all of the head is cut off.
        deaf = list(head)
    if deaf:
        raise InvariantError(DEAF.format(", ".join(deaf)))


def _silent(
    output: torch.Tensor, parameters: Mapping[str, Any], factors: torch.Tensor | None = None, *, keep: bool = False
) -> list[str]:
    """Returns the names of the parameters that get no gradient from an output.

    Args:
        factors: the weights of the output's numbers; None where it is one number.
        keep: the graph is used once more.
    """
    wanted = list(parameters.values())
    gradients = torch.autograd.grad(output, wanted, factors, allow_unused=True, retain_graph=keep)
    return [n for n, g in zip(parameters, gradients, strict=True) if g is None or not bool(g.any())]


@torch.no_grad()
def _felt(learner: Learner, packed: Packed, parameter: Any, before: np.ndarray) -> bool:
    """Returns whether some log-prob changes when the parameter is moved. `before`: the log-probs without the move."""
    original = parameter.detach().clone()
    # A rank without rows of this weight moves nothing, and takes part in the scoring: it is an exchange of all ranks.
    if not original.numel():
        return float(np.abs(learner.score(packed) - before).max()) > FELT
    # A tensor that is all one number has no spread: its size stands for it, and 0.01 where that is smaller.
    size = float(original.float().std()) if original.numel() > 1 else 0.0
    # Signs alternate, since adding one number to all elements may leave softmax and norms as they were.
    signs = torch.arange(original.numel(), device=original.device).remainder(2).mul(2).sub(1).view_as(original)
    parameter.add_((signs * NUDGE * (size or max(0.01, float(original.abs().max())))).to(original.dtype))
    after = learner.score(packed)
    # The original is put back, bit for bit: subtracting the move would leave rounding.
    parameter.copy_(original)
    return float(np.abs(after - before).max()) > FELT


def served_is_trained(served: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """The weights that the sampler gets are those that the optimizer updates, but for small constants of a model."""
    # Tensors that are no floats (indices, masks) are never trained.
    never = {n: t for n, t in served.items() if n not in trained and t.is_floating_point()}
    size, total = sum(t.numel() for t in never.values()), sum(t.numel() for t in served.values())
    if size > 0.005 * total:
        raise InvariantError(
            f"{len(never)} of {len(served)} tensors ({size / total:.0%} of the weights) never reach the optimizer:"
            f" {', '.join(list(never)[:5])}{', ...' if len(never) > 5 else ''}. They will stay as they are. Check"
            " requires_grad and what the optimizer was built from"
        )


@dataclass(frozen=True)
class Largest:
    """The element of a parameter with the largest gradient."""

    index: int
    """In the flattened parameter."""
    weight: float
    """Its value before the step."""
    move: float
    """Number that the step must add to that value."""
    size: float = math.inf
    """Size of a full step (`ExpectedUpdate.size`); inf where only whole updates follow the definition
    (`ExpectedUpdate.along`)."""


def gradient_norm(optimizer: Any, grads: Mapping[str, Any]) -> float:
    """Norm of the whole gradient, of which each of several ranks has a part. All ranks call it at once."""
    # A sparse gradient holds some rows. All others are 0.
    norm_here = math.sqrt(math.fsum(square_sum(held(g)) for g in grads.values()))
    ranks: Ranks = getattr(optimizer, "ranks", ALONE)
    if ranks.world > 1:
        # Each rank has its part of the weights. With `replicas` only the ranks of one copy count.
        return joint_norm(of_one_copy(ranks, norm_here, "gradient"))
    # Other ranks split some weights and hold others whole (`GradientParts`).
    parts = getattr(optimizer, "parts", None)
    return norm_here if parts is None else parts.norm(grads)


@dataclass(frozen=True)
class StepGradients:
    """The gradients an optimizer gets for a step, and the update its definition expects. Made just before the step."""

    norm: float
    """Norm of all gradients together."""
    largest: Mapping[str, Largest]
    """For every parameter with a gradient that is not 0."""
    expected: Mapping[str, ExpectedUpdate] = field(default_factory=dict[str, ExpectedUpdate])
    """For the smallest parameters, of `IN_FULL` elements together, in the first step."""
    before: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Copies of the same parameters."""
    first: bool = True
    """Whether this is the optimizer's first step."""

    @classmethod
    def of(cls, optimizer: Any, config: Optimizer, share: float = 1.0) -> StepGradients:
        """The gradients of the step that the optimizer is about to take.

        Args:
            config: the stage's settings, whatever the optimizer was built with.
            share: the share of the learning rate that the step uses.
        """
        # An optimizer from outside need not know of `share`, so it is passed only where it is not 1.
        trained, share_argument = optimizer.trained(), {} if share == 1 else {"share": share}
        grads = {n: p.grad.detach() for n, p in trained.items() if p.grad is not None}
        # The norm is an exchange that every rank must reach. So it comes before gradients without a row are left out.
        norm = gradient_norm(optimizer, grads)
        # A rank may have no row of a weight.
        grads = {n: g for n, g in grads.items() if held(g).numel()}
        largest: dict[str, Largest] = {}
        for name, g in grads.items():
            # The element with the largest gradient moves furthest, so there an update is surest to exceed rounding.
            at = place(g, int(held(g).abs().argmax()))
            # A gradient that is 0 everywhere asks for no move.
            if float(number(g, at)):
                expected_there = optimizer.expected_update(config, name, g, norm, at, **share_argument)
                weight = float(trained[name].detach().flatten()[at])
                # Where only the whole update follows its definition, no bound on a single number holds: inf.
                largest[name] = Largest(
                    at, weight, float(expected_there.move), math.inf if expected_there.along else expected_there.size
                )
        # Whole parameters are compared in the first step only, since copies and expected state of them are held.
        # An optimizer that does not count its steps is never at its first.
        first = not optimizer.state_tensors().get("steps", 1)
        small = _smallest(grads) if first else []
        expected = {n: optimizer.expected_update(config, n, grads[n], norm, **share_argument) for n in small}
        return cls(norm, largest, expected, {n: trained[n].detach().clone() for n in small}, first)


def _smallest(grads: Mapping[str, Any]) -> list[str]:
    """Names of the smallest parameters that have `IN_FULL` elements together."""
    names = sorted(grads, key=lambda n: grads[n].numel())
    ends = np.cumsum([grads[n].numel() for n in names])
    return names[: int((ends <= IN_FULL).sum())]


def may_be_rounded_away(move: float, weight: float) -> bool:
    """Returns whether a move of a float32 weight is below 8 units in its last place, so that losing it is no fault."""
    return abs(move) < 8 * float(np.spacing(np.float32(max(SMALLEST, abs(weight)))))


def moved(handed: StepGradients, parameters: Mapping[str, Any], lr: float) -> Gauges:
    """An optimizer step changes every parameter with a gradient, if the update is larger than the parameter's rounding.

    Args:
        handed: the gradients and expected updates of the step.
        parameters: what the optimizer updates, after the step.
        lr: the learning rate of this step.
    """
    pushed = {n: top for n, top in handed.largest.items() if not may_be_rounded_away(top.move, top.weight)}
    still = [n for n, top in pushed.items() if float(parameters[n].detach().flatten()[top.index]) == top.weight]
    if still:
        raise InvariantError(
            f"{len(still)} of {len(pushed)} parameters with a gradient did not move in an optimizer step:"
            f" {', '.join(still[:5])}{', ...' if len(still) > 5 else ''}. The optimizer holds other tensors than the"
            f" ones that train, or leaves some out. Check what it was built from, and that the learning rate ({lr:g} in"
            " this step) is what you meant"
        )
    return {"canary/moved": Gauge(len(pushed), len(handed.largest))} if pushed else {}


def keeps_to_schedule(config: Optimizer, handed: StepGradients, parameters: Mapping[str, Any], lr: float) -> None:
    """A step in the middle of a schedule moves the number with the largest gradient of each parameter as configured."""
    for name, top in handed.largest.items():
        # One element of each parameter stands for all of it.
        move = float(parameters[name].detach().flatten()[top.index]) - top.weight
        # The slack is the rounding of the weight, and a share of the move and of a hundredth of a full step. With an
        # infinite size it is infinite, and only a weight that is no number is refused.
        slack = ROUNDING * max(SMALLEST, abs(top.weight)) + UPDATE_BOUND * (abs(top.move) + top.size / 100)
        if not abs(move - top.move) <= slack:
            raise InvariantError(
                f"an optimizer step moved {name} by {move:.3g} at element {top.index}, and the configured one moves it"
                f" by {top.move:.3g} (learning rate {lr:g} in this step; schedule={config.schedule},"
                f" horizon={config.horizon}, lr={config.lr:g}). The schedule began again or is another one, or the"
                " optimizer's state is not that of the steps so far"
            )


@dataclass(frozen=True)
class Update:
    """The largest difference of an optimizer step from the expected one."""

    name: str
    """The parameter that has it."""
    moved: float
    """Difference of the move, relative to the size of a full step."""
    state: float
    """Difference of the optimizer's state, relative to its largest number."""


def departure(handed: StepGradients, after: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Update:
    """The largest difference between a step and what was expected of it, over all elements that are checked.

    Args:
        after: what the optimizer updates, after the step.
        state: the optimizer's state after the step.
    """
    worst = Update("", 0.0, 0.0)
    for name, expected in handed.expected.items():
        # In float64 on the host: the difference of two float32 weights must not be rounded again.
        old, new = (x.detach().double().cpu() for x in (handed.before[name], after[name]))
        moved_off, state_off = _off(new - old, old, expected), 0.0
        for word, want in expected.state.items():
            size = float(want.abs().max())
            # State that is tiny everywhere has lost digits, or is 0, and says nothing.
            if size > UNDERFLOW and (saved := state.get(f"{word}.{name}")) is not None:
                state_off = max(state_off, _above_0(float((saved.double().cpu() - want).abs().max()) / size))
        if max(moved_off, state_off) > max(worst.moved, worst.state):
            worst = Update(name, moved_off, state_off)
    # Parameters that are too large to be compared whole are compared at their largest gradient.
    for name, top in handed.largest.items():
        if name not in handed.expected:
            move = float(after[name].detach().flatten()[top.index]) - top.weight
            # A size of infinity makes the difference 0: such an update is judged only as a whole.
            off = _above_0((abs(move - top.move) - ROUNDING * abs(top.weight)) / top.size)
            worst = Update(name, off, 0.0) if off > max(worst.moved, worst.state) else worst
    return worst


def _off(step: torch.Tensor, old: torch.Tensor, expected: ExpectedUpdate) -> float:
    """Distance of a step from the expected one, relative to the size of a full step, less what rounding explains.

    Args:
        step: float64, what the step added to the parameter.
        old: float64, the parameter before the step.
    """
    if expected.along:
        if not expected.size:
            return 0.0
        # The share of the expected step that the step goes along it, whatever noise lies across: 1 if right.
        apart = abs(float((step * expected.move).sum() / expected.move.square().sum()) - 1)
        return _above_0(apart - ALONG_NOISE)
    off = _above_0(float(((step - expected.move).abs() - ROUNDING * old.abs()).max()))
    # Where no move is expected there is no size to compare one with: it counts as 1, which is above every bound.
    return off / expected.size if expected.size else float(off > 0)


def _above_0(x: float) -> float:
    """`x`, at least 0. Infinite where it is no number, which every comparison would pass over."""
    return math.inf if math.isnan(x) else max(0.0, x)


def update_agrees(
    config: Optimizer, handed: StepGradients, after: Mapping[str, Any], state: Mapping[str, Any]
) -> Gauges:
    """The first optimizer step is exactly the configured one: learning rate, warm-up, decay and clip included."""
    worst = departure(handed, after, state)
    if worst.moved > UPDATE_BOUND or worst.state > UPDATE_BOUND:
        raise InvariantError(
            f"the first optimizer step is not the configured one: {worst.name} is off by {worst.moved:.3g} of a full"
            f" step, its state by {worst.state:.3g} of its size (gradient norm {handed.norm:.3g}; configured"
            f" {config.kind}, lr={config.lr:g}, warmup={config.warmup}, weight_decay={config.weight_decay:g},"
            f" clip={config.clip:g}). Something else moves the weights, or the optimizer was built with other settings"
        )
    return {"canary/update_gap": Gauge(worst.moved, 1)}


class UpdateCheck(Observer):
    """Every parameter that matters gets a gradient and moves; a stage's first optimizer step is the configured one.

    A step without credit may have nothing to check: the gradient of a KL term is 0 at the reference itself.
    """

    def __init__(self, *, moved: bool) -> None:
        self._moved = moved
        """Whether a step was checked already."""
        self._handed: StepGradients | None = None

    async def begin(self, roles: StageRoles[Any]) -> None:
        # Frozen parameters are served and rightly not trained.
        frozen = {n: p for n, p in roles.learner.parameters().items() if roles.stage.optimizer.frozen(n)}
        served = {s.name: s.tensor for s in roles.learner.shards()}
        served_is_trained(served, {**roles.trainer.trained(), **frozen})
        gradient_reaches(roles.learner, roles.sync.probe_ids)

    def on_event(self, roles: StageRoles[Any], event: Event) -> ObserverReport | None:
        match event:
            case DifferentiatedEvent(packed, _, share):
                # Where the learning rate falls or rises, later steps are compared too: a schedule may begin again.
                schedule_due = roles.stage.optimizer.schedule != "constant" and due(packed.index)
                # A step without credit may move nothing, so the check waits for one that has.
                checked = _calls_for_update(packed) and (schedule_due or not self._moved)
                # Made before the optimizer steps, from the gradients that it is about to get.
                self._handed = (
                    StepGradients.of(roles.trainer.optimizer, roles.stage.optimizer, share) if checked else None
                )
            case LearnedEvent(lr=lr) if self._handed is not None:
                handed, self._handed = self._handed, None  # it holds copies of weights
                return ObserverReport(self._follow(roles, handed, lr))
        return None

    def _follow(self, roles: StageRoles[Any], handed: StepGradients, lr: float) -> Gauges:
        """Compare a step with what was expected.

        Each of several ranks compares its own rows, and all get the same gauges.
        """
        # An error of one rank is raised on all: the others would wait at the next exchange.
        seen = merge(*of_every(roles.trainer.ranks, lambda: self._compare_rows(roles, handed, lr)))
        self._moved = self._moved or "canary/moved" in seen
        return seen

    def _compare_rows(self, roles: StageRoles[Any], handed: StepGradients, lr: float) -> Gauges:
        """The comparison of this rank's rows."""
        trained, optimizer = roles.trainer.trained(), roles.trainer.optimizer
        if self._moved:
            # The full comparison is of the first step; from then on the schedule alone can differ.
            keeps_to_schedule(roles.stage.optimizer, handed, trained, lr)
            return Gauges()
        # An optimizer that was resumed has taken steps already: only a first step is compared whole.
        checked = handed.first and (handed.expected or handed.largest)
        return merge(
            moved(handed, trained, lr),
            update_agrees(roles.stage.optimizer, handed, trained, optimizer.state_tensors()) if checked else {},
        )


def _calls_for_update(packed: PackedEvent) -> bool:
    """Returns whether a minibatch calls for an update: a policy's does if some credit in it is not 0."""
    # A stage that has no credit (imitation, preferences) always calls for an update.
    return ADVANTAGE not in packed.batch or bool(np.any(packed.batch[ADVANTAGE]))


def only_frozen_is_left_out(config: Optimizer, parameters: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """The optimizer updates every parameter that the settings do not freeze, and no other."""
    # Both directions: a frozen parameter that is trained, and a trained one that was left out.
    frozen = {n for n in parameters if config.frozen(n)}
    if extra := sorted(frozen & set(trained)):
        raise InvariantError(
            f"{len(extra)} of {len(frozen)} frozen parameters would be trained: {', '.join(extra[:5])}. The optimizer"
            " was built with other settings than the stage's"
        )
    if lost := sorted(set(parameters) - frozen - set(trained)):
        raise InvariantError(
            f"{len(lost)} parameters would not be trained, and optimizer.freeze={','.join(config.freeze)} does not name"
            f" them: {', '.join(lost[:5])}"
        )


def frozen_stays(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Frozen parameters have the same digests as before."""
    if changed := [n for n, digest in before.items() if after.get(n) != digest]:
        raise InvariantError(
            f"{len(changed)} of {len(before)} frozen parameters moved: {', '.join(changed[:5])}. Something else than"
            " the optimizer writes them, or it holds them although they are frozen"
        )


class FrozenCheck(Observer):
    """Frozen parameters stay as they were at the beginning of the stage, bit for bit."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def begin(self, roles: StageRoles[Any]) -> None:
        if roles.stage.optimizer.freeze:
            # Before the first step, so that nothing has moved if the settings do not hold.
            only_frozen_is_left_out(roles.stage.optimizer, roles.learner.parameters(), roles.trainer.trained())
            self._digests = self._present_digests(roles)

    def on_event(self, roles: StageRoles[Any], event: Event) -> ObserverReport | None:
        if not self._digests or not isinstance(event, LearnedEvent) or not due(event.packed.index):
            return None
        of_every(roles.trainer.ranks, lambda: frozen_stays(self._digests, self._present_digests(roles)))
        return ObserverReport({"canary/frozen": Gauge(len(self._digests), 1)})

    def _present_digests(self, roles: StageRoles[Any]) -> dict[str, str]:
        """The digest of each frozen parameter."""
        config = roles.stage.optimizer
        return fingerprints((n, p) for n, p in roles.learner.parameters().items() if config.frozen(n))
