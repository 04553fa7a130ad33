"""A minibatch in torch: the streams of a core `Batch` on one device, and sums over episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Batch
from posttrain.core.streams import TOP_IDS, WEIGHT, Streamed


@dataclass(frozen=True, eq=False)
class Streams(Streamed[Tensor]):
    """The input of the loss, one entry per spoken token: the streams of a batch. Nothing here has a gradient."""

    HOLDER: ClassVar[str] = "the minibatch"
    sequence_M: Tensor
    """int64: episode of each token, 0..episodes-1."""
    episodes: int
    target_M: Tensor | None = None
    """int64: the sampled token, where the batch has candidates to compare it with."""

    def episode_sum(self, x_M: Tensor) -> Tensor:
        """[M] -> [M]: for every token the sum over its whole episode, all segments. Differentiable."""
        # Micro-batches hold whole episodes, so a sum is never one of a part.
        return x_M.new_zeros(self.episodes).index_add(0, self.sequence_M, x_M)[self.sequence_M]

    def episode_length(self) -> Tensor:
        """[M]: spoken tokens of each token's episode."""
        return self.episode_sum(torch.ones_like(self[WEIGHT]))

    def episode_any(self, x_M: Tensor) -> Tensor:
        """bool [M] -> bool [M]: whether any token of the episode is True."""
        return self.episode_sum(x_M.to(self[WEIGHT].dtype)) > 0

    def to_go(self, x_M: Tensor, discount: float) -> Tensor:
        """[M] -> [M]: sum over this and later tokens of the episode of discount^distance * x."""
        return discounted(x_M, self.sequence_M, discount)


def discounted(x_M: Tensor, sequence_M: Tensor, discount: float) -> Tensor:
    """Discounted sums to the end of each run of equal `sequence_M`, by doubling: log2(longest) vector operations."""
    # After round j, out_t = sum_{k < 2^j} d^k x_{t+k}. Adding d^{2^j} * out_{t + 2^j} doubles
    # the reach. Episodes are runs of equal `sequence_M`: a neighbour of another run adds 0.
    out_M, step, factor = x_M, 1, discount
    while step < len(out_M) and factor > 0:
        same = sequence_M[:-step] == sequence_M[step:]
        # No run is longer than `step`, so every sum has reached its end.
        if not bool(same.any()):
            break
        ahead_M = torch.zeros_like(out_M)
        ahead_M[:-step] = torch.where(same, out_M[step:], torch.zeros_like(out_M[step:]))
        out_M, step, factor = out_M + factor * ahead_M, step * 2, factor * factor
    return out_M


def streams(batch: Batch, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Streams:
    """The batch's streams on `device`: floats in `dtype`, integers as int64, booleans as they are."""
    # Laws pass float64 here, to compare gradients without rounding.
    kinds = {"f": dtype, "i": torch.int64, "b": torch.bool}

    def put(x: np.ndarray) -> Tensor:
        return torch.as_tensor(x, dtype=kinds[x.dtype.kind], device=device)

    return Streams(
        put(batch.sequence_M),
        batch.episodes,
        put(batch.target_M) if TOP_IDS in batch else None,
        streams={stream: put(x) for stream, x in batch.streams.items()},
    )
