"""The facts that are known of a gauge beside its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """The definition of a gauge. `band` is its range in a healthy run, in words."""

    formula: str
    unit: str
    band: str
