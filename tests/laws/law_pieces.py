"""Two pieces that posttrain does not have, with numbers, words and mathematics. `test_open_pieces` offers them for a
while.

In the library each would be two files: the type in `core/pieces/{trust,shape}.py`, the functions in
`algorithm/{trust,shape}.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.algorithm.credit.reward_shaping import Array, dropped, shape
from posttrain.algorithm.loss.push_factor import Push, TrustInputs, pushed
from posttrain.core.types import Episode
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.piece import positive
from posttrain.ladder.pieces.shape import Shaping
from posttrain.ladder.pieces.trust_region import TrustRegion


@dataclass(frozen=True, kw_only=True)
class Bell(TrustRegion):
    """ratio * exp(-(width * log ratio)^2): smooth, and quiet on both sides."""

    width: float = 2.0

    def __post_init__(self) -> None:
        positive("clip.width", self.width)

    def words(self) -> str:
        return f"rho exp(-({self.width:g} log rho)^2)"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        yield from super().refuses(a)
        if a.anchor == "behaviour":
            yield "clip=bell needs the learner's own log-probs. Set anchor=start"

    def memory(self) -> str:
        return "a bell a token"


@pushed.register
def _(region: Bell, look: TrustInputs) -> Push:
    push_M = look.ratio_M * torch.exp(-((region.width * look.log_ratio_M) ** 2))
    nothing_M = torch.zeros_like(push_M, dtype=torch.bool)
    return Push(push_M, nothing_M, nothing_M)


@dataclass(frozen=True, kw_only=True)
class Brief(Shaping):
    """reward - price * |y|, and nothing is learned from answers above `most` tokens."""

    price: float = 0.01
    most: int = 1000

    def __post_init__(self) -> None:
        positive("shape.brief.price", self.price)

    def words(self) -> str:
        return f"r - {self.price:g} |y|; above {self.most} tokens a response carries no gradient"

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("entropy",)

    def uses(self) -> str:
        return "lengths"


@shape.register
def _(piece: Brief, rewards: Array, episodes: Sequence[Episode], max_tokens: int) -> Array:
    return rewards - piece.price * np.array([e.spoken for e in episodes], np.float64)


@dropped.register
def _(piece: Brief, episode: Episode) -> str:
    return "not brief" if episode.spoken > piece.most else ""
