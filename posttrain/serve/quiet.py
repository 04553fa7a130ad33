"""A log that callers cannot fill: so many lines a minute, then a count of those that were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LINES = 20
"""Lines of one logger in `SECONDS`."""
SECONDS = 60.0
LOG = logging.getLogger("posttrain.serve")
"""The server's log."""
LOGGERS = (LOG, logging.getLogger("asyncio"), logging.getLogger("aiohttp.server"))
"""What writes because of callers."""


class Rate(logging.Filter):
    """Lets `lines` records through in each `seconds`; the first one after that says how many were left out."""

    def __init__(self, lines: int = LINES, seconds: float = SECONDS) -> None:
        super().__init__()
        self.lines, self.seconds = lines, seconds
        self._since, self._said, self._left_out = -seconds, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since >= self.seconds:
            if self._left_out:
                record.msg, record.args = f"{record.getMessage()} ({self._left_out} lines before this one were left out)", ()
            self._since, self._said, self._left_out = now, 0, 0
        self._said += 1
        self._left_out += self._said > self.lines
        return self._said <= self.lines


@contextmanager
def quiet() -> Iterator[None]:
    """Hold the rate of each of `LOGGERS` for as long as a server listens."""
    kept = [(log, Rate()) for log in LOGGERS]
    for log, rate in kept:
        log.addFilter(rate)
    try:
        yield
    finally:
        for log, rate in kept:
            log.removeFilter(rate)
