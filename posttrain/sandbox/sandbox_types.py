"""The sandbox's types for other rooms: limits, outcome, and errors.

A result of the program, also its time-out or its crash, is a `Ran`. A failure of the sandbox raises `SandboxBroken`. If
no sandbox works on this machine, `SandboxUnavailableError` is raised before anything runs.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.system.errors import ConfigError, PosttrainError

KIB, MIB = 1024, 1024**2
MOST_SAID = 4 * MIB
"""Upper bound of `ProgramLimits.output` and `ProgramLimits.result`, in bytes."""
MOST_SECONDS = 1_000_000
"""Upper bound of `ProgramLimits.cpu` and `ProgramLimits.wall`: the kernel waits for 2**31 ms at most."""

Why = Literal["ok", "error", "timeout", "memory", "output", "crashed"]
"""ok: it ended with status 0. error: with another status, or an exception. timeout: cpu or wall. memory: MemoryError.
output: it was stopped for printing too much. crashed: a signal ended it."""


class SandboxUnavailableError(ConfigError):
    """No sandbox works on this machine. The message lists each with its reason, and what would help."""


class SandboxBroken(PosttrainError):
    """A sandbox was lost, or could not confine its job. The program is not to blame."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program. Sizes in bytes, times in seconds.

    `memory` is address space, which threads share. A program may not fork, so this bounds the total. With `processes`
    it is per process, and the bound is (processes + 1) * memory.
    """

    memory: int = 512 * MIB
    cpu: float = 5.0
    """Rounded up to a whole second by the kernel."""
    wall: float = 6.0
    output: int = 64 * KIB
    """Bytes kept of each stream. A program that prints four times as much is ended."""
    result: int = MIB
    """Most bytes of a function's value as text."""
    file_size: int = 16 * MIB
    open_files: int = 64
    stack: int = 8 * MIB
    processes: int = 0
    """Child processes at once. More than 0 needs namespaces, and a sandbox for this one program (about 100 ms)."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("cpu", "wall"):
                fits, wanted = 0 < value <= MOST_SECONDS, f"more than 0 and at most {MOST_SECONDS:,} seconds"
            else:
                fits = isinstance(value, int) and value >= (name != "processes")  # at least 1, of processes 0
                wanted = "a whole number of 0 or more" if name == "processes" else "more than 0, and whole"
            if not fits:
                raise ConfigError(f"sandbox limit {name}={value!r} must be {wanted}")

    def plain(self) -> dict[str, Any]:
        """The limits as the process inside reads them."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A function of the program to call: its (dotted) name and its arguments, which are plain built-in values."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ran:
    """The outcome of a program. The program itself controls `stdout`, `stderr`, `exit` and `result`."""

    why: Why
    exit: int
    """Exit status, or minus the signal that ended it."""
    stdout: bytes
    stderr: bytes
    cut: bool
    """Whether a stream was longer than what is kept of it."""
    result: bytes
    """JSON of the call's value; `comparison.heard` reads it."""
    seconds: float
    cpu: float
    peak: int
    """Peak resident memory in bytes, the interpreter included."""
    sandbox: str
    """Name of the backend that contained it."""
    lost: bool = False
    """In a session: its process ended with this piece, and all its definitions are lost."""
    network: int | None = None
    """Number of network sockets it tried to open; each was refused. None where they are not counted: without a sandbox,
    before Linux 5.0, or where this process is itself under a seccomp listener."""

    @property
    def said(self) -> str:
        """Standard output as text; invalid UTF-8 is escaped, not dropped."""
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def complaint(self) -> str:
        """The last line of standard error, with control characters escaped."""
        # The program controls this text, and it is printed to terminals: escape sequences must not take effect.
        lines = self.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in lines[-1][:300]) if lines else ""


def as_bytes(text: str | bytes) -> bytes:
    """Text as UTF-8. A lone surrogate gives invalid UTF-8, which is then the program's error, not ours."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


class NetworkAttempts:
    """Attempts to reach a network, summed over the programs and pieces that count them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts = self._programs = 0

    def add(self, ran: Ran) -> Ran:
        """Count one outcome and return it."""
        if ran.network is not None:
            with self._lock:
                self._attempts, self._programs = self._attempts + ran.network, self._programs + 1
        return ran

    def take(self) -> tuple[int, int]:
        """(attempts, programs that count them) since the last call."""
        with self._lock:
            taken = self._attempts, self._programs
            self._attempts = self._programs = 0
        return taken
