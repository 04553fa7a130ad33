"""Processes that end with the one that started them, even where it was killed and they are stopped or hang.

On Linux the kernel does that (`PR_SET_PDEATHSIG`). It counts the thread that started a process as its parent, so
`begun` starts all of them in one thread that lives as long as this process does. On other systems a thread of the
process looks who its parent is (`end_with`), which it can do unless it is stopped. So do processes that somebody else
has started, such as torchrun.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from posttrain.system.terminal_output import tell

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.5
"""How often a process looks whether its parent is gone, where the kernel does not tell."""
COMMAND = (
    "import sys; sys.path[:] = {path!r}; from posttrain.system.child_lifetime import die_with;"
    " die_with({parent}); {program}"
)


def die_with(parent: int) -> None:
    """Called in the new process: the kernel kills it as soon as the process `parent` is gone. It ends at once where
    that has happened before this call, when the kernel did not know of it yet."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        end_with("the process", parent)
    if os.getppid() != parent:
        os._exit(0)


@contextmanager
def ending_with_parent(name: str) -> Generator[None]:
    """Inside, this process ends when the one that started it is gone. `name`: of that one, in words."""
    over = end_with(name, os.getppid())
    try:
        yield
    finally:
        over.set()


def end_with(name: str, parent: int) -> threading.Event:
    """End this process, with a line that says why, when its parent is another than the process `parent`. A thread looks
    until the event that is returned is set."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            if os.getppid() != parent:
                with suppress(OSError, ValueError):  # nobody may read it any more
                    tell(
                        f"{name} that started process {os.getpid()} (it was process {parent}) is gone, so this one"
                        " ends. A run goes on from its last checkpoint with --resume",
                        file=sys.stderr,
                    )
                # Not `sys.exit`, which would end this thread alone; and there is nobody for whom anything could be
                # finished.
                os._exit(1)

    threading.Thread(target=look, name="looks for its parent", daemon=True).start()
    return over


def begun(program: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start Python with this program, which ends with this process.

    Args:
        program: Python statements. They find the modules that this process finds.
        how: what `subprocess.Popen` is to know besides.
    """
    # The modules of this process may lie where only its own `sys.path` finds them.
    code = COMMAND.format(path=sys.path, parent=os.getpid(), program=program)
    return _starter().start([sys.executable, "-c", code], how)


class _Starter:
    """A thread that starts processes and never ends before its process does."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Future[Any], Sequence[str], dict[str, Any]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="starts processes", daemon=True)
        self.thread.start()

    def start(self, command: Sequence[str], how: dict[str, Any]) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._asked.put((started, command, how))
        return started.result()

    def _work(self) -> None:
        while True:
            started, command, how = self._asked.get()
            try:
                started.set_result(subprocess.Popen(command, **how))
            except BaseException as error:
                # Into the caller's future, whatever it is: this thread must live as long as the process, or all
                # children would be killed.
                started.set_exception(error)


_starting = threading.Lock()
_started: list[_Starter] = []


def _starter() -> _Starter:
    """The one of this process. A process that was forked has no threads of the one before it."""
    with _starting:
        if not _started or not _started[0].thread.is_alive():
            _started[:] = [_Starter()]
        return _started[0]
