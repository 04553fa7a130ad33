"""Faults of weights on their way between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "half_a_version_read",
    seam="posttrain.engine.transfer.receiver:tensor_of",
    what="an engine reads the second half of the weights from the block of the version before",
    harm="it samples from a policy that never was, and calls it by the new version",
    source="pain 4, sglang#14178",
    needs="pool",
)
def _(real: Real) -> Real:
    kept: dict[str, Any] = {}

    def tensor_of(block: Any, entry: Any, *args: Any) -> Any:
        new = real(block, entry, *args)
        before, kept[entry.name] = kept.get(entry.name), new.clone()
        late = 2 * (entry.offset + entry.size) > len(block)
        return before if late and before is not None and before.shape == new.shape else new

    return tensor_of


@fault(
    "delta_of_wrong_base",
    seam="posttrain.engine.transfer.sender:ParcelSender._write",
    what="a delta is taken against the version before the one that it names as its base",
    harm="engines add a step to weights that it was not made for, and drift away from the learner",
    source="pain 4, prime-rl PR#1617",
    shows=("placement.delta=true",),
    needs="pool",
)
def _(real: Real) -> Real:
    older: dict[int, Any] = {}

    def write(self: Any, parcel: Any, tensors: Any) -> Any:
        before, older[id(self)] = older.get(id(self)), self._kept
        if parcel.base is not None and before:
            self._kept = before
        return real(self, parcel, tensors)

    return write
