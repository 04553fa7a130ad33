"""What this machine has, asked in a way that every Linux and macOS answers."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit of a control group and with what it uses, of both versions."""


def cores() -> int:
    """Processor cores that this process may use. Where the system does not tell (macOS): all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_linux() -> bool:
    """Whether namespaces, Landlock, seccomp and pidfds exist, on which the sandboxes are built."""
    return sys.platform == "linux"


def free_memory() -> int | None:
    """Bytes of main memory that a program may still take: what the machine has, and what its control group allows.
    None where the system does not tell."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    for most, used in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # "max" is no number: there is no limit
            found.append(int(Path(most).read_text()) - int(Path(used).read_text()))
    return max(0, min(found)) if found else None


def give_back_memory() -> bool:
    """Give memory that this process has freed, and that its C library keeps for itself, back to the system
    (`malloc_trim`). Returns whether the library has that: glibc on Linux does, others give it back themselves or not at
    all, and then nothing is done."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return False
    trim(0)
    return True
