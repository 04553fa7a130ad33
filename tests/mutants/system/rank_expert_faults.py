"""Faults of runs whose ranks hold whole experts. Each is planted in every process of the run, and acts only where there
are several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]
EXPERTS = "posttrain.engine.parallel.joined_experts:JoinedExperts"
SOURCE = "expert parallelism"


def _last(mesh: Any) -> bool:
    """Returns whether this is the last of several ranks."""
    return mesh.size() > 1 and mesh.get_local_rank() == mesh.size() - 1


@fault(
    "experts_of_another_rank",
    seam=f"{EXPERTS}.__call__",
    what="each rank takes its experts for those of the next one",
    harm="every token is computed by experts that its router did not choose",
    source=SOURCE,
    needs="rank_experts",
)
def _(real: Real) -> Real:
    def call(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        own = self.num_local_experts
        return real(self, hidden, (index + own) % (own * self.ep_mesh.size()), weights)

    return call


@fault(
    "rank_experts_left_out",
    seam=f"{EXPERTS}._joined",
    what="what the experts of one rank compute does not reach the sum",
    harm="tokens are computed by a part of their experts, and one rank works for nothing",
    source=SOURCE,
    needs="rank_experts",
)
def _(real: Real) -> Real:
    return lambda self, *given: real(self, *given) * (not _last(self.ep_mesh))


@fault(
    "gradients_into_experts_not_summed",
    seam=f"{EXPERTS}.__call__",
    what="the gradients that experts give to what went into them are those of one rank's experts",
    harm="routers and the layers below learn from a part of the experts, on each rank from another one",
    source=SOURCE,
    needs="rank_experts",
)
def _(real: Real) -> Real:
    def call(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        if self.ep_mesh.size() == 1:
            return real(self, hidden, index, weights)
        detached = real(self, hidden.detach(), index, weights.detach())
        own, at = self.num_local_experts, self.ep_mesh.get_local_rank()
        off = index // own != at
        part = self.experts_forward(hidden, (index % own).masked_fill(off, own), weights.masked_fill(off, 0.0))
        return detached.detach() + part - part.detach()

    return call


@fault(
    "rank_experts_never_learn",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.gather",
    what="the gradients of one rank's experts are lost where gradients are gathered",
    harm="tokens go on being sent to experts that stay as they were",
    source=SOURCE,
    needs="rank_experts",
)
def _(real: Real) -> Real:
    def gather(self: Any) -> None:
        real(self)
        if self.parts is None or not _last(self.parts.holders.mesh):
            return
        for p in self.trained().values():
            if p.ndim == 3 and p.grad is not None:
                p.grad.zero_()

    return gather
