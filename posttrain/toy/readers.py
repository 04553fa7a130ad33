"""A small policy with attention over positions: the position alone decides which earlier letters are read.

>>> reader = PositionReader(letters=4, positions=6, width=3, seed=0)
>>> tuple(reader(torch.tensor([[0, 1, 2]])).shape)
(1, 3, 4)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PositionReader(nn.Module):
    """Logits [B, T, letters] of the next letter: the mean of the letters so far, as vectors of size `width` that
    attention weighs by positions alone, goes through one matrix."""

    def __init__(self, *, letters: int, positions: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.attention = nn.Parameter(torch.randn(positions, positions, generator=generator) * 0.1)
        self.into = nn.Parameter(torch.randn(letters, width, generator=generator) * 0.5)
        self.out = nn.Parameter(torch.randn(width, letters, generator=generator) * 0.5)
        self.bias = nn.Parameter(torch.zeros(positions, letters))

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        shares = torch.softmax(self.attention[:n, :n].masked_fill(later, -torch.inf), -1)
        return shares @ self.into[ids] @ self.out + self.bias[:n]
