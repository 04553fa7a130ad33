"""Whether an optimizer step is the configured one: every weight that matters gets a gradient, and moves by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner
from posttrain.core.run import Optimizer
from posttrain.core.streams import ADVANTAGE
from posttrain.core.types import Gauge, Gauges, merge
from posttrain.role.events import DifferentiatedEvent, Event, LearnedEvent, Observer, PackedEvent, Remark
from posttrain.role.probe import packed_text
from posttrain.role.roles import Learning

NUDGE = 0.05
"""How far a weight that got no gradient is moved, in standard deviations of its tensor, to see whether it matters."""
FELT = 1e-3
"""Nats by which a log-prob must change for a nudge to count as felt: far above rounding, far below what such a nudge does."""


SAMPLED = 1 << 20
"""Tensors up to this many numbers have their first update followed."""


UPDATE_BOUND = 0.02
"""Departure of a first optimizer step, in learning rates."""


def gradient_reaches(learner: Learner, ids: np.ndarray) -> None:
    """Every trainable parameter that the log-probs depend on gets a gradient from them.

    A batch can leave a parameter alone for good reasons (all returns are 0, one token is kept, an expert is not chosen), so this
    does not look at one: it differentiates the log-probs of int32 `ids`, at least two, each after all before it. A parameter without a
    gradient is nudged; if the log-probs feel it, it is cut off from the loss. A value head gets its gradient from the values.
    """
    packed = packed_text(ids)
    learner.train_mode(True)
    parameters = {n: p for n, p in learner.parameters().items() if not n.startswith("value_head.")}
    head = {n: p for n, p in learner.parameters().items() if n.startswith("value_head.")}
    scores = learner.forward(packed, entropy=False, value=bool(head))
    if head:
        _reaches_head(scores.value, head)
    logp = scores.logp
    cotangent = torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype, device=logp.device)
    gradients = torch.autograd.grad(logp, list(parameters.values()), cotangent, allow_unused=True)
    learner.train_mode(False)
    silent = [n for n, g in zip(parameters, gradients, strict=True) if g is None or not bool(g.any())]
    still = learner.score(packed)
    cut = [n for n in silent if _felt(learner, packed, parameters[n], still)]
    if cut:
        raise InvariantError(
            f"{len(cut)} of {len(parameters)} trainable parameters get no gradient from the log-probs that they change: {', '.join(cut[:5])}"
            f"{', ...' if len(cut) > 5 else ''}. They are cut off from the loss and will stay as they are. Look for a detach, a hook, or a frozen copy "
            "between them and the log-probs"
        )


def _reaches_head(value: torch.Tensor | None, head: Mapping[str, Any]) -> None:
    deaf = [n for n, p in head.items() if not p.requires_grad]
    if not deaf and value is not None and value.requires_grad:
        found = torch.autograd.grad(value.sum(), list(head.values()), allow_unused=True, retain_graph=True)
        deaf = [n for n, g in zip(head, found, strict=True) if g is None or not bool(g.any())]
    elif not deaf:
        deaf = list(head)
    if deaf:
        raise InvariantError(
            f"{', '.join(deaf)} get no gradient from the values that they make: values would stay as they are. Look for a detach, a hook, or "
            "requires_grad=False in the value head"
        )


@torch.no_grad()
def _felt(learner: Learner, packed: Packed, parameter: Any, before: np.ndarray) -> bool:
    kept = parameter.detach().clone()
    size = float(kept.float().std()) if kept.numel() > 1 else 0.0
    signs = torch.arange(kept.numel(), device=kept.device).remainder(2).mul(2).sub(1).view_as(kept)
    parameter.add_((signs * NUDGE * (size or max(0.01, float(kept.abs().max())))).to(kept.dtype))
    after = learner.score(packed)
    parameter.copy_(kept)
    return float(np.abs(after - before).max()) > FELT


def served_is_trained(served: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """What the sampler is served is what the optimizer moves (small constants of an architecture aside)."""
    left = {n: t for n, t in served.items() if n not in trained and t.is_floating_point()}
    size, whole = sum(t.numel() for t in left.values()), sum(t.numel() for t in served.values())
    if size > 0.005 * whole:
        raise InvariantError(
            f"{len(left)} of {len(served)} tensors ({size / whole:.0%} of the weights) never reach the optimizer: {', '.join(list(left)[:5])}"
            f"{', ...' if len(left) > 5 else ''}. They will stay as they are. Check requires_grad and what the optimizer was built from"
        )


@dataclass(frozen=True)
class Largest:
    """The number of a tensor with the largest gradient: where it lies in the flat tensor, its gradient and its weight before the step."""

    index: int
    gradient: float
    weight: float


def moved(heard: Handed, parameters: Mapping[str, Any], config: Optimizer, lr: float, state: Mapping[str, Any]) -> Gauges:
    """In an optimizer step every parameter with a gradient moves, where its move is larger than its rounding.

    Args:
        heard: the step, with the largest gradient of each parameter and the weight it belongs to.
        parameters: what the optimizer moves, after the step. lr: of this step. state: of the optimizer, after the step.
    """
    shrink = min(1.0, config.clip / heard.norm) if heard.norm > 0 else 1.0
    pushed: list[str] = []
    still: list[str] = []
    for name, top in heard.largest.items():
        spacing = float(np.spacing(np.float32(abs(top.weight))))
        if abs(top.gradient) * shrink < 10 * config.eps or lr * _step_size(config, state, name, top) < 8 * spacing:
            continue
        pushed.append(name)
        if float(parameters[name].detach().flatten()[top.index]) == top.weight:
            still.append(name)
    if still:
        raise InvariantError(
            f"{len(still)} of {len(pushed)} parameters with a gradient did not move in an optimizer step: {', '.join(still[:5])}"
            f"{', ...' if len(still) > 5 else ''}. The optimizer holds other tensors than the ones that train, or leaves some out. Check what it was "
            f"built from, and that the learning rate ({lr:g} in this step) is what you meant"
        )
    return {"canary/moved": Gauge(len(pushed), len(heard.largest))} if pushed else {}


def _step_size(config: Optimizer, state: Mapping[str, Any], name: str, top: Largest) -> float:
    """Learning rates by which AdamW moves a weight: 1 from rest, and any less where earlier gradients pull the other way."""
    parts = [state.get(f"{key}.{name}") for key in ("exp_avg", "exp_avg_sq", "step")]
    if any(x is None for x in parts):
        return 1.0
    first, second, taken = (float(x.flatten()[top.index if x.numel() > 1 else 0]) for x in parts if x is not None)
    taken = max(1.0, taken)
    mean, square = first / (1 - config.beta1**taken), second / (1 - config.beta2**taken)
    return min(1.0, abs(mean / (math.sqrt(square) + config.eps) + config.weight_decay * top.weight))


def watched(parameters: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Copies of the parameters of at most `most` numbers, as they are before an optimizer step."""
    return {name: p.detach().clone() for name, p in parameters.items() if p.numel() <= most}


@dataclass(frozen=True)
class Handed:
    """What an optimizer was handed for a step, before it moves."""

    gradients: dict[str, torch.Tensor]
    """float64 copies, of the tensors of at most `SAMPLED` numbers."""
    largest: dict[str, Largest]
    """Of every tensor with a gradient that is not 0."""
    norm: float
    before: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it moves, copied, of the small tensors; where it starts from rest."""
    from_rest: bool = False

    @classmethod
    def of(cls, optimizer: Any) -> Handed:
        moves = optimizer.trained()
        grads = {n: p.grad for n, p in moves.items() if p.grad is not None}
        small = {n: g.detach().double().cpu().clone() for n, g in grads.items() if g.numel() <= SAMPLED}
        largest: dict[str, Largest] = {}
        for name, g in grads.items():
            at = int(g.detach().abs().argmax())
            gradient, weight = (float(x.detach().flatten()[at]) for x in (g, moves[name]))
            if gradient:
                largest[name] = Largest(at, gradient, weight)
        norm = math.sqrt(math.fsum(float(g.detach().double().square().sum()) for g in grads.values()))
        from_rest = not optimizer.state_tensors().get("steps", 1)
        return cls(small, largest, norm, watched(moves, SAMPLED) if from_rest else {}, from_rest)


@dataclass(frozen=True)
class Update:
    """The largest departure of a first optimizer step from the configured one, each relative to what was expected."""

    name: str
    moved: float
    momentum: float


def first_update(
    config: Optimizer, heard: Handed, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> Update:
    """The first step of AdamW from rest is known in closed form: -lr * g / (|g| + eps) - lr * decay * w.

    Args:
        before, after: what the optimizer moves, around the step.
        state: its state afterwards; the moments are (1 - beta1) * g and (1 - beta2) * g^2.
    """
    lr = config.lr / config.warmup if config.warmup else config.lr
    shrink = min(1.0, config.clip / heard.norm) if heard.norm > 0 else 1.0
    worst = Update("", 0.0, 0.0)
    for name, raw in heard.gradients.items():
        g, old, new = raw * shrink, before[name].double().cpu(), after[name].detach().double().cpu()
        want = -lr * g / (g.abs() + config.eps) - lr * config.weight_decay * old
        moved = float(((new - old - want).abs() - 3e-7 * old.abs()).max()) / lr
        momentum = 0.0
        for key, part, want in (("exp_avg", 1 - config.beta1, g), ("exp_avg_sq", 1 - config.beta2, g * g)):
            size = part * float(want.abs().max())
            if size > 0 and (held := state.get(f"{key}.{name}")) is not None:
                momentum = max(momentum, float((held.double().cpu() - part * want).abs().max()) / size)
        if max(moved, momentum) > max(worst.moved, worst.momentum):
            worst = Update(name, moved, momentum)
    return worst


def update_agrees(
    config: Optimizer, heard: Handed, before: Mapping[str, torch.Tensor], after: Mapping[str, Any], state: Mapping[str, Any]
) -> Gauges:
    """The first optimizer step is the configured one, nothing more: learning rate, warm-up, decay and clip included."""
    worst = first_update(config, heard, dict(before), dict(after), dict(state))
    if worst.moved > UPDATE_BOUND or worst.momentum > UPDATE_BOUND:
        raise InvariantError(
            f"the first optimizer step is not the configured one: {worst.name} is off by {worst.moved:.3g} learning rates, its momentum by "
            f"{worst.momentum:.3g} of its size (gradient norm {heard.norm:.3g}; configured lr={config.lr:g}, warmup={config.warmup}, "
            f"weight_decay={config.weight_decay:g}, clip={config.clip:g}). Something else moves the weights, or the optimizer was built with other settings"
        )
    return {"canary/update_gap": Gauge(worst.moved, 1)}


class UpdateCheck(Observer):
    """Every parameter that matters gets a gradient and moves by it; the first optimizer step of a stage is the configured one.

    Without credit there may be nothing to follow: the gradient of a KL pull is 0 at the reference itself.
    """

    def __init__(self, *, moved: bool) -> None:
        self._moved = moved
        """Whether a step was followed already."""
        self._handed: Handed | None = None

    async def begin(self, h: Learning[Any]) -> None:
        served_is_trained(dict(h.learner.tensors()), h.trainer.trained())
        gradient_reaches(h.learner, h.sync.canary)

    def hear(self, h: Learning[Any], event: Event) -> Remark | None:
        match event:
            case DifferentiatedEvent(packed, _):
                self._handed = None if self._moved or not _carries(packed) else Handed.of(h.trainer.optimizer)
            case LearnedEvent(lr=lr) if self._handed is not None:
                return Remark(self._follow(h, self._handed, lr))
            case _:
                pass
        return None

    def _follow(self, h: Learning[Any], handed: Handed, lr: float) -> Gauges:
        trained, state, config = h.trainer.trained(), h.trainer.optimizer.state_tensors(), h.stage.optimizer
        seen = moved(handed, trained, config, lr, state)
        self._moved = bool(seen)
        return merge(seen, update_agrees(config, handed, handed.before, trained, state) if handed.from_rest else {})


def _carries(packed: PackedEvent) -> bool:
    """Whether a minibatch asks for an update: a policy's does where it carries credit."""
    return ADVANTAGE not in packed.batch or bool(np.any(packed.batch[ADVANTAGE]))
