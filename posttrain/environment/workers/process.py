"""The trainer's end of one worker process: started with a clean environment, asked over pipes, killed with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables a worker is given, beside `LC_*`. Whatever else the trainer has (keys, tokens) it never sees."""
LENGTH = struct.Struct("!Q")
"""Every message is its length and its bytes."""
MOST_BYTES = 1 << 20
"""A longer reply is no reply: the worker is broken."""
LOOK = 1.0
"""Seconds between looks at a process that does not answer."""
OUT_OF_MEMORY = 77
"""Exit code by which a worker says that it hit its memory limit."""


@dataclass(frozen=True)
class Spec:
    """What a worker runs, and within which limits.

    `maker` is `module:function`; called in the worker with `argument` it returns the function that answers requests.
    """

    maker: str
    argument: str = ""
    cpu: int = 10
    """Seconds of processor time one request may use; the kernel kills the worker in the second after."""
    wall: float = 60.0
    """Seconds one request may take on the clock: long, since a worker that waits or is starved has not computed."""
    memory: int = 4096
    """MiB of address space. Libraries reserve much more than they use."""
    start: float = 120.0
    """Seconds until it must be ready."""
    quiet: bool = False
    """Drop what it prints; otherwise standard output and error arrive on the trainer's standard error."""


class WorkerError(Exception):
    """A worker did not answer. `kind` says how it ended: start, wall, cpu, memory or crash."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


class Worker:
    """One process, used by one thread at a time."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "posttrain.environment.workers.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if spec.quiet else None,
            env=scrubbed(os.environ),
            start_new_session=True,
            bufsize=0,
        )
        limits = {"maker": spec.maker, "argument": spec.argument, "cpu": spec.cpu, "memory": spec.memory}
        try:
            ready = self._exchange(json.dumps(limits).encode(), time.monotonic() + spec.start)
        except WorkerError as error:
            raise WorkerError("start", f"the worker did not start: {error.why}") from None
        except BaseException:
            self.kill()
            raise
        if ready.get("error"):
            self.kill()
            raise WorkerError("start", str(ready["error"]))

    def ask(self, request: bytes) -> dict[str, Any]:
        """The reply to a pickled request. On WorkerError the process is gone."""
        return self._exchange(request, time.monotonic() + self.spec.wall)

    def end(self) -> None:
        """End the process and everything in its session; whoever waits for its answer is told. Any thread may do this."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill(self) -> None:
        """`end`, and give the pipes back."""
        self.end()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange(self, message: bytes, deadline: float) -> dict[str, Any]:
        try:
            self._write(LENGTH.pack(len(message)) + message, deadline)
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
            if length > MOST_BYTES:
                raise WorkerError("crash", f"the worker replied with {length} bytes")
            reply = json.loads(self._read(length, deadline))
        except WorkerError:
            self.kill()
            raise
        except ValueError as error:
            self.kill()
            raise WorkerError("crash", f"the worker's reply is not JSON: {error}") from None
        except BaseException:
            self.kill()
            raise
        return reply

    def _write(self, data: bytes, deadline: float) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        rest = memoryview(data)
        while rest:
            self._wait(pipe.fileno(), selectors.EVENT_WRITE, deadline)
            try:
                rest = rest[os.write(pipe.fileno(), rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _read(self, count: int, deadline: float) -> bytes:
        pipe = self.process.stdout
        assert pipe is not None
        parts = bytearray()
        while len(parts) < count:
            self._wait(pipe.fileno(), selectors.EVENT_READ, deadline)
            part = os.read(pipe.fileno(), count - len(parts))
            if not part:
                raise self._ended()
            parts += part
        return bytes(parts)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Until the pipe is ready. A process that ended is noticed even where a child it left holds the pipe open."""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            while not selector.select(min(LOOK, max(0.0, deadline - time.monotonic()))):
                if self.process.poll() is not None:
                    raise self._ended()
                if time.monotonic() >= deadline:
                    raise WorkerError("wall", f"no answer within {self.spec.wall:g} s, most of it spent waiting")

    def _ended(self) -> WorkerError:
        """Why the pipe closed. A worker that only closed its pipe is ended here."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return WorkerError("crash", "the worker closed its pipe")
        if code == -signal.SIGXCPU:
            return WorkerError("cpu", f"used more than {self.spec.cpu} s of processor time")
        if code == OUT_OF_MEMORY:
            return WorkerError("memory", f"used more than {self.spec.memory} MiB of memory")
        how = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"exit code {code}"
        return WorkerError("crash", f"the worker ended with {how}")


def packed(request: Any) -> bytes:
    """A request as `Worker.ask` takes it. Pickle travels towards the worker only; replies are JSON."""
    return pickle.dumps(request)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: what a program needs to start, our import path, one thread per numeric library."""
    kept = {k: v for k, v in environment.items() if k in PASSED or k.startswith("LC_")}
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def confine(cpu: int, spent: float) -> None:
    """In the worker: let the kernel kill this process once it has used `cpu` more seconds than it has `spent`."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = int(spent) + 1 + cpu
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
