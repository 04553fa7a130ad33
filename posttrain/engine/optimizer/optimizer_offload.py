"""The state of an optimizer in the memory of the CPU: some tensors at a time are copied to the device that steps.

Between steps a tensor of state is at home, which is pinned memory of the CPU. A step visits its tensors in groups of
similar size. It copies the state of one group to the device, updates, and copies the state back, so that the device
holds the state of one group at a time. The arithmetic is that of the optimizer, on the same numbers on the same device.
All copies follow each other on the device's stream. They do not overlap with the updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GROUP = 1 << 24
"""Most numbers of a group's parameters, or one larger parameter. Two float32 moments of a group are 128 MiB."""


def groups(tensors: Mapping[str, Tensor], most: int = GROUP) -> Iterator[list[str]]:
    """Names in their order, cut so that no group but a single tensor has more than `most` numbers.

    >>> list(groups({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(9), "d": torch.zeros(1)}, 5))
    [['a', 'b'], ['c'], ['d']]
    """
    group, count = list[str](), 0
    for name, tensor in tensors.items():
        if group and count + tensor.numel() > most:
            yield group
            group, count = [], 0
        group.append(name)
        count += tensor.numel()
    if group:
        yield group


class OffloadedState:
    """Moves tensors between their home and the device that computes.

    Args:
        device: where they are between steps; None: where they are made, and nothing is moved. It may be the device that
            computes, which saves nothing; copies are made all the same.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    @contextmanager
    def fetched(self, state: Any, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside: what a torch optimizer's `state` holds of these tensors is on their device, and may be changed."""
        if self.device is None:
            yield
            return
        # The memory at home is kept and written again afterwards: allocating pinned memory is slow, and a step should
        # not do it.
        homes = {t: dict(state[t]) for t in tensors if t in state}
        for t, at_home in homes.items():
            state[t] = {word: self._on_device(part, t.device) for word, part in at_home.items()}
        try:
            yield
        finally:
            # Also state that the block has made, on a first step.
            for t in tensors:
                if t in state:
                    at_home = homes.get(t, {})
                    state[t] = {word: self.stored(part, at_home.get(word)) for word, part in state[t].items()}

    def stored(self, part: Any, home: Any = None) -> Any:
        """A tensor at home: copied into `home` where there is one, else into new memory. Single numbers, and what is no
        tensor, stay as they are."""
        if self.device is None or not isinstance(part, Tensor) or part.numel() < 2:
            return part
        if hasattr(part, "__tensor_flatten__"):  # a tensor made of several, such as codes and scales
            return _rebuilt(part, lambda word, x: self.stored(x, None if home is None else getattr(home, word)))
        if home is None:
            # Copies run without the CPU only from and to pinned memory. Without a device pinning is of no use.
            pinned = self.device.type == "cpu" and part.device.type != "cpu"
            home = torch.empty(part.shape, dtype=part.dtype, device=self.device, pin_memory=pinned)
        return home.copy_(part, non_blocking=True)

    @torch.no_grad()
    def average(self, average: Tensor, now: Tensor, share: float) -> None:
        """Move an average that is at home towards a tensor, on the tensor's device."""
        if self.device is None:
            average.lerp_(now, share)
            return
        average.copy_(self._on_device(average, now.device).lerp_(now, share), non_blocking=True)

    def wait(self, device: torch.device) -> None:
        """Return when what was copied from this device is at home."""
        if self.device is not None and device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)

    def _on_device(self, part: Any, device: torch.device) -> Any:
        """A copy of a tensor of state on the device. Single numbers, and what is no tensor, stay as they are."""
        if not isinstance(part, Tensor) or part.numel() < 2:
            return part
        if hasattr(part, "__tensor_flatten__"):
            return _rebuilt(part, lambda word, x: self._on_device(x, device))
        return part.to(device, non_blocking=True, copy=True)


def _rebuilt(whole: Any, change: Any) -> Any:
    """A tensor made of several, with each of them changed."""
    words, context = whole.__tensor_flatten__()
    parts = {word: change(word, getattr(whole, word)) for word in words}
    return type(whole).__tensor_unflatten__(parts, context, whole.size(), whole.stride())
