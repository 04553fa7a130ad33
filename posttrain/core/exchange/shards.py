"""Weights in parts (shards): what a learner returns of its weights, and what a transport sends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.system.errors import InvariantError


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of one named weight: the box of its full tensor that begins at `offsets` and is as large as `tensor`.
    InvariantError where it does not lie inside.

    Example: rows 4 to 7 of a weight [10, 3] are `Shard("w", rows, (10, 3), (4, 0))`, with `rows` of shape [4, 3].
    """

    name: str
    tensor: Any
    """torch tensor with as many axes as the full one. Empty where a process holds no part of it."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    """Where the part begins, one number per axis."""

    def __post_init__(self) -> None:
        sizes = tuple(self.tensor.shape)
        fits = len(sizes) == len(self.shape) == len(self.offsets)
        if not fits or any(
            at < 0 or at + n > size for at, n, size in zip(self.offsets, sizes, self.shape, strict=True)
        ):
            raise InvariantError(
                f"a shard of {self.name!r} with shape {sizes} at {self.offsets} does not lie inside the full shape"
                f" {self.shape}: give one offset an axis, and parts that end within the full tensor"
            )

    @staticmethod
    def of(name: str, tensor: Any) -> Shard:
        """A tensor that is not cut, as its only shard."""
        return Shard(name, tensor, tuple(tensor.shape), (0,) * len(tensor.shape))

    @property
    def whole(self) -> bool:
        """True where this shard is all of the weight."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def box(self) -> tuple[slice, ...]:
        """The part as an index of the full tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.tensor.shape, strict=True))

    def overlaps(self, other: Shard) -> bool:
        """Returns whether some entry of the full tensor is in both parts."""
        # Two boxes overlap where their ranges overlap in every axis. A tensor
        # without axes is one number, so two parts of it always overlap.
        return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(self.box, other.box, strict=True))


@runtime_checkable
class DividedWeights(Protocol):
    """A learner with a part of the weights in this process: all processes write and read them together."""

    def write_weights(self, folder: Path) -> None:
        """Write every trainable parameter into `folder`, each process its own part."""
        ...

    def read_weights(self, folder: Path) -> None:
        """Take the weights that `folder` holds, however many processes wrote them."""
        ...

    def copied_weights(self) -> Any:
        """A copy of the weights in memory, for `put_weights`."""
        ...

    def put_weights(self, copied: Any) -> None: ...


@runtime_checkable
class DividedGradients(Protocol):
    """An optimizer that may have a part of some weights in this process, and other weights whole in every process."""

    def agree(self) -> None:
        """For weights that every process has whole, take the gradients of the first. All call it before the step."""
        ...


@runtime_checkable
class DividedState(Protocol):
    """An optimizer with a part of the state in this process: all processes write and read it together."""

    def write_state(self, folder: Path) -> None: ...

    def read_state(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        """Exact digest of the whole state, over all processes."""
        ...
