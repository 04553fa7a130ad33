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
    mix_M: Tensor | None = None
    chosen_M: Tensor | None = None
    imitate_M: Tensor | None = None
    shown_M: Tensor | None = None
    target_M: Tensor | None = None
    top_ids_MK: Tensor | None = None
    top_logp_MK: Tensor | None = None

    def episode_sum(self, x_M: Tensor) -> Tensor:
        """[M] -> [M]: every token gets the sum over its whole episode, all segments. Differentiable."""
        return x_M.new_zeros(self.episodes).index_add(0, self.sequence_M, x_M)[self.sequence_M]

    def episode_length(self) -> Tensor:
        """[M]: spoken tokens of each token's episode."""
        return self.episode_sum(torch.ones_like(self.weight_M))

    def episode_any(self, x_M: Tensor) -> Tensor:
        """bool [M] -> bool [M]: whether any token of the episode is True."""
        return self.episode_sum(x_M.to(self.weight_M.dtype)) > 0

    def to_go(self, x_M: Tensor, discount: float) -> Tensor:
        """[M] -> [M]: sum over this and later tokens of the episode of discount^distance * x."""
        return discounted(x_M, self.sequence_M, discount)


def discounted(x_M: Tensor, sequence_M: Tensor, discount: float) -> Tensor:
    """Discounted sums to the end of each run of equal `sequence_M`, by doubling: log2(longest) vector operations."""
    out_M, step, factor = x_M, 1, discount
    while step < len(out_M) and factor > 0:
        same = sequence_M[:-step] == sequence_M[step:]
        if not bool(same.any()):
            break
        ahead_M = torch.zeros_like(out_M)
        ahead_M[:-step] = torch.where(same, out_M[step:], torch.zeros_like(out_M[step:]))
        out_M, step, factor = out_M + factor * ahead_M, step * 2, factor * factor
    return out_M


def streams(batch: Batch, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Streams:
    """The batch's streams on `device`; numbers in `dtype`."""

    def put(x_M: np.ndarray | None) -> Tensor | None:
        return None if x_M is None else torch.as_tensor(x_M, dtype=dtype, device=device)

    def exactly(x: np.ndarray | None, kind: torch.dtype) -> Tensor | None:
        return None if x is None else torch.as_tensor(x, dtype=kind, device=device)

    tops = batch.top_ids_MK is not None
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
        mix_M=put(batch.mix_M),
        chosen_M=exactly(batch.chosen_M, torch.bool),
        imitate_M=put(batch.imitate_M),
        shown_M=exactly(batch.shown_M, torch.bool),
        target_M=exactly(batch.target_M, torch.int64) if tops else None,
        top_ids_MK=exactly(batch.top_ids_MK, torch.int64),
        top_logp_MK=put(batch.top_logp_MK),
    )
