"""Devices as numbers: memory, arithmetic and bandwidth, each from its maker's data sheet.

A plan multiplies these peaks with the share of them that real programs reach, which is measured and not written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    memory: float
    """Bytes."""
    flops: float
    """Multiplications and additions a second in bfloat16, dense."""
    bandwidth: float
    """Bytes a second between the device and its own memory."""
    source: str


DEVICES: Mapping[str, Device] = {
    "A100-40GB": Device(40e9, 312e12, 1.555e12, "NVIDIA A100 data sheet, SXM"),
    "A100-80GB": Device(80e9, 312e12, 2.039e12, "NVIDIA A100 data sheet, SXM"),
    "H100": Device(80e9, 989e12, 3.35e12, "NVIDIA H100 data sheet, SXM"),
    "H200": Device(141e9, 989e12, 4.8e12, "NVIDIA H200 data sheet, SXM"),
    "B200": Device(180e9, 2250e12, 7.7e12, "NVIDIA HGX B200 data sheet"),
    "L40S": Device(48e9, 362e12, 864e9, "NVIDIA L40S data sheet"),
    "RTX-4090": Device(24e9, 165e12, 1.008e12, "NVIDIA Ada architecture paper"),
    "MI300X": Device(192e9, 1307e12, 5.3e12, "AMD Instinct MI300X data sheet"),
}


def device(name: str) -> Device:
    """A device of the table; capital letters do not matter.

    Raises:
        ConfigError: the table has no such device.
    """
    found = {n.lower(): d for n, d in DEVICES.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"no device {name!r} is known; {nearest(name, DEVICES)}")
    return found
