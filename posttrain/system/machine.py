"""Facts about this machine (cores, memory), and settings of its memory while a stage takes steps (Linux, macOS)."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of two settings of glibc's `mallopt`, both sizes in bytes: free memory at the end of its heap above the first
is returned to the system; a block above the second is a mapping of its own, which is returned when it is freed."""
OFTEN_FREED = 32 << 20
"""`M_MMAP_THRESHOLD` as glibc raises it itself where large blocks are often freed; `M_TRIM_THRESHOLD` is twice that."""
NEVER = -1
"""Value of `M_TRIM_THRESHOLD` with which glibc never returns the end of its heap."""
THRESHOLDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables with which a user sets the two thresholds."""
_LIMITS: list[tuple[int, int]] = []
"""The thresholds in force, the innermost last."""

CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both versions of control groups: the folder, the files with the limit and with what is used, and the line of
`memory.stat` with that part of what is used which the system frees when a program needs it: cached files."""


def cores() -> int:
    """Processor cores that this process may use. Where the system does not tell (macOS): all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_linux() -> bool:
    """Returns whether namespaces, Landlock, seccomp and pidfds exist, on which the sandboxes are built."""
    return sys.platform == "linux"


def processor() -> str:
    """What the system tells of its first processor, a line of `name : words` each; '' where it does not (macOS)."""
    with suppress(OSError, ValueError):
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    return ""


def free_memory() -> int | None:
    """Bytes of main memory that a program may still take, of machine and control group. None where that is unknown."""
    limits: list[int] = []
    # In a container this file is the whole machine's, so the limits of the control group count too.
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
    for folder, most, used, files in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # "max" is no number: there is no limit
            limit, taken = (int(Path(folder, name).read_text()) for name in (most, used))
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            limits.append(limit - taken + int(stat.get(files, 0)))
    return max(0, min(limits)) if limits else None


def freed_at_once() -> AbstractContextManager[None]:
    """Inside the block, freed memory of 128 KiB or more goes back to the system at once, and at the end all of it.

    Else the C library keeps freed blocks and cuts smaller ones out of them, and a process that had one layer after the
    other in memory looks as if it had all at once. This acts on glibc (`mallopt`, `malloc_trim`), the C library of most
    Linux systems, and does nothing elsewhere. Inside, large blocks cost more time.
    """
    return _limits(128 << 10, 128 << 10)


def kept_memory() -> AbstractContextManager[None]:
    """Inside the block, freed memory stays with this process, except blocks above 32 MiB. At the end it goes back.

    Every step of a stage takes the same memory again. Memory that went back to the system must be fetched again page by
    page. That made products of matrices three times slower, in some runs and not in others (docs/research/LOG.md,
    2026-11-27). It acts on glibc, and only if MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ are not set.
    """
    if any(name in os.environ for name in THRESHOLDS):
        return nullcontext()
    return _limits(OFTEN_FREED, NEVER)


def _usual() -> tuple[int, int]:
    """(`M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`) as the user set them, or else as glibc reaches them by itself."""
    usual = zip(THRESHOLDS, (OFTEN_FREED, 2 * OFTEN_FREED), strict=True)
    # A text that is no number, such as 128k, sets nothing.
    mapped, trimmed = (int(x) if (x := os.environ.get(n, "")).lstrip("-").isdecimal() else y for n, y in usual)
    return mapped, trimmed


@contextmanager
def _limits(mapped: int, trimmed: int) -> Generator[None]:
    """Inside the block glibc has these thresholds. At the end free memory goes back, and the old ones hold again."""
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return

    def use(limits: tuple[int, int]) -> None:
        mallopt(M_MMAP_THRESHOLD, limits[0])
        mallopt(M_TRIM_THRESHOLD, limits[1])

    # glibc does not tell its thresholds. So those in force are remembered in `_LIMITS`, for nested blocks.
    before = _LIMITS[-1] if _LIMITS else _usual()
    _LIMITS.append((mapped, trimmed))
    use(_LIMITS[-1])
    try:
        yield
    finally:
        _LIMITS.pop()
        # What the block freed and kept goes back now.
        malloc_trim(0)
        use(before)


@contextmanager
def frozen_objects() -> Generator[None]:
    """Inside the block the garbage collector looks at none of the objects that exist already (libraries, the model):
    some hundred thousand, which cost 30 ms of every step of a small model. New ones are collected as always."""
    # Collected first. Otherwise garbage that exists now would be frozen too, and stay until the end.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def during_steps() -> Generator[None]:
    """For this process while a stage takes its steps: see `frozen_objects` and `kept_memory`."""
    with frozen_objects(), kept_memory():
        yield
