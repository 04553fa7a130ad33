"""Two algorithms for `algorithm=algorithm.py:NAME`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posttrain.algorithm.loss.push_factor import Push, TrustInputs, pushed
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.piece import positive
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.trust_region import Clip, TrustRegion
from posttrain.ladder.policy_rows import DR_GRPO

CAUTIOUS = patch(
    DR_GRPO,
    "cautious",
    "an example",
    clip=Clip(low=0.1, high=0.1),
    pull=KL(coef=0.01, estimator="rk3"),
    note="a narrower clip, and a KL whose gradient is exact off policy too",
)


@dataclass(frozen=True, kw_only=True)
class Uneven(TrustRegion):
    """A new piece: the ratio itself, and failures speak more quietly than successes."""

    failures: float = 0.5

    def __post_init__(self) -> None:
        positive("clip.failures", self.failures)

    def words(self) -> str:
        return f"rho, times {self.failures:g} where A < 0"


@pushed.register
def _(region: Uneven, look: TrustInputs) -> Push:
    """The mathematics of the piece: a push a token, and which tokens are silenced (none)."""
    push_M = look.ratio_M * torch.where(look.down_M, region.failures, 1.0)
    nothing_M = torch.zeros_like(push_M, dtype=torch.bool)
    return Push(push_M, nothing_M, nothing_M)


BOLD = patch(DR_GRPO, "bold", "an example", clip=Uneven(failures=0.5), note="successes count twice")
