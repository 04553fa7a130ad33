"""Transfers weights from the learner to a sampler, and joins shards to whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from posttrain.core.exchange.shards import Shard
from posttrain.core.ports import Sampler
from posttrain.system.errors import InvariantError


class InProcess:
    """A `core.ports.Transport` for a learner and a sampler in one process. Tensors are passed on without a copy."""

    async def send(self, version: int, shards: Iterable[Shard], sampler: Sampler) -> str:
        """Load the whole tensors as `version`; returns the fingerprint of the weights that are then served."""
        return await sampler.load(version, whole_tensors(shards))


def whole_tensors(shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, as soon as all of its shards have come. A weight in one shard is not copied. Raises
    InvariantError: a part came twice, parts overlap or leave a gap, or parts of one weight differ in dtype or full
    shape."""
    done: set[str] = set()
    parts: dict[str, _Parts] = {}
    empty: dict[str, Shard] = {}
    for shard in shards:
        if not shard.tensor.numel() and not shard.whole:
            empty.setdefault(shard.name, shard)
            continue
        if shard.name in done:
            raise InvariantError(
                f"weight {shard.name!r} was sent twice: a part came after all of it was there. Send every part once"
            )
        if shard.whole and shard.name not in parts:
            done.add(shard.name)
            yield shard.name, shard.tensor
            continue
        if parts.setdefault(shard.name, _Parts(shard)).add(shard):
            done.add(shard.name)
            yield shard.name, parts.pop(shard.name).full
    for name, shard in empty.items():
        if name not in done:
            parts.setdefault(name, _Parts(shard))
    for name, gathered in parts.items():
        raise InvariantError(
            f"weight {name!r} of shape {gathered.first.shape} is not whole: {gathered.count} of {gathered.full.numel()}"
            " numbers came. Send the parts of every process"
        )


class _Parts:
    """A tensor that is being joined from its shards."""

    def __init__(self, first: Shard) -> None:
        self.first = first
        self.full: Tensor = torch.empty(first.shape, dtype=first.tensor.dtype, device=first.tensor.device)
        self.count = 0
        self._seen: list[Shard] = []

    def add(self, shard: Shard) -> bool:
        """Add a shard; returns whether the tensor is whole now."""
        if (shard.shape, shard.tensor.dtype) != (self.first.shape, self.full.dtype):
            raise InvariantError(
                f"weight {shard.name!r}: one part is of a {self.full.dtype} {self.first.shape}, another of a"
                f" {shard.tensor.dtype} {shard.shape}. Cut all parts from the same tensor"
            )
        if twice := next((s for s in self._seen if s.overlaps(shard)), None):
            raise InvariantError(
                f"weight {shard.name!r}: the part of shape {tuple(shard.tensor.shape)} at {shard.offsets} and the one"
                f" of shape {tuple(twice.tensor.shape)} at {twice.offsets} hold the same numbers. Send every number"
                " once"
            )
        with torch.no_grad():
            self.full[shard.box].copy_(shard.tensor)
        self._seen.append(shard)
        self.count += shard.tensor.numel()
        return self.count == self.full.numel()
