"""Row gradients: gradients that hold only some rows of a weight; all other rows are zero.

Such a gradient is a sparse torch tensor [V, H] with one index for each row (`engine.layers.embedding_gradient`). Code
that reads gradients handles dense and sparse ones through these functions, which import no torch.
"""

from __future__ import annotations

import math
from typing import Any

PART = 1 << 20
"""Numbers that `square_sum` reads at once."""


def held(gradient: Any) -> Any:
    """The numbers that a gradient holds: all of a dense one, or the rows [K, H] of a sparse one. For a gradient from
    `joined` this is a view, so changing it changes the gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def joined(gradient: Any) -> Any:
    """The gradient with each row once, in rising order. Sums of such gradients have a row several times."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def whole(gradient: Any) -> Any:
    """The gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def square_sum(x: Any) -> float:
    """Returns the sum of the squares of all numbers, in float64. Only one part at a time is copied to float64, because
    a float64 copy of a large embedding would be the largest tensor of a step."""
    flat = x.detach().reshape(-1)
    # Squares of float32 numbers can underflow or overflow, and a sum of millions of them loses digits.
    return math.fsum(float(part.double().square().sum()) for part in flat.split(PART)) if len(flat) else 0.0


def place(gradient: Any, at: int) -> int:
    """Returns where number `at` of the flattened `held` lies in the flattened `whole`."""
    if not gradient.is_sparse:
        return at
    # Row and column within the held rows [K, H]. The index tensor gives the row in the whole weight.
    row, column = divmod(at, gradient.shape[1])
    return int(gradient.coalesce().indices()[0, row]) * int(gradient.shape[1]) + column


def number(gradient: Any, at: int) -> Any:
    """[1]: number `at` of the flattened `whole`."""
    if not gradient.is_sparse:
        return gradient.flatten()[at : at + 1]
    row, column = divmod(at, gradient.shape[1])
    rows = gradient.coalesce()
    # For a row that is not held nothing is selected, and the sum of nothing is 0: its gradient.
    return rows.values()[rows.indices()[0] == row, column].sum()[None]
