"""Backends that this machine can run, and small helpers for the sandbox's tests.

Nothing here runs a hostile program without a sandbox around it; there is no unconfined control, least of all as root.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest

from posttrain.sandbox.backends import CELL, Backend, Landlock, Namespaces
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker
from posttrain.sandbox.selftest import selftest
from tests.needed import program

NAMES = ("namespaces", "landlock")


@functools.cache
def interpreter() -> str | None:
    """A Python that an unused user can read: root's own may lie in root's home, which only a private root can show."""
    for path in (sys.executable, "/usr/bin/python3"):
        real = Path(os.path.realpath(path))
        if real.exists() and (os.geteuid() != 0 or all(p.stat().st_mode & stat.S_IXOTH for p in real.parents)):
            return None if path == sys.executable else path
    return None


def made(name: str, cell: Path = CELL) -> Backend:
    """A backend by name, without packages where the interpreter is not the one that has them."""
    if name == "namespaces":
        return Namespaces(("numpy",), cell=cell)
    other = interpreter()
    return Landlock(() if other else ("numpy",), other, cell=cell)


@functools.cache
def wrong(name: str) -> tuple[str, ...]:
    """The self-test's findings on this machine."""
    return tuple(selftest(made(name)))


def backend(name: str) -> Backend:
    """A backend that passed its self-test, or a skip with the reason; without bubblewrap a failure under CI."""
    if name == "namespaces":
        program(("bwrap",), "bubblewrap")
    if wrong(name):
        pytest.skip(f"{name}: {'; '.join(wrong(name))}")
    return made(name)


def ran(worker: SandboxWorker, source: str | bytes, *, stdin: bytes = b"", wall: float = 10.0, **limits: float) -> Ran:
    """One program in a sandbox that is there already."""
    program = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    return worker.run(Job(program, stdin, limits=ProgramLimits(wall=wall, **limits)))  # type: ignore[arg-type]


def patched(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of what runs inside, with one thing broken: what the self-test has to notice."""
    cell = folder / "cell"
    if not cell.exists():
        shutil.copytree(CELL, cell, ignore=shutil.ignore_patterns("__pycache__"))
    text = (cell / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    (cell / file).write_text(text.replace(old, new))
    for path in (folder, *folder.parents):
        if path == Path("/tmp") or not os.access(path, os.W_OK):
            break
        path.chmod(path.stat().st_mode | 0o055)
    return cell


def gone(pid: int, within: float = 3.0) -> bool:
    """Whether a process ends (a zombie has ended) within some seconds."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def living(marker: str) -> list[str]:
    """Command lines of running processes that contain a marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line and int(entry.name) != os.getpid():
                found.append(f"{entry.name} {line}")
    return found
