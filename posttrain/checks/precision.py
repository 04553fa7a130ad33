"""Whether the gradient that an optimizer holds in a float16 run is that of the loss, without the loss's scale."""

from __future__ import annotations

import math
from typing import Any

import torch

from posttrain.core.errors import InvariantError
from posttrain.core.gauge import Gauge
from posttrain.core.ports import Learner
from posttrain.core.row_gradient import held
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport, PackedEvent
from posttrain.role.passes import Needs, Passes
from posttrain.role.roles import StageRoles

BOUND = 0.1
"""Largest difference between the norms of the two gradients, relative to the norm, that counts as float16's noise."""


def gradient_of(learner: Learner, passes: Passes, names: list[str]) -> float:
    """The norm of the gradient of these parameters: a second backward pass from d loss / d log-prob and d loss / d
    entropy, in float64 from the parameters on. nan where it overflows."""
    parameters = learner.parameters()
    total: dict[str, torch.Tensor] = {}
    learner.train_mode(True)
    for i, micro in enumerate(passes.micros):
        read = bool(passes.entropy_grad)
        scores = learner.forward(micro, entropy=read, value=False)
        outputs, cotangents = [scores.logp], [passes.logp_grad[i]]
        if read:
            outputs, cotangents = [*outputs, scores.entropy], [*cotangents, passes.entropy_grad[i]]
        given = [torch.as_tensor(c * passes.scale).to(o) for o, c in zip(outputs, cotangents, strict=True)]
        found = torch.autograd.grad(outputs, [parameters[n] for n in names], given, allow_unused=True)
        for name, g in zip(names, found, strict=True):
            if g is not None:
                total[name] = total.get(name, 0) + g.double() / passes.scale
    learner.train_mode(False)
    return math.sqrt(math.fsum(float(g.square().sum()) for g in total.values()))


class ScaleCheck(Observer):
    """On the first step of a stage whose loss is scaled: the optimizer holds the gradient of the loss itself.

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
        gradients = {n: t.grad for n, t in trained.items() if t.grad is not None}
        norm = math.sqrt(math.fsum(float(held(g).double().square().sum()) for g in gradients.values()))
        whole = len(passes.logp_grad) == len(passes.micros) and len(passes.entropy_grad) in (0, len(passes.micros))
        if passes.value or roles.stage.stores_top or not whole or not gradients or not math.isfinite(norm) or not norm:
            return None
        wanted = gradient_of(roles.learner, passes, list(gradients))
        if not math.isfinite(wanted) or not wanted:
            return None
        self._done = True
        if abs(norm / wanted - 1) > BOUND:
            raise InvariantError(
                f"the optimizer holds a gradient of norm {norm:.3g}, and that of the loss is {wanted:.3g} (the loss was"
                f" scaled by {passes.scale:g}). The clip and the update would act on another size than the configured"
                " one. Take the scale out where gradients are gathered, before anything reads them"
            )
        return ObserverReport({"canary/scale_gap": Gauge(abs(norm / wanted - 1), 1)})
