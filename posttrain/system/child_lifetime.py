"""Child processes that end when their parent process ends, even if the parent was killed.

On Linux the kernel kills them (`PR_SET_PDEATHSIG`), even if they are stopped or hang. For the kernel the parent is the
thread that started a process. So `begun` starts all processes from one thread that lives as long as this process. On
other systems a thread in the child looks twice a second who its parent is (`end_with`); a stopped child cannot do that.
Processes that another program has started, such as torchrun, use `end_with` too.
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
"""Linux: prctl's option by which the kernel sends this process a signal when its parent ends."""
LOOK_SECONDS = 0.5
"""Seconds between two looks of `end_with` at the parent."""
COMMAND = (
    "import sys; sys.path[:] = {path!r}; from posttrain.system.child_lifetime import die_with;"
    " die_with({parent}); {program}"
)


def die_with(parent: int) -> None:
    """Called in the new process: from now on the kernel kills it when the process `parent` ends.

    If `parent` ended before this call, the kernel does not do that any more, so the process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        end_with("the process", parent)
    if os.getppid() != parent:
        os._exit(0)


@contextmanager
def ending_with_parent(name: str) -> Generator[None]:
    """Inside the block this process ends when its parent is gone. `name`: the parent in words, for the message."""
    over = end_with(name, os.getppid())
    try:
        yield
    finally:
        over.set()


def end_with(name: str, parent: int) -> threading.Event:
    """Start a thread that ends this process, with a message, when its parent is no longer the process `parent`.

    The thread stops looking when the returned event is set.
    """
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
                # `sys.exit` would end this thread alone. Nothing is finished or cleaned up: nobody waits for it now.
                os._exit(1)

    threading.Thread(target=look, name="looks for its parent", daemon=True).start()
    return over


def begun(program: str, **popen_options: Any) -> subprocess.Popen[bytes]:
    """Start Python with this program, which ends with this process.

    Args:
        program: Python statements. They find the modules that this process finds.
        popen_options: further arguments of `subprocess.Popen`.
    """
    # The new process gets the `sys.path` of this one, so that it finds the same modules.
    code = COMMAND.format(path=sys.path, parent=os.getpid(), program=program)
    return _starter().start([sys.executable, "-c", code], popen_options)


class _Starter:
    """A thread that starts processes and never ends before its process does."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[Any], Sequence[str], dict[str, Any]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="starts processes", daemon=True)
        self.thread.start()

    def start(self, command: Sequence[str], popen_options: dict[str, Any]) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((started, command, popen_options))
        return started.result()

    def _work(self) -> None:
        while True:
            started, command, popen_options = self._requests.get()
            try:
                started.set_result(subprocess.Popen(command, **popen_options))
            except BaseException as error:
                # Every error goes to the caller, through its future. This thread must not end: the kernel would kill
                # all processes that it has started.
                started.set_exception(error)


_starter_lock = threading.Lock()
_starters: list[_Starter] = []
"""The starter of this process, once it is needed; never more than one."""


def _starter() -> _Starter:
    """The starter of this process. A forked process has no threads of its parent, so it gets a new one."""
    with _starter_lock:
        if not _starters or not _starters[0].thread.is_alive():
            _starters[:] = [_Starter()]
        return _starters[0]
