"""Whether what the policy computes with is what it learns with: every weight that matters gets a gradient, and moves by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner
from posttrain.core.sampling import Sampling
from posttrain.core.types import Gauge, Gauges, Segment
from posttrain.role.listening import Heard

NUDGE = 0.05
"""How far a weight that got no gradient is moved, in standard deviations of its tensor, to see whether it matters."""
FELT = 1e-3
"""Nats by which a log-prob must change for a nudge to count as felt: far above rounding, far below what such a nudge does."""


def gradient_reaches(learner: Learner, ids: np.ndarray) -> None:
    """Every trainable parameter that the log-probs depend on gets a gradient from them.

    A batch can leave a parameter alone for good reasons (all returns are 0, one token is kept, an expert is not chosen), so this
    does not look at one: it differentiates the log-probs of int32 `ids`, at least two, each after all before it. A parameter without a
    gradient is nudged; if the log-probs feel it, it is cut off from the loss.
    """
    packed = packed_text(ids)
    learner.train_mode(True)
    parameters = {n: p for n, p in learner.parameters().items() if not n.startswith("value_head.")}
    logp = learner.forward(packed, entropy=False, value=False).logp
    cotangent = torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype, device=logp.device)
    gradients = torch.autograd.grad(logp, list(parameters.values()), cotangent, allow_unused=True)
    learner.train_mode(False)
    silent = [n for n, g in zip(parameters, gradients, strict=True) if g is None or not bool(g.any())]
    cut = [n for n in silent if _felt(learner, packed, parameters[n])]
    if cut:
        raise InvariantError(
            f"{len(cut)} of {len(parameters)} trainable parameters get no gradient from the log-probs that they change: {', '.join(cut[:5])}"
            f"{', ...' if len(cut) > 5 else ''}. They are cut off from the loss and will stay as they are. Look for a detach, a hook, or a frozen copy "
            "between them and the log-probs"
        )


def packed_text(ids: np.ndarray) -> Packed:
    """int32 ids as if the policy had said all but the first."""
    spoken = np.arange(len(ids)) > 0
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of([Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))])


@torch.no_grad()
def _felt(learner: Learner, packed: Packed, parameter: Any) -> bool:
    before = learner.score(packed)
    kept = parameter.detach().clone()
    size = float(kept.float().std()) if kept.numel() > 1 else 0.0
    signs = torch.arange(kept.numel(), device=kept.device).remainder(2).mul(2).sub(1).view_as(kept)
    parameter.add_((signs * NUDGE * (size or max(0.01, float(kept.abs().max())))).to(kept.dtype))
    after = learner.score(packed)
    parameter.copy_(kept)
    return float(np.abs(after - before).max()) > FELT


def moved(heard: Heard, parameters: Mapping[str, Any], *, lr: float, eps: float, clip: float) -> Gauges:
    """In an optimizer step every parameter with a gradient moves, where the learning rate is larger than its rounding.

    Args:
        heard: the step, with the largest gradient of each parameter and the weight it belongs to.
        parameters: what the optimizer moves, after the step. lr: of this step.
    """
    shrink = min(1.0, clip / heard.norm) if heard.norm > 0 else 1.0
    pushed: list[str] = []
    still: list[str] = []
    for name, top in heard.largest.items():
        spacing = float(np.spacing(np.float32(abs(top.weight))))
        if abs(top.gradient) * shrink < 10 * eps or lr < 8 * spacing:
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


def watched(parameters: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Copies of the parameters of at most `most` numbers, as they are before an optimizer step."""
    return {name: p.detach().clone() for name, p in parameters.items() if p.numel() <= most}
