"""The program of a worker: a guardian, and the process that it forks to answer requests, one at a time.

`worker_process.WorkerProcess` starts it as `python -m posttrain.verifier.workers.guardian PARENT`. The main thread
answers, so a verifier may use signals and need not be thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from posttrain.system.terminal_output import tell
from posttrain.verifier.workers.worker_process import LENGTH, OUT_OF_MEMORY, confine

PR_SET_PDEATHSIG = 1
"""The option of Linux's `prctl` that sends a signal to this process when its parent ends."""
TAKEN = {"taken": True}
"""The message that a request was read to its end. It is sent before the answer."""
FINISHED = 76
"""Exit code of an answering process that is the last: the trainer closed the pipe, or no handler could be made."""


def main(parent: int) -> None:
    """The guardian: read the limits, then keep one answering process running until the trainer is gone."""
    # Pipes of their own: what a verifier prints goes to standard error and cannot break the protocol, and its `input()`
    # finds nothing.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    die_with(parent)
    spec = json.loads(take(requests) or b"{}")
    # A crash of a process with gigabytes of address space would write them to the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # some systems refuse it; the other limits still hold
        resource.setrlimit(resource.RLIMIT_AS, (spec["memory"] << 20, spec["memory"] << 20))
    # Cached: if `preload` makes it here, every fork inherits it. Else each answering process makes its own.
    make = functools.cache(functools.partial(_handler, spec["maker"], spec["argument"]))
    if spec["preload"]:
        try:
            make()
        except Exception as error:
            return give(replies, {"error": f"{type(error).__name__}: {error}"})
    guardian = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            os._exit(_answer_all(requests, replies, guardian, make, spec["cpu"]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # The answering process led a group of its own, so this ends whatever it started and left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if code == FINISHED:
            return None
        give(replies, {"ended": code})


def _answer_all(
    requests: int, replies: int, guardian: int, make: Callable[[], Callable[[Any], dict[str, Any]]], cpu: int
) -> int:
    """The answering process, in its own process group, which the guardian kills after it. Returns the exit code."""
    try:
        os.setpgid(0, 0)
        die_with(guardian)
        try:
            handler = make()
        except Exception as error:
            give(replies, {"error": f"{type(error).__name__}: {error}"})
            return FINISHED
        give(replies, {"ready": os.getpid()})
        while (request := take(requests)) is not None:
            # Now nothing of the request is left in the pipe, so after a crash the next process reads the next message.
            give(replies, TAKEN)
            confine(cpu, time.process_time())
            # The trainer is trusted, so requests may be pickled. Replies go the other way and are JSON.
            give(replies, handler(pickle.loads(request)))
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException:
        tell(traceback.format_exc(), file=sys.stderr)
        return 1
    return FINISHED


def _handler(maker: str, argument: str) -> Callable[[Any], dict[str, Any]]:
    """The function that answers requests, from `module:function` and its argument."""
    module, _, name = maker.partition(":")
    return getattr(importlib.import_module(module), name)(argument)


def take(pipe: int) -> bytes | None:
    """One message; None at the end of the pipe. No byte behind it is read, so the next process finds the next one."""
    length = _exactly(pipe, LENGTH.size)
    return None if length is None else _exactly(pipe, LENGTH.unpack(length)[0])


def _exactly(pipe: int, count: int) -> bytes | None:
    """`count` bytes of a pipe; None if it ends before."""
    received = bytearray()
    while len(received) < count:
        chunk = os.read(pipe, count - len(received))
        if not chunk:
            return None
        received += chunk
    return bytes(received)


def give(pipe: int, reply: dict[str, Any]) -> None:
    """Write one whole message."""
    body = json.dumps(reply).encode()
    unsent = memoryview(LENGTH.pack(len(body)) + body)
    while unsent:
        unsent = unsent[os.write(pipe, unsent) :]


def die_with(parent: int) -> None:
    """End this process when the parent is gone, even if the parent was killed and this process hangs.

    On Linux the kernel does that. Elsewhere a thread checks every second. Code in C that hangs can block that thread,
    and then only the limit on processor time is left.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # If the parent ended before the line above, no signal comes.
    if os.getppid() != parent:
        os._exit(0)


def _watch(parent: int) -> None:
    """Ends this process and its group once the parent is another one than `parent`."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
