"""Gradients that hold some rows of a weight, and no number for the others, which are zero.

Such a gradient is a sparse tensor of torch [V, H] with one index for each row. `engine.layers.embedding_gradient` makes
them of embeddings. Everything that reads gradients takes both kinds through these functions. They import no torch.
"""

from __future__ import annotations

import math
from typing import Any

PART = 1 << 20
"""Numbers that `square_sum` reads at once."""


def held(gradient: Any) -> Any:
    """The numbers that a gradient holds: all of them, or those of its rows [K, H]. Of a gradient of rows that were
    joined (`joined`) it is a view, so what changes it changes the gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def joined(gradient: Any) -> Any:
    """The gradient with each row once, in rising order. Sums of such gradients have a row several times."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def whole(gradient: Any) -> Any:
    return gradient.to_dense() if gradient.is_sparse else gradient


def square_sum(x: Any) -> float:
    """Returns the sum of the squares of all numbers, in float64. A float64 copy is made of one part at a time, since of
    a large embedding it would be the largest tensor of a step."""
    flat = x.detach().reshape(-1)
    # Squares of float32 numbers can underflow or overflow, and a sum of millions of them loses digits.
    return math.fsum(float(part.double().square().sum()) for part in flat.split(PART)) if len(flat) else 0.0


def place(gradient: Any, at: int) -> int:
    """Returns the position in the flattened whole of number `at` of the flattened `held`."""
    if not gradient.is_sparse:
        return at
    # The place within the held rows [K, H]; the index tensor says which row of the whole each one is.
    row, column = divmod(at, gradient.shape[1])
    return int(gradient.coalesce().indices()[0, row]) * int(gradient.shape[1]) + column


def number(gradient: Any, at: int) -> Any:
    """[1]: number `at` of the flattened whole."""
    if not gradient.is_sparse:
        return gradient.flatten()[at : at + 1]
    row, column = divmod(at, gradient.shape[1])
    rows = gradient.coalesce()
    # A row that is not held selects nothing, and the sum of nothing is its 0.
    return rows.values()[rows.indices()[0] == row, column].sum()[None]
