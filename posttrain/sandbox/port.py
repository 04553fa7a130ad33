"""The sandbox as the rest of the house sees it: limits in, what came of it out, and three errors that are never mixed
up.

What the program caused (its time-out, its crash) is a `Ran`. What we caused (a lost worker) is `SandboxBroken`. A
machine on which nothing can contain the program is `SandboxUnavailableError`, before anything ran.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.core.errors import ConfigError, PosttrainError

KIB, MIB = 1024, 1024**2
MOST_SAID = 4 * MIB
"""Bytes of a stream or a result that may be asked for at most."""

Why = Literal["ok", "error", "timeout", "memory", "output", "crashed"]
"""ok: it ended with status 0. error: with another status, or an exception. timeout: cpu or wall. memory: MemoryError.
output: it was stopped for saying too much. crashed: a signal ended it."""


class SandboxUnavailableError(ConfigError):
    """No way to contain a program works on this machine; the message lists each with its reason, and what would
    help."""


class SandboxBroken(PosttrainError):
    """A sandbox was lost, or could not confine a job it had been given: our fault, so no statement about the
    program."""


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use. Sizes in bytes, times in seconds.

    `memory` is address space. Threads share it, and as a program may not fork, it bounds the total; with `processes` it
    is per process, so the bound is (processes + 1) * memory.
    """

    memory: int = 512 * MIB
    cpu: float = 5.0
    """Rounded up to a whole second by the kernel."""
    wall: float = 6.0
    output: int = 64 * KIB
    """Kept of each stream. Four times as much ends the program."""
    result: int = MIB
    """Of a function's value, as text."""
    file_size: int = 16 * MIB
    open_files: int = 64
    stack: int = 8 * MIB
    processes: int = 0
    """Children alive at once. More than 0 starts a sandbox for this one program, about 100 ms, and needs namespaces."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (value >= 0 if name == "processes" else value > 0):
                raise ConfigError(
                    f"sandbox limit {name}={value!r} must be {'0 or more' if name == 'processes' else 'more than 0'}"
                )

    def plain(self) -> dict[str, Any]:
        """As the inside reads them."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A function of the program to call: its (dotted) name and its arguments, which are plain built-in values."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ran:
    """What a program did. All of `stdout`, `stderr`, `exit` and `result` is the program's own word."""

    why: Why
    exit: int
    """Status, or minus the signal that ended it."""
    stdout: bytes
    stderr: bytes
    cut: bool
    """Whether a stream said more than was kept."""
    result: bytes
    """JSON of the call's value; `value.heard` reads it."""
    seconds: float
    cpu: float
    peak: int
    """Bytes resident at most, those of the interpreter included."""
    sandbox: str
    """Name of the backend that contained it."""
    lost: bool = False
    """In a session: its process ended with this piece, so nothing that was defined in it is there any more."""
    network: int | None = None
    """Sockets of a network it asked for, however it asked: each was refused. None where nobody counts: no sandbox, or a
    kernel that does not tell (before 5.0, or where whoever runs us listens already)."""

    @property
    def said(self) -> str:
        """Standard output as text; bytes that are no UTF-8 are shown, not dropped."""
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def complaint(self) -> str:
        """The end of standard error, one line, with control characters made visible."""
        lines = self.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in lines[-1][:300]) if lines else ""


class NetworkAttempts:
    """Attempts to reach a network, counted by many threads: of programs and pieces where they were counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts = self._programs = 0

    def add(self, ran: Ran) -> Ran:
        """Count one, and hand it on."""
        if ran.network is not None:
            with self._lock:
                self._attempts, self._programs = self._attempts + ran.network, self._programs + 1
        return ran

    def take(self) -> tuple[int, int]:
        """Attempts, and the programs that were watched, since last asked."""
        with self._lock:
            taken = self._attempts, self._programs
            self._attempts = self._programs = 0
        return taken
