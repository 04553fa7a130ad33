"""What runs in a worker process: one request in, one reply out, until the trainer closes the pipe, dies, or kills it.

Started by `process.Worker` as `python -m posttrain.environment.workers.worker PARENT`. The requests are answered in the main
thread, so a verifier that is not thread-safe, or that uses signals, is at home here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from posttrain.environment.workers.process import LENGTH, OUT_OF_MEMORY, confine

PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Read the limits, build the handler, say whether that worked, answer."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    die_with(parent)
    spec = json.loads(_take(requests) or b"{}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(spec["memory"])
    try:
        handler = _handler(spec["maker"], spec["argument"])
    except Exception as error:
        _give(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    _give(replies, {"ready": True})
    while (request := _take(requests)) is not None:
        confine(spec["cpu"], time.process_time())
        try:
            reply = handler(pickle.loads(request))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        _give(replies, reply)


def _handler(maker: str, argument: str) -> Callable[[Any], dict[str, Any]]:
    module, _, name = maker.partition(":")
    return getattr(importlib.import_module(module), name)(argument)


def _take(pipe: Any) -> bytes | None:
    head = pipe.read(LENGTH.size)
    return pipe.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _give(pipe: Any, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def _limit_memory(mebibytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # some systems refuse it; the other limits still hold
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))


def die_with(parent: int) -> None:
    """Leave when the trainer is gone, even if it was killed outright and this process is in the middle of a hang."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
