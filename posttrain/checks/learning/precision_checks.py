"""Checks that the gradient that an optimizer holds in a float16 run is that of the loss, without the loss's scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.core.exchange.ranks import joint_norm, of_one_copy
from posttrain.core.exchange.row_gradient import held, square_sum
from posttrain.core.exchange.scores import Reads
from posttrain.core.gauge import Gauge, Step
from posttrain.core.ports import Learner
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport, PackedEvent
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.roles import StageRoles
from posttrain.system.errors import InvariantError

GAP = "canary/scale_gap"
BOUND = 0.1
"""Largest difference between the norms of the two gradients, relative to the norm, that counts as float16's noise."""


def repeated_norm(learner: Learner, passes: Passes, names: list[str]) -> float:
    """The norm of the gradient of these parameters, by a second backward pass; nan where it overflows.

    The pass starts from the recorded d loss / d log-prob and d loss / d entropy. The gradients of the micro-batches are
    summed in float64.
    """
    parameters = learner.parameters()
    total: dict[str, torch.Tensor] = {}
    # In training mode, as the passes that are repeated were.
    learner.train_mode(True)
    for i, micro in enumerate(passes.micros):
        scores = learner.forward(micro, Reads(entropy=bool(passes.entropy_grad)))
        outputs, cotangents = [scores.logp], [passes.logp_grad[i]]
        if passes.entropy_grad:
            outputs, cotangents = [*outputs, scores.entropy], [*cotangents, passes.entropy_grad[i]]
        # The loss's scale goes in again, so that small cotangents do not vanish in float16, and out in float64 below.
        factors = [torch.as_tensor(c * passes.scale).to(o) for o, c in zip(outputs, cotangents, strict=True)]
        # A loss may not reach every parameter of every micro-batch.
        gradients = torch.autograd.grad(outputs, [parameters[n] for n in names], factors, allow_unused=True)
        for name, g in zip(names, gradients, strict=True):
            if g is not None:
                total[name] = total.get(name, 0) + g.double() / passes.scale
    learner.train_mode(False)
    return math.sqrt(math.fsum(square_sum(g) for g in total.values()))


def joined_norms(learner: ShardedLearner, passes: Passes, trained: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Two norms over all ranks: of the gradient that the optimizers hold, and of that of a second backward pass.

    The second pass is that of `repeated_norm`. Every rank calls this with the passes of all ranks and computes a share
    of them. A rank that has no share left still takes part in the exchanges.
    """
    ranks, parameters = learner.ranks, learner.parameters()
    gradients = {n: p.grad for n, p in trained.items() if p.grad is not None}
    # This pass must leave the gradients of the step as they are.
    step_gradients = {n: p.grad for n, p in parameters.items()}
    total: dict[str, torch.Tensor] = {}
    learner.train_mode(True)
    # The ranks take one micro-batch each, round by round.
    for begin in range(0, len(passes.micros), ranks.world):
        i = begin + ranks.rank
        has_share = i < len(passes.micros)
        # A rank without one goes through another's, times 0: its layers' exchanges are waited for by all.
        i = i if has_share else begin
        for p in parameters.values():
            p.grad = None
        scores = learner.forward(passes.micros[i], Reads(entropy=bool(passes.entropy_grad)))
        sums = [(torch.as_tensor(passes.logp_grad[i] * passes.scale * has_share).to(scores.logp) * scores.logp).sum()]
        if passes.entropy_grad and scores.entropy is not None:
            factor = torch.as_tensor(passes.entropy_grad[i] * passes.scale * has_share).to(scores.entropy)
            sums.append((factor * scores.entropy).sum())
        # One backward pass for both, since they share a graph. It is backward(), not `autograd.grad`: no graph reaches
        # `parameters`, and only backward() runs the hooks that sum gradients over ranks and put them there.
        torch.stack(sums).sum().backward()
        for name in gradients:
            if (g := parameters[name].grad) is not None:
                total[name] = total.get(name, 0) + g.double() / passes.scale
    learner.train_mode(False)
    for name, p in parameters.items():
        p.grad = step_gradients[name]
    norms = (math.sqrt(math.fsum(square_sum(g) for g in grads.values())) for grads in (gradients, total))
    # A rank holds rows, so both norms are joined from those of all ranks.
    first, second = (joint_norm(of_one_copy(ranks, norm, "gradient")) for norm in norms)
    return first, second


def scale_was_checked(steps: Sequence[Step]) -> bool:
    """Returns whether one of a stage's steps so far had a gradient that could be compared.

    A gradient of 0, or one that overflows, cannot be compared.
    """
    return any(GAP in s.gauges for s in steps)


class ScaleCheck(Observer):
    """In a stage whose loss is scaled, the optimizer holds the gradient of the loss itself.

    It is checked at the stage's first step with a gradient.

    It costs a second backward pass of that step. A loss that reads values or candidates is not checked: their
    gradients take other ways than through log-probs.
    """

    def __init__(self, *, done: bool) -> None:
        self._done = done

    def needs(self, roles: StageRoles[Any], event: PackedEvent) -> Needs:
        return Needs(gradients=not self._done and roles.trainer.optimizer.loss_scale != 1)

    def on_event(self, roles: StageRoles[Any], event: Event) -> ObserverReport | None:
        if self._done or not isinstance(event, DifferentiatedEvent) or event.passes.scale == 1:
            return None
        passes, trained = event.passes, roles.trainer.trained()
        # Each micro-batch must have told its gradients, or none its entropies: else the sum would lack a part.
        complete = len(passes.logp_grad) == len(passes.micros) and len(passes.entropy_grad) in (0, len(passes.micros))
        if passes.value or roles.stage.stores_top or not complete:
            return None
        if isinstance(roles.learner, ShardedLearner):
            norm, wanted = joined_norms(roles.learner, passes, trained)
        else:
            gradients = {n: t.grad for n, t in trained.items() if t.grad is not None}
            norm = math.sqrt(math.fsum(square_sum(held(g)) for g in gradients.values()))
            wanted = repeated_norm(roles.learner, passes, list(gradients)) if math.isfinite(norm) and norm else 0.0
        # Nothing to compare in this step. The next one is tried.
        if not math.isfinite(norm * wanted) or not norm * wanted:
            return None
        self._done = True
        if abs(norm / wanted - 1) > BOUND:
            raise InvariantError(
                f"the optimizer holds a gradient of norm {norm:.3g}, and that of the loss is {wanted:.3g} (the loss was"
                f" scaled by {passes.scale:g}). The clip and the update would act on another size than the configured"
                " one. Take the scale out where gradients are gathered, before anything reads them"
            )
        return ObserverReport({GAP: Gauge(abs(norm / wanted - 1), 1)})
