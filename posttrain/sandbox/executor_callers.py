"""The connections of an executor: their number, their addresses, and what each waits for, so that none stays for ever.

Each connection has a thread that reads and writes. `Callers` closes connections from other threads.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Literal

from posttrain.system.hostile_callers import network

Phase = Literal["headers", "body", "answer", "idle"]
"""The event that a connection waits for: a first request's headers, a body, our answer, a next request."""
SECONDS: dict[Phase, float] = {"headers": 10.0, "body": 60.0, "answer": float("inf"), "idle": 60.0}
"""Longest time in each phase. Writing an answer has its own limit (`Handler.timeout`)."""
YOUNG = 3.0
"""Seconds of silence before a connection may be closed for a new one; honest callers on a busy machine are silent
too."""


class Callers:
    """The open connections, by their socket.

    Args:
        most: connections at once.
        per_address: connections at once from one address, or one IPv6 network of 64 bits.
    """

    def __init__(self, most: int, per_address: int) -> None:
        self.most, self.per_address = most, per_address
        self._guard = threading.Lock()
        self._held: dict[socket.socket, tuple[str, Phase, float]] = {}
        """Of each connection its address, its phase, and when the phase began."""
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def room(self) -> bool:
        """Returns whether one more connection may be accepted. At the limit, a silent connection is closed for it."""
        with self._guard:
            return len(self._held) < self.most or self._displace(None)

    def enter(self, wire: socket.socket, whence: str) -> bool:
        """Add a connection. False where its address has too many and all of them are being answered."""
        address = network(whence)
        with self._guard:
            if self._count[address] >= self.per_address and not self._displace(address):
                return False
            self._held[wire] = address, "headers", time.monotonic()
            self._count[address] += 1
            return True

    def now(self, wire: socket.socket, phase: Phase) -> None:
        """Record that a connection begins another phase."""
        with self._guard:
            if wire in self._held:
                self._held[wire] = self._held[wire][0], phase, time.monotonic()

    def leave(self, wire: socket.socket) -> None:
        with self._guard:
            self._forget(wire)

    def sweep(self) -> None:
        """Close every connection that has been in its phase too long."""
        now = time.monotonic()
        with self._guard:
            for wire in [w for w, (_, phase, since) in self._held.items() if now - since > SECONDS[phase]]:
                hang_up(wire)

    def cut(self) -> None:
        """Close all connections."""
        with self._guard:
            for wire in self._held:
                hang_up(wire)

    def _displace(self, address: str | None) -> bool:
        """Closes the connection that is silent the longest, of all or of one address. Returns whether there was one."""
        candidates = ((since, w, phase) for w, (a, phase, since) in self._held.items() if address in (None, a))
        # Only one without a request: a connection whose body arrives, or whose answer is computed, stays.
        silent = ((since, w) for since, w, phase in candidates if phase in ("headers", "idle"))
        since, wire = min(silent, key=lambda entry: entry[0], default=(0.0, None))
        if wire is None or time.monotonic() - since < YOUNG:
            return False
        self._forget(wire)
        hang_up(wire)
        return True

    def _forget(self, wire: socket.socket) -> None:
        if wire in self._held:
            address = self._held.pop(wire)[0]
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]


def hang_up(wire: socket.socket) -> None:
    """Shuts a connection down while its thread may be reading, and the read returns. The socket below TLS is shut down,
    because the state of TLS belongs to that thread."""
    with suppress(OSError):
        socket.socket.shutdown(wire, socket.SHUT_RDWR)
