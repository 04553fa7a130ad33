"""Whether what the policy computes with is what it learns with: every weight that matters gets a gradient, and moves by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner
from posttrain.core.run import Optimizer
from posttrain.core.sampling import Sampling
from posttrain.core.types import Gauge, Gauges, Segment
from posttrain.role.listening import Heard, Largest

NUDGE = 0.05
"""How far a weight that got no gradient is moved, in standard deviations of its tensor, to see whether it matters."""
FELT = 1e-3
"""Nats by which a log-prob must change for a nudge to count as felt: far above rounding, far below what such a nudge does."""


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


def packed_text(ids: np.ndarray) -> Packed:
    """int32 ids as if the policy had said all but the first."""
    spoken = np.arange(len(ids)) > 0
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of([Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))])


@torch.no_grad()
def _felt(learner: Learner, packed: Packed, parameter: Any, before: np.ndarray) -> bool:
    kept = parameter.detach().clone()
    size = float(kept.float().std()) if kept.numel() > 1 else 0.0
    signs = torch.arange(kept.numel(), device=kept.device).remainder(2).mul(2).sub(1).view_as(kept)
    parameter.add_((signs * NUDGE * (size or max(0.01, float(kept.abs().max())))).to(kept.dtype))
    after = learner.score(packed)
    parameter.copy_(kept)
    return float(np.abs(after - before).max()) > FELT


def moved(heard: Heard, parameters: Mapping[str, Any], config: Optimizer, lr: float, state: Mapping[str, Any]) -> Gauges:
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
