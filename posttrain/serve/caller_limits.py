"""Limits on callers of the server: in total, per address and in time; and on what they can cause in its log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from posttrain.system.errors import ConfigError, nearest
from posttrain.system.hostile_callers import LogRateLimit, loopback

MIB = 1 << 20
SPARE_FILES = 128
"""Files kept free for the process beside its connections."""
FEWEST = 16
"""Fewest connections that are accepted, whatever the limit on files."""


@dataclass(frozen=True, kw_only=True)
class CallerLimits:
    """Limits on callers. Each is a setting of `posttrain serve`: `--limit NAME=NUMBER`.

    Behind a proxy all callers come from its address, so the default of `per_address` is high.
    """

    connections: int = 8192
    """Connections held at once, fewer where the process may not open so many files. At the limit, one that asks for
    nothing is closed for a new one; where all are being answered, new ones wait to be accepted."""
    per_address: int = 4096
    """Connections held at once from one address (IPv6: from one network of 64 bits). At the limit, a connection from
    there that asks for nothing is closed for a new one; where all are being answered, the new one is refused with
    status 429."""
    answers: int = 16384
    """Answers waiting or being written at once; a request that would make more is refused with status 429."""
    body_mib: float = 8.0
    """Largest body of a request, in MiB."""
    bodies_mib: float = 256.0
    """Bodies being read or waiting to be understood at once, all together, in MiB; what would be more is refused with
    status 503."""
    header_seconds: float = 10.0
    """Most seconds until the headers of a request are complete: since the connection began, or since their first byte
    on a connection that was kept."""
    body_seconds: float = 30.0
    """Most seconds between the headers of a request and the end of its body."""
    idle_seconds: float = 75.0
    """Most seconds that a connection is kept between two requests."""
    write_seconds: float = 30.0
    """A caller that has taken no 64 KiB of what waits for it in this time is cut off, and its answers end."""

    def __post_init__(self) -> None:
        # `f.type` is the text of the annotation, since annotations are postponed in this file.
        for f in fields(self):
            value, least = getattr(self, f.name), 1 if f.type == "int" else 0.01
            if not least <= value <= 1e9:
                raise ConfigError(f"--limit {f.name}={value:g}: {f.name} lies in {least:g}..1e9")

    @property
    def body(self) -> int:
        """`body_mib` in bytes."""
        return int(self.body_mib * MIB)

    @property
    def bodies(self) -> int:
        """`bodies_mib` in bytes."""
        return int(self.bodies_mib * MIB)


def read_limits(words: Iterable[str]) -> CallerLimits:
    """Limits from `name=number` words. ConfigError names a word that is not valid."""
    kinds = {f.name: f.type for f in fields(CallerLimits)}
    values: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ConfigError(f"--limit {word}: {nearest(name, sorted(kinds))}")
        try:
            values[name] = int(text) if kinds[name] == "int" else float(text)
        except ValueError:
            kind = "a whole number" if kinds[name] == "int" else "a number"
            raise ConfigError(
                f"--limit {word}: {name} is {kind}, such as {name}={getattr(CallerLimits, name):g}"
            ) from None
    return CallerLimits(**values)  # type: ignore[arg-type]


def most_connections(limits: CallerLimits) -> int:
    """Number of connections that can be open at once: the limit, or fewer if the limit on files is lower."""
    import resource  # not on every system that has a command line

    # Open files (weights, logs) and a reserve are subtracted, because an accept without a free descriptor fails.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max(FEWEST, soft - _open_files() - SPARE_FILES))


def _open_files() -> int:
    """Number of files that this process has open; `SPARE_FILES` where that cannot be read."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return SPARE_FILES


def check_address(host: str, token: str | None) -> None:
    """ConfigError where other machines could use the server without a token."""
    if token is None and not loopback(host):
        raise ConfigError(
            f"--host {host} is reached from other machines, and --no-token would serve everybody: leave --no-token out,"
            " or listen on 127.0.0.1"
        )


LOG = logging.getLogger("posttrain.serve")
"""The server's own logger."""
LOGGERS = (LOG, logging.getLogger("asyncio"), logging.getLogger("aiohttp.server"))
"""Loggers whose lines callers can cause."""


@contextmanager
def quiet() -> Iterator[None]:
    """Limit the rate of each of `LOGGERS` inside the block."""
    filters = [(log, LogRateLimit()) for log in LOGGERS]
    for log, rate in filters:
        log.addFilter(rate)
    try:
        yield
    finally:
        for log, rate in filters:
            log.removeFilter(rate)
