"""Devices and machines as numbers: memory, arithmetic and bandwidth, each with its source.

Peaks are those of the makers' data sheets. Programs reach a share of them, which a `Hardware` also has. The share is
assumed to be the same for all devices, unless a user's TOML file or a measurement by `posttrain plan --probe` gives it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from posttrain.system.errors import ConfigError, nearest


@dataclass(frozen=True)
class Device:
    """One accelerator, or a processor."""

    memory: float
    """Bytes of its memory."""
    flops: float
    """Multiplications and additions a second in bfloat16, dense."""
    bandwidth: float
    """Bytes a second between the device and its own memory."""
    source: str
    link: float = 64e9
    """Bytes a second to another device of the same machine, one way."""
    accelerator: bool = True


DEVICES: Mapping[str, Device] = {
    "A100-40GB": Device(40e9, 312e12, 1.555e12, "NVIDIA A100 data sheet, SXM", 300e9),
    "A100-80GB": Device(80e9, 312e12, 2.039e12, "NVIDIA A100 data sheet, SXM", 300e9),
    "H100": Device(80e9, 989e12, 3.35e12, "NVIDIA H100 data sheet, SXM", 450e9),
    "H200": Device(141e9, 989e12, 4.8e12, "NVIDIA H200 data sheet, SXM", 450e9),
    "B200": Device(180e9, 2250e12, 7.7e12, "NVIDIA HGX B200 data sheet", 900e9),
    "L40S": Device(48e9, 362e12, 864e9, "NVIDIA L40S data sheet", 32e9),
    "RTX-4090": Device(24e9, 165e12, 1.008e12, "NVIDIA Ada architecture paper", 32e9),
    "MI300X": Device(192e9, 1307e12, 5.3e12, "AMD Instinct MI300X data sheet", 448e9),
}
"""Links: NVLink or Infinity Fabric of all ports, one way; PCIe of 16 lanes for those without."""

INFINIBAND = 50e9
"""Bytes a second of one NDR port (400 Gb/s), one way: what a device of another machine is reached by."""
NODE = 8
"""Devices of one machine."""


@dataclass(frozen=True)
class Hardware:
    """Some equal devices, and the shares of their peaks that programs reach."""

    name: str
    device: Device
    count: int = 1
    network: float = INFINIBAND
    """Bytes a second to a device of another machine."""
    compute: float = 0.4
    """Share of the peak arithmetic that large products of a model reach."""
    reading: float = 0.7
    """Share of the peak bandwidth that decoding reaches."""
    latency: float = 2e-3
    """Seconds of a decoding step that are neither arithmetic nor reading: launches, and the draw of tokens."""
    price: float = 0.0
    """Price of one device for an hour; 0: not given."""
    why: str = "shares of the peaks are assumed"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"machine={self.name}: {self.count} devices; at least 1 is needed")
        for name in ("memory", "flops", "bandwidth", "link"):
            if not 0 < getattr(self.device, name) < math.inf:
                raise ConfigError(f"machine={self.name}: {name}={getattr(self.device, name):g} must be > 0")
        for name in ("compute", "reading"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"machine={self.name}: {name}={getattr(self, name):g} is a share in (0, 1]")
        for name in ("network", "latency", "price"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"machine={self.name}: {name}={getattr(self, name):g} must be >= 0")

    @property
    def flops(self) -> float:
        """Multiplications and additions a second that one device reaches."""
        return self.device.flops * self.compute

    @property
    def bandwidth(self) -> float:
        """Bytes a second that one device reaches."""
        return self.device.bandwidth * self.reading

    def between(self, devices: int) -> float:
        """Bytes a second from one device to another, among this number of devices."""
        return self.device.link if devices <= NODE else self.network


def device(name: str) -> Device:
    """A device of the table, whatever its capital letters; ConfigError suggests the nearest name."""
    listed = {n.lower(): d for n, d in DEVICES.items()}.get(name.lower())
    if listed is None:
        raise ConfigError(f"no device {name!r} is known; {nearest(name, DEVICES)}")
    return listed


# "8xH100", "8 * h100" or "H100": the number, and the device.
COUNTED = re.compile(r"(?:(-?\d+)\s*[xX*]\s*)?(.+)")


def machine(word: str) -> Hardware:
    """The hardware that a word names: `H100`, `64xH100`, or a TOML file of the user's.

    >>> machine("8xh100").count, machine("8xh100").device.memory
    (8, 80000000000.0)
    """
    if word.endswith(".toml"):
        return read_machine(Path(word).expanduser())
    # A negative count is read here and refused by `Hardware`, with a message that names it.
    counted = COUNTED.fullmatch(word.strip())
    if counted is None:
        raise ConfigError(f"machine={word!r}: write a device such as H100, 8xH100, or a TOML file")
    return Hardware(word, device(counted[2]), int(counted[1] or 1))


TYPES: Mapping[str, tuple[type, ...]] = {"device": (str,), "source": (str,), "accelerator": (bool,), "count": (int,)}
"""Types of the fields of a file; those of the other fields are numbers."""
OF_DEVICE = tuple(f.name for f in fields(Device))
OF_MACHINE = tuple(f.name for f in fields(Hardware) if f.name not in ("name", "device", "why"))


def read_machine(path: Path) -> Hardware:
    """The hardware of a TOML file with `device = "H100"`, or memory, flops and bandwidth; and any field of `Hardware`.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"machine={path}: it cannot be read ({error})") from error
    known = ("device", *OF_DEVICE, *OF_MACHINE)
    if strange := [k for k in settings if k not in known]:
        raise ConfigError(f"{path}: {strange[0]!r} is no field of a machine; {nearest(strange[0], known)}")
    for name, value in settings.items():
        types = TYPES.get(name, (float, int))
        # A truth value is an int in Python, so `count = true` would pass the first condition.
        if not isinstance(value, types) or isinstance(value, bool) != (name == "accelerator"):
            raise ConfigError(f"{path}: {name}={value!r} is not a {types[0].__name__}")
    # Fields of the file replace those of the device that it names.
    named = vars(device(settings["device"])) if "device" in settings else {"source": str(path)}
    values = {**named, **{k: settings[k] for k in OF_DEVICE if k in settings}}
    if missing := [k for k in ("memory", "flops", "bandwidth") if k not in values]:
        raise ConfigError(f"{path}: {missing[0]} is missing; give it, or device= with a name such as H100")
    more = {k: settings[k] for k in OF_MACHINE if k in settings}
    return Hardware(path.stem, Device(**values), **more, why=f"shares of the peaks: {path} or assumed")
