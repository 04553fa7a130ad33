"""Refusals that many pieces share."""

from __future__ import annotations

from posttrain.system.errors import ConfigError


def share(path: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{path}={value}: must lie in [0, 1]")


def positive(path: str, value: float, off: str = "") -> None:
    if not value > 0:
        raise ConfigError(f"{path}={value}: must be > 0" + (f"; to switch it off set {off}" if off else ""))


def not_negative(path: str, value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{path}={value}: must be >= 0")


def ordered(path: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"{path}.low={low} must be >= 0 and below {path}.high={high}")
