"""The server's log, which callers cannot fill."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.core.net import LogRateLimit

LOG = logging.getLogger("posttrain.serve")
"""The server's own lines."""
LOGGERS = (LOG, logging.getLogger("asyncio"), logging.getLogger("aiohttp.server"))
"""What writes because of callers."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hold the rate of each of `LOGGERS` for as long as a server listens."""
    kept = [(log, LogRateLimit()) for log in LOGGERS]
    for log, rate in kept:
        log.addFilter(rate)
    try:
        yield
    finally:
        for log, rate in kept:
            log.removeFilter(rate)
