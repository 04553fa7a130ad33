"""Facts about this machine, asked in a way that every Linux and macOS answers."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `mallopt`: above which it returns the end of its memory, and above which a block is a mapping of
its own, which is returned when it is freed."""
OFTEN_FREED = 32 << 20
"""The value to which glibc by itself raises `M_MMAP_THRESHOLD` in a process that often frees large blocks; it raises
`M_TRIM_THRESHOLD` to twice that."""
NEVER = -1
"""To `mallopt`: the end of the memory is never returned."""
THRESHOLDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""The user's own words to glibc on the two."""
_LIMITS: list[tuple[int, int]] = []
"""The thresholds in force, the innermost last."""

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
    """Returns whether namespaces, Landlock, seccomp and pidfds exist, on which the sandboxes are built."""
    return sys.platform == "linux"


def processor() -> str:
    """Returns the facts that the system tells of its first processor, such as its maker and its features: a line of
    `name : words` each. '' where it does not tell (macOS)."""
    with suppress(OSError, ValueError):
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    return ""


def free_memory() -> int | None:
    """Bytes of main memory that a program may still take: what the machine has, and what its control group allows.
    None where the system does not tell."""
    found: list[int] = []
    # In a container this file is the whole machine's, so the limits of the control group count too.
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    for most, used in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # "max" is no number: there is no limit
            found.append(int(Path(most).read_text()) - int(Path(used).read_text()))
    return max(0, min(found)) if found else None


def freed_at_once() -> AbstractContextManager[None]:
    """Inside, memory of 128 KiB or more goes back to the system as soon as this process frees it, and at the end so
    does what is left. Without it the C library keeps such blocks for itself and cuts smaller ones out of them, so that
    a process that had a layer after the other in memory looks as if it had all of them.

    It acts on glibc (`mallopt`, `malloc_trim`), which is that of most of Linux, and does nothing elsewhere. Inside,
    large blocks cost more time.
    """
    return _limits(128 << 10, 128 << 10)


def kept_memory() -> AbstractContextManager[None]:
    """Inside, memory that this process frees stays with it, but blocks above 32 MiB; at the end it goes back.

    Every step of a stage takes the same memory again. What goes back to the system in between must be fetched page by
    page, which made products of matrices three times slower where it happened, and it happened by chance
    (docs/research/LOG.md, 2026-11-27). It acts on glibc, where MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ are
    not set.
    """
    if any(name in os.environ for name in THRESHOLDS):
        return nullcontext()
    return _limits(OFTEN_FREED, NEVER)


def _usual() -> tuple[int, int]:
    """Above which size a block is a mapping of its own, and above which the end of the memory is returned: what the
    user set, else what glibc comes to in a process that often frees large blocks."""
    mapped, trimmed = (os.environ.get(name) for name in THRESHOLDS)
    return int(mapped or OFTEN_FREED), int(trimmed or 2 * OFTEN_FREED)


@contextmanager
def _limits(mapped: int, trimmed: int) -> Generator[None]:
    """Inside, glibc has these two limits (`_usual`). At the end all that is free goes back, and they are what they
    were."""
    try:
        library = ctypes.CDLL(None)
        choose, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return

    def use(limits: tuple[int, int]) -> None:
        choose(M_MMAP_THRESHOLD, limits[0])
        choose(M_TRIM_THRESHOLD, limits[1])

    # glibc cannot be asked for its limits. So those that are in force are remembered here, for nested uses.
    before = _LIMITS[-1] if _LIMITS else _usual()
    _LIMITS.append((mapped, trimmed))
    use(_LIMITS[-1])
    try:
        yield
    finally:
        _LIMITS.pop()
        # What the block freed and kept goes back now.
        trim(0)
        use(before)


@contextmanager
def frozen_objects() -> Generator[None]:
    """Inside, the collector no longer looks at what exists now: libraries, the model, its parts. That is some hundred
    thousand objects, and to look at them cost 30 ms of every step of a small model. Cycles made inside are collected as
    always. Cycles made before are collected at the beginning, and from the end on again."""
    # Collected first: garbage that is frozen would stay until the end.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def during_steps() -> Generator[None]:
    """This process while a stage takes its steps: nothing that lasts is looked at by the collector, and memory that one
    step frees is there for the next."""
    with frozen_objects(), kept_memory():
        yield
