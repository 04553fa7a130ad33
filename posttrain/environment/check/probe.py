"""A probe and what it found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.environment.check.subject import Subject


class Mark(StrEnum):
    """How a probe ended. Only `fail` fails the check; `warn` is for what may be meant so; `skip`: it did not apply."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class ProbeResult:
    """What one probe saw, in numbers or by an example."""

    probe: str
    mark: Mark
    detail: str
    means: str = ""
    advice: str = ""
    """What to do; empty where nothing is wrong."""


Answer = tuple[Mark, str]
"""A probe's mark and the number or example that shows it."""


@dataclass(frozen=True)
class Probe:
    """One question to an environment: what it means, what to do where the answer is bad, and how it is asked."""

    name: str
    means: str
    advice: str
    ask: Callable[[Subject], Awaitable[Answer]]

    async def __call__(self, subject: Subject) -> ProbeResult:
        mark, detail = await self.ask(subject)
        return ProbeResult(self.name, mark, detail, self.means, self.advice if mark in (Mark.WARN, Mark.FAIL) else "")
