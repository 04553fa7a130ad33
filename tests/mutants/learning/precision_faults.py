"""Bugs of narrow number types: a scale that stays in the gradient, a head that rounds its logits, a scale that is
forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]
SHOWS = ("model.dtype=float16",)


@fault(
    "scale_left_in_gradient",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.gather",
    what="the scale of the loss is not taken out before the gradient is clipped",
    harm="every step is clipped as if its gradient were 65,536 times larger, so their sizes are lost",
    source="pain 10",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def gather(self: Any) -> None:
        from posttrain.engine.optimizer.loss_scale import LossScale

        scale, self._scale = self._scale, LossScale(1.0)
        real(self)
        self._scale = scale

    return gather


@fault(
    "head_in_half",
    seam="posttrain.engine.head.logit_transform:logits",
    what="the learner's head multiplies and rounds its logits in bfloat16",
    harm="log-probs keep two or three digits, so ratios are noise before anything has moved",
    source="pain 3",
    shows=("model.dtype=bfloat16",),
)
def _(real: Real) -> Real:
    def logits(hidden: Any, weight: Any, *rest: Any) -> Any:
        wide = real(hidden, weight, *rest)
        return wide.bfloat16().to(wide.dtype)

    return logits


@fault(
    "loss_scale_not_resumed",
    seam="posttrain.engine.optimizer.loss_scale:LossScale.load",
    what="a resumed run begins with the first scale of the loss again",
    harm="the first steps overflow and are left out, so a resumed run is another run",
    source="pain 8",
    shows=SHOWS,
    needs="resume",
)
def _(real: Real) -> Real:
    return lambda self, state: None
