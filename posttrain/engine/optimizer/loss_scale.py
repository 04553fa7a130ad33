"""Loss scaling for float16: gradients below 6e-8 are 0 there, so the loss is multiplied before the backward pass.

The gradient is divided again in float32 before anything reads it: the clip, the checks and the update see the true
one. Where a scaled gradient overflows, the step is left out and the scale is halved. After `PATIENCE` good steps in a
row it is doubled. The factors are powers of two, so scaling itself rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 2.0**16
"""The scale of the first step."""
LARGEST = 2.0**24
"""Doubling stops here."""
PATIENCE = 500
"""Good steps in a row after which the scale is doubled."""
WORDS = ("loss_scale", "loss_scale_good")
"""Names of the two numbers in a checkpoint."""


@dataclass
class LossScale:
    """The factor of the loss, and how many steps in a row were good with it."""

    value: float = FIRST
    good: int = 0

    def after(self, norm: float) -> None:
        """Change the scale after a step whose gradient had this norm."""
        if not math.isfinite(norm):
            # Below 1 a scale would push small gradients to 0, which it is there to prevent.
            self.value, self.good = max(1.0, self.value / 2), 0
            return
        self.good += 1
        if self.good == PATIENCE:
            self.value, self.good = min(LARGEST, 2 * self.value), 0

    def state(self) -> dict[str, Tensor]:
        """As tensors for a checkpoint, under `WORDS`."""
        numbers = torch.tensor(self.value, dtype=torch.float64), torch.tensor(self.good)
        return dict(zip(WORDS, numbers, strict=True))

    def load(self, state: Mapping[str, Tensor]) -> None:
        value, good = (state[word] for word in WORDS)
        self.value, self.good = float(value), int(good)
