"""Processes that end with the one that started them, even where it was killed and they are stopped or hang.

On Linux the kernel does that (`PR_SET_PDEATHSIG`). It counts the thread that started a process as its parent, so
`begun` starts all of them in one thread that lives as long as this process does. Other systems have no such thing:
there a process notices that its connection to the parent is closed, unless it is stopped or hangs.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

PR_SET_PDEATHSIG = 1
COMMAND = (
    "import sys; sys.path[:] = {path!r}; from posttrain.core.lifetime import die_with; die_with({parent}); {program}"
)


def die_with(parent: int) -> None:
    """Called in the new process: the kernel kills it as soon as the process `parent` is gone. It ends at once where
    that has happened before this call, when the kernel did not know of it yet."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def begun(program: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start Python with this program, which ends with this process.

    Args:
        program: Python statements. They find the modules that this process finds.
        how: what `subprocess.Popen` is to know besides.
    """
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
                started.set_exception(error)


_starting = threading.Lock()
_started: list[_Starter] = []


def _starter() -> _Starter:
    """The one of this process. A process that was forked has no threads of the one before it."""
    with _starting:
        if not _started or not _started[0].thread.is_alive():
            _started[:] = [_Starter()]
        return _started[0]
