"""Protection of servers against hostile callers: a log that they cannot fill, and enough open files for connections."""

from __future__ import annotations

import ipaddress
import logging
import time
from contextlib import suppress
from urllib.parse import urlsplit

LINES = 20
"""Most lines of one logger in `SECONDS`."""
SECONDS = 60.0


class LogRateLimit(logging.Filter):
    """Lets `lines` records of a logger through in each `seconds`; the next one says how many were left out."""

    def __init__(self, lines: int = LINES, seconds: float = SECONDS) -> None:
        super().__init__()
        self.lines, self.seconds = lines, seconds
        self._since, self._said, self._left_out = -seconds, 0, 0  # so the first record begins a span of time

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since >= self.seconds:
            if self._left_out:
                record.msg = f"{record.getMessage()} ({self._left_out} lines before this one were left out)"
                record.args = ()
            self._since, self._said, self._left_out = now, 0, 0
        self._said += 1
        # Lines above the limit are counted too, for the message of the next line that gets through.
        self._left_out += self._said > self.lines
        return self._said <= self.lines


def raise_file_limit() -> int:
    """Let this process open as many files as it is allowed to; returns how many those are."""
    import resource  # not on every system that has a command line

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # some systems name a hard limit that cannot be had
            return soft
    # RLIM_INFINITY is -1, and callers subtract from this number and compare it.
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def loopback(host: str) -> bool:
    """Returns whether a host's name can only mean this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def in_the_clear(url: str) -> bool:
    """Returns whether data that is sent to an address can be read on its way: http to another machine."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not loopback(parts.hostname or "")


def network(address: str) -> str:
    """The owner of an address: the address itself, or the 64-bit network of an IPv6 caller."""
    with suppress(ValueError):
        # A link-local address names its interface behind a percent sign.
        ip = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(ip, ipaddress.IPv6Address) and not ip.is_loopback:
            # One IPv6 caller has a whole network of 2^64 addresses, and would be a new one each time. An IPv4 caller on
            # an IPv6 socket is that IPv4 address.
            return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
    return address
