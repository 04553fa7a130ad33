"""The trainer's side of one worker process, which gets a clean environment, is asked over pipes, and is killed together
with everything it started."""

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

_PASSED = "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV"
PASSED = _PASSED.split()
"""The environment variables that a worker gets, besides `LC_*`. It gets no others, so no keys or tokens."""
LENGTH = struct.Struct("!Q")
"""Every message is its length, then its bytes."""
MOST_BYTES = 1 << 20
"""The most bytes of a reply. A worker that sends more is broken."""
LOOK = 1.0
"""Seconds between two checks whether a silent process has ended."""
OUT_OF_MEMORY = 77
"""Exit code of a worker that reached its memory limit."""


@dataclass(frozen=True)
class Spec:
    """The function that a worker runs, and its limits. `maker` is `module:function`: called in the worker with
    `argument`, it returns the function that answers requests."""

    maker: str
    argument: str = ""
    cpu: int = 10
    """Seconds of processor time that one request may use. The kernel kills the worker within the next second."""
    wall: float = 60.0
    """Seconds of wall-clock time that one request may take. It is long, because a worker may have to wait."""
    memory: int = 4096
    """MiB of address space. Libraries reserve much more of it than they use."""
    start: float = 120.0
    """Seconds within which the worker must be ready."""
    preload: bool = False
    """Build the handler before the answering process is forked, so that a new one starts in milliseconds. Only for a
    maker that starts no thread."""
    most: int = MOST_BYTES
    """The most bytes of a reply."""
    quiet: bool = False
    """Drop what it prints. Otherwise its standard output and error go to the trainer's standard error."""


class WorkerError(Exception):
    """A worker did not answer. `kind`: start, wall, cpu, memory, crash, or lost for one on another machine that is
    gone. `killed`: by SIGKILL."""

    def __init__(self, kind: str, why: str, killed: bool = False) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.killed = killed


class EndedError(WorkerError):
    """The answering process ended. The guardian is starting a new one."""


class Worker(Protocol):
    """A worker that answers requests for a pool, one at a time."""

    usable: bool
    """Whether it can be asked again."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of its processes, on its machine."""
        ...

    def ask(self, request: bytes) -> dict[str, Any]:
        """The reply to a pickled request. Raises WorkerError where there is none."""
        ...

    def end(self) -> None:
        """Kill it. A caller that waits for an answer gets a WorkerError. Any thread may call this."""
        ...

    def kill(self) -> None:
        """`end`, then free what it held here."""
        ...


BeginWorker = Callable[[Spec], Worker]
"""Begins a worker. Raises WorkerError where it does not start."""


class WorkerProcess:
    """A guardian process and the process it forks to answer, used by one thread at a time.

    The guardian runs no verifier. When the answering process ends, the guardian kills what that process started,
    reports how it ended, and forks the next one. `pid` is the answering process, None until it is ready.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.usable = True
        self.process = subprocess.Popen(
            # With `-P` the import path is that of `scrubbed`, without the current folder. A session of its own gives
            # the guardian a process group, which is killed as a whole, and keeps the terminal's Ctrl-C from it.
            [sys.executable, "-P", "-m", "posttrain.verifier.workers.guardian", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if spec.quiet else None,
            env=scrubbed(os.environ),
            start_new_session=True,
            bufsize=0,
        )
        deadline = time.monotonic() + spec.start
        try:
            self._send(json.dumps(asdict(spec)).encode(), deadline)
            self._ready(deadline)
        except WorkerError as error:
            self.kill()
            raise WorkerError("start", error.why, error.killed) from None
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        """The guardian and, once it is ready, the answering process."""
        return tuple(p for p in (self.process.pid, self.pid) if p is not None)

    def ask(self, request: bytes) -> dict[str, Any]:
        """The reply to a pickled request. The answering process first says that it has taken the request. If one ends
        before that, the next one must not find the rest of the request, so the whole worker is ended.

        Raises:
            EndedError: the answering process ended; ask again.
            WorkerError: the worker has ended and is no longer `usable`.
        """
        try:
            # The time of a request begins when there is a process to answer it, so that a slow
            # start counts against nobody.
            self._read_pending(time.monotonic() + self.spec.start)
            deadline = time.monotonic() + self.spec.wall
            self._send(request, deadline)
            if "ended" in (first_message := self._receive(deadline)):  # a part of the request may still be in the pipe
                raise WorkerError(*self._end_of(int(first_message["ended"])))
            reply = self._receive(deadline)
        except BaseException:
            self.kill()
            raise
        if "ended" in reply:
            self.pid = None
            raise EndedError(*self._end_of(int(reply["ended"])))
        return reply

    def end(self) -> None:
        """Kill both processes and everything they started. A caller that waits for an answer gets a WorkerError. Any
        thread may call this."""
        self.usable = False
        # The guardian first, or it would fork another process in place of the one that was killed.
        for group in (self.process.pid, self.pid):
            if group is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        self.process.wait()

    def kill(self) -> None:
        """`end`, then close the pipes."""
        self.end()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read_pending(self, deadline: float) -> None:
        """Read messages until an answering process is ready. There are some if one was killed while it was idle."""
        while self.pid is None or self._has_message():
            if self.pid is None:
                self._ready(deadline)
            elif "ended" in self._receive(deadline):
                self.pid = None

    def _has_message(self) -> bool:
        """Returns whether there is something to read now."""
        pipe = self.process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe.fileno(), selectors.EVENT_READ)
            return bool(selector.select(0))

    def _ready(self, deadline: float) -> None:
        """Wait until the answering process reports that it is ready."""
        reply = self._receive(deadline)
        if "ended" in reply:
            _, why, killed = self._end_of(int(reply["ended"]))
            raise WorkerError("start", f"the worker did not start: {why}", killed)
        if "ready" not in reply:
            raise WorkerError("start", str(reply.get("error", "the worker did not start")))
        self.pid = int(reply["ready"])

    def _send(self, message: bytes, deadline: float) -> None:
        """Writes one message: its length and its bytes."""
        self._write(LENGTH.pack(len(message)) + message, deadline)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Reads one message, a JSON object."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        # The length is checked before the bytes are read, because the worker may send any number.
        if length > self.spec.most:
            raise WorkerError("crash", f"the worker replied with {length} bytes")
        try:
            return dict(json.loads(self._read(length, deadline)))
        except (ValueError, TypeError) as error:
            raise WorkerError("crash", f"the worker's reply is no JSON object: {error}") from None

    def _end_of(self, code: int) -> tuple[str, str, bool]:
        """Kind and reason of an end, from an exit code or a negative signal; and whether it was SIGKILL."""
        # The kernel sends SIGXCPU at the limit of processor time, which tells it from a crash.
        if code == -signal.SIGXCPU:
            return "cpu", f"used more than {self.spec.cpu} s of processor time", False
        if code == OUT_OF_MEMORY:
            return "memory", f"used more than {self.spec.memory} MiB of memory", False
        ending = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"exit code {code}"
        return "crash", f"the worker ended with {ending}", code == -signal.SIGKILL

    def _write(self, data: bytes, deadline: float) -> None:
        """Writes all bytes before the deadline."""
        pipe = self.process.stdin
        assert pipe is not None
        # A worker that does not read leaves the pipe full, and a blocking write would go on beyond the deadline.
        os.set_blocking(pipe.fileno(), False)
        unsent = memoryview(data)
        while unsent:
            self._wait(pipe.fileno(), selectors.EVENT_WRITE, deadline)
            try:
                unsent = unsent[os.write(pipe.fileno(), unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._guardian_error() from None

    def _read(self, count: int, deadline: float) -> bytes:
        """Reads exactly `count` bytes before the deadline."""
        pipe = self.process.stdout
        assert pipe is not None
        received = bytearray()
        while len(received) < count:
            self._wait(pipe.fileno(), selectors.EVENT_READ, deadline)
            chunk = os.read(pipe.fileno(), count - len(received))
            if not chunk:
                raise self._guardian_error()
            received += chunk
        return bytes(received)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Wait until the pipe is ready. The end of the process is noticed even if a child of it keeps the pipe open."""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            while not selector.select(min(LOOK, max(0.0, deadline - time.monotonic()))):
                if self.process.poll() is not None:
                    raise self._guardian_error()
                if time.monotonic() >= deadline:
                    allowed = f"{self.spec.start:g} s to start, {self.spec.wall:g} s for a request"
                    raise WorkerError("wall", f"no answer in time ({allowed})")

    def _guardian_error(self) -> WorkerError:
        """The error for a guardian that has ended."""
        try:
            return WorkerError(*self._end_of(self.process.wait(timeout=1.0)))
        except subprocess.TimeoutExpired:
            return WorkerError("crash", "the worker closed its pipe")


def packed(request: Any) -> bytes:
    """A request in the form of `WorkerProcess.ask`. Only requests are pickled; replies are JSON."""
    return pickle.dumps(request)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: what a program needs to start, the import path, one thread per numeric library."""
    inherited = {k: v for k, v in environment.items() if k in PASSED or k.startswith("LC_")}
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)  # an empty entry is the current folder
    fixed = dict.fromkeys(("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**inherited, "PYTHONPATH": path, **fixed}


def confine(cpu: int, spent: float) -> None:
    """Runs in the worker: the kernel kills this process once it has used `cpu` seconds more than `spent`."""
    # The kernel counts processor time from the start of the process, in whole seconds. So each request sets a new
    # limit: the time used so far, rounded up, and `cpu` seconds for the request.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = int(spent) + 1 + cpu
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
