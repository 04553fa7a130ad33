"""A loud adapter over ranks: each rank does to its rows what `adapter_modules.loud` does in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.engine.adapters.adapter_modules import layers
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.parallel.shard_modules import first_row
from posttrain.engine.parallel.sharded_learner import ShardedLearner


@torch.no_grad()
def loud_rows(learner: ShardedLearner) -> dict[str, Tensor]:
    """Make every adapter add random numbers half as large as its layer's own output. Every rank calls it.

    Returns the rank's own rows as they were before, for `put_rows`. One weight is whole at a time.
    """
    own_rows, generator = learner.parameters(), torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in own_rows.items()}
    for name, layer in layers(learner.policy.module).items():
        part: Any = layer
        base = _norm(part.get_base_layer().weight)
        for word, b in part.lora_B.items():
            rows = b.weight.shape[0]
            added = part.scaling[word] * _norm(part.lora_A[word].weight) * math.sqrt(rows)
            # Every rank draws the numbers of the whole matrix from one seed and keeps its own rows, so the ranks
            # together hold the matrix that one process would hold.
            numbers = torch.randn(b.weight.shape, generator=generator) * (base / (2 * max(added, 1e-30)))
            place, begin = own_rows[f"{name}.lora_B.{word}.weight"], first_row(b.weight)
            place.copy_(numbers[begin : begin + len(place)])
    return before


@torch.no_grad()
def put_rows(learner: HFLearner, kept: Mapping[str, Tensor]) -> None:
    """Put a copy of the rank's own rows back."""
    for name, p in learner.parameters().items():
        p.copy_(kept[name])


def _norm(weight: Any) -> float:
    """The Frobenius norm of a whole weight, of which each rank holds a part."""
    # full_tensor is an exchange: every rank comes here for the same weights in the same order.
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return float(whole.double().norm())
