"""What this machine has, asked in a way that every Linux and macOS answers."""

from __future__ import annotations

import os
import sys


def cores() -> int:
    """Processor cores that this process may use. Where the system does not tell (macOS): all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_linux() -> bool:
    """Whether namespaces, Landlock, seccomp and pidfds exist, on which the sandboxes are built."""
    return sys.platform == "linux"
