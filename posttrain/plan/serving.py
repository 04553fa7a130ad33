"""One decoding step of an engine: the memory of weights and caches, and the time that reading or arithmetic takes.

In a decoding step each sequence gets one token. The weights are read once for all sequences, and each sequence's cache
is read by itself. So arithmetic grows with the number of sequences, and reading with their number times their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.plan.machines import Device
from posttrain.plan.shapes import ModelShape
from posttrain.system.errors import ConfigError


@dataclass(frozen=True)
class Decoding:
    """Sequences that are decoded together on some devices, which share weights and caches evenly.

    >>> from posttrain.plan.machines import device
    >>> from posttrain.plan.models import shape_by_name
    >>> step = Decoding(shape_by_name("Llama-3.1-70B"), device("H100"), devices=8, sequences=256, length=8192)
    >>> round(step.token_cache / 1e3), round(step.cache / 1e9), step.bound
    (328, 687, 'memory')
    """

    shape: ModelShape
    device: Device
    devices: int
    sequences: int
    length: int
    """Tokens of each sequence so far."""
    bytes_each: float = 2
    """Bytes of a weight and of a number in the cache."""
    shared: bool = True
    """Whether query heads share keys and values as the model is built (GQA, MLA); else each has its own (MHA)."""

    def __post_init__(self) -> None:
        for name in ("devices", "sequences", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.shape.parameters * self.bytes_each

    @property
    def token_cache(self) -> int:
        """Bytes that the keys and values of one token take."""
        return self.shape.cache_bytes(self.bytes_each, shared=self.shared)

    @property
    def cache(self) -> int:
        """Bytes of the caches of all sequences."""
        return self.token_cache * self.sequences * self.length

    @property
    def memory(self) -> float:
        """Bytes of all devices."""
        return self.device.memory * self.devices

    @property
    def fitting(self) -> int:
        """The largest number of sequences of this length that fit beside the weights."""
        return max(0, int((self.memory - self.weights) // (self.token_cache * self.length)))

    @property
    def reading(self) -> float:
        """Seconds to read what a step reads: the weights that are used, and every cache."""
        # In a mixture each sequence may choose other experts, and with enough sequences all of them are read. In a
        # dense model every sequence uses all weights.
        used = min(self.shape.parameters, self.shape.active * self.sequences) * self.bytes_each
        return (used + self.cache) / (self.device.bandwidth * self.devices)

    @property
    def arithmetic(self) -> float:
        """Seconds of the multiplications with weights and of attention over the cache."""
        # A multiplication and an addition for each weight that a token meets.
        operations = 2 * self.shape.active + self.shape.attending(self.length)
        return self.sequences * operations / (self.device.flops * self.devices)

    @property
    def bound(self) -> Literal["memory", "bandwidth", "arithmetic"]:
        """What limits decoding: "memory" if it does not fit, "bandwidth" if it waits for reading, else "arithmetic"."""
        if self.weights + self.cache > self.memory:
            return "memory"
        return "bandwidth" if self.reading >= self.arithmetic else "arithmetic"

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all sequences together, at the peaks of the devices."""
        return self.sequences / max(self.reading, self.arithmetic)
