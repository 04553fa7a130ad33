"""The server's log, with a limited rate, so that callers cannot fill it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.system.hostile_callers import LogRateLimit

LOG = logging.getLogger("posttrain.serve")
"""The server's own logger."""
LOGGERS = (LOG, logging.getLogger("asyncio"), logging.getLogger("aiohttp.server"))
"""Loggers whose lines callers can cause."""


@contextmanager
def quiet() -> Iterator[None]:
    """Limit the rate of each of `LOGGERS` inside the block."""
    kept = [(log, LogRateLimit()) for log in LOGGERS]
    for log, rate in kept:
        log.addFilter(rate)
    try:
        yield
    finally:
        for log, rate in kept:
            log.removeFilter(rate)
