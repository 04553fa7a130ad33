"""A probe and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.environment.check.subject import Subject


class Mark(StrEnum):
    """The result of a probe. Only `fail` fails the check. `warn`: may be intended. `skip`: the probe did not apply."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe, as numbers or an example."""

    probe: str
    mark: Mark
    detail: str
    means: str = ""
    advice: str = ""
    """The change to make; empty if nothing is wrong."""


Answer = tuple[Mark, str]
"""A probe's mark and the number or example that shows it."""


@dataclass(frozen=True)
class Probe:
    """One test of an environment: its name, its meaning, what to change if it fails, and its function."""

    name: str
    means: str
    advice: str
    ask: Callable[[Subject], Awaitable[Answer]]

    async def __call__(self, subject: Subject) -> ProbeResult:
        mark, detail = await self.ask(subject)
        return ProbeResult(self.name, mark, detail, self.means, self.advice if mark in (Mark.WARN, Mark.FAIL) else "")
