"""How weights travel from the learner's process to engines: the two ends, and what one hands to the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from torch import Tensor

from posttrain.engine.vllm.start import memory_folder


@dataclass(frozen=True)
class Parcel:
    """The weights of one version, as engines are told of them."""

    version: int
    place: str


class WeightSender(Protocol):
    """Lives in the learner's process."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Parcel:
        """Make these weights readable; all of them appear at once."""
        ...

    def retire(self, version: int) -> None:
        """Nobody reads this parcel any more."""
        ...

    def clock(self) -> Mapping[str, float]:
        """Seconds since the last call, by what they were spent on."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """Lives in each engine's process."""

    def read(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]: ...


class FileSender:
    """One file per version, in a folder in memory."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="posttrain-weights-", dir=memory_folder())

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Parcel:
        place = Path(self._folder.name) / f"{version}.pt"
        torch.save({name: tensor.detach().cpu() for name, tensor in tensors}, place)
        return Parcel(version, str(place))

    def retire(self, version: int) -> None:
        (Path(self._folder.name) / f"{version}.pt").unlink(missing_ok=True)

    def clock(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._folder.cleanup()


class FileReceiver:
    def read(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        yield from torch.load(parcel.place, weights_only=True, mmap=True).items()
