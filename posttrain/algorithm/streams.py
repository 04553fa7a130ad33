"""A minibatch as torch sees it: the streams of a core `Batch` on one device, and sums over episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Batch


@dataclass(frozen=True, eq=False)
class Streams:
    """What the loss reads, one entry per spoken token [M]; nothing here is differentiated.

    Optional streams are None exactly where the batch has none. `logp_start_M` is None also on the first optimizer step
    after a sync, where the policy at the start of the step is the policy itself.
    """

    logp_mu_M: Tensor
    advantage_M: Tensor
    weight_M: Tensor
    sequence_M: Tensor
    """int64: episode of each token, 0..episodes-1."""
    episodes: int
    logp_start_M: Tensor | None = None
    logp_ref_M: Tensor | None = None
    value_M: Tensor | None = None
    return_M: Tensor | None = None

    def episode_sum(self, x_M: Tensor) -> Tensor:
        """[M] -> [M]: every token gets the sum over its whole episode, all segments. Differentiable."""
        return x_M.new_zeros(self.episodes).index_add(0, self.sequence_M, x_M)[self.sequence_M]

    def episode_length(self) -> Tensor:
        """[M]: spoken tokens of each token's episode."""
        return self.episode_sum(torch.ones_like(self.weight_M))


def streams(batch: Batch, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Streams:
    """The batch's streams on `device`; numbers in `dtype`."""

    def put(x_M: np.ndarray | None) -> Tensor | None:
        return None if x_M is None else torch.as_tensor(x_M, dtype=dtype, device=device)

    return Streams(
        logp_mu_M=torch.as_tensor(batch.logp_mu_M, dtype=dtype, device=device),
        advantage_M=torch.as_tensor(batch.advantage_M, dtype=dtype, device=device),
        weight_M=torch.as_tensor(batch.weight_M, dtype=dtype, device=device),
        sequence_M=torch.as_tensor(batch.sequence_M, dtype=torch.int64, device=device),
        episodes=batch.episodes,
        logp_start_M=put(batch.logp_start_M),
        logp_ref_M=put(batch.logp_ref_M),
        value_M=put(batch.value_M),
        return_M=put(batch.return_M),
    )
