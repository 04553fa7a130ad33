"""One sandbox that runs jobs one after the other, for one thread.

The kernel ends a sandbox when the *thread* that started it ends, so that thread must stay alive and keep the worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from posttrain.sandbox.backends import Backend
from posttrain.sandbox.cell.program import MEMORY_ERROR
from posttrain.sandbox.cell.zygote import CLEAN, KILL
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran, SandboxBroken, SandboxUnavailableError, Why

START_SECONDS = 30.0
"""Most seconds to start Python and import the packages; a loaded machine takes one."""
IDLE_SECONDS = 0.2
"""Seconds in which an idle sandbox without a namespace ends by itself after its control socket is closed."""
GRACE = 5.0
"""Seconds beyond a job's wall time before the whole sandbox counts as lost."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a sandbox that was killed, most often by the kernel without free memory: its own and bubblewrap's."""
SPILL = 4
"""A program is stopped when a stream is longer than this many times what is kept of it."""
CHUNK = 65536
"""Most bytes of one read from a pipe."""


@dataclass(frozen=True)
class Job:
    """A program, its standard input, the call to make (JSON, or empty), and its limits."""

    program: bytes
    stdin: bytes = b""
    call: bytes = b""
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    followed: bool = False
    """True if another job waits already. Then no child is forked ahead for the next job, because all cores are busy."""
    dropped: Callable[[], bool] = lambda: False
    """Whether nobody waits for the job any more."""


@runtime_checkable
class WorkerMaker(Protocol):
    """A backend that makes its workers itself, because its sandboxes are not processes of ours."""

    def begin(self, limits: ProgramLimits | None) -> SandboxWorker: ...


def begin(backend: Backend, limits: ProgramLimits | None = None) -> SandboxWorker:
    """Start a sandbox, local or remote. SandboxUnavailableError where that fails, SandboxBroken where it was killed."""
    return backend.begin(limits) if isinstance(backend, WorkerMaker) else SandboxWorker(backend, limits)


class SandboxWorker:
    """A running zygote. When it is lost, `run` raises SandboxBroken and the worker cannot be used again."""

    def __init__(self, backend: Backend, limits: ProgramLimits | None = None) -> None:
        self.backend = backend
        self.jobs = 0
        self.notes: dict[str, Any] = {}
        """What the zygote said of itself when it was ready."""
        self.pids: tuple[int, ...] = ()
        """Ids of the process we started and, if there is one, of the namespace's first process."""
        self._init = -1
        """A pidfd of the namespace's first process; killing it ends everything inside at once."""
        self.lock = threading.Lock()
        self.busy = False
        """True while a job runs, which `stop` may then end. Written under `lock`."""
        self.clean = True
        """False from the start of a job until the zygote has removed the job's files."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        # The error output at the start goes to a file in memory, which does not fill up like a pipe that nobody reads.
        complaints = os.memfd_create("complaints")
        # Our copy of the other end is closed after the start. Then the socket ends when the zygote ends, for any
        # reason.
        with theirs:
            try:
                start = backend.start(theirs.fileno(), limits or ProgramLimits())
                self._process = self._spawn(start, theirs.fileno(), complaints)
            except BaseException:
                ours.close()
                os.close(complaints)
                raise
        try:
            self._greet(complaints)
        except BaseException:
            self.destroy()
            raise
        finally:
            os.close(complaints)

    def _spawn(self, start: Any, control: int, complaints: int) -> subprocess.Popen[bytes]:
        """Starts the process, and finds out the namespace's first process if it is reported."""
        command, passed = list(start.command), [control]
        reader, info = os.pipe()
        # Options of bwrap stand before the command that it starts, so this one is put directly behind its name.
        if start.reports:
            command[1:1] = ["--info-fd", str(info)]
            passed.append(info)
        with os.fdopen(reader, "rb") as pipe:
            try:
                process = subprocess.Popen(
                    [*command, json.dumps(start.settings)],
                    env=start.environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    pass_fds=passed,
                    # So an interrupt at the terminal does not reach the sandbox. This process ends it.
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailableError(f"{command[0]} does not start: {error}") from error
            finally:
                os.close(info)
            self.pids = (process.pid,)
            if start.reports:
                reported = pipe.read()
                # bwrap may have failed and reported nothing. `_greet` finds that out. A pidfd is kept and not only the
                # id, because another process may have the same id later.
                with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
                    self.pids = (process.pid, json.loads(reported)["child-pid"])
                    self._init = os.pidfd_open(self.pids[1])
        return process

    def _greet(self, complaints: int) -> None:
        """Waits for the message that the zygote is ready."""
        self.control.settimeout(START_SECONDS)
        try:
            message = self.control.recv(65536)
        except TimeoutError:
            raise SandboxUnavailableError(f"{self.backend.name}: did not start within {START_SECONDS:g} s") from None
        if not message:
            # The zygote ended without a message. If it was killed and printed nothing, the machine is the likely
            # reason, such as too little memory, and another try may work. Otherwise this sandbox does not work here.
            status = self._process.wait(GRACE)
            why = os.pread(complaints, 4096, 0).decode(errors="replace").strip()
            if not why and status in KILLED:
                raise SandboxBroken(f"{self.backend.name}: the sandbox was killed at its start")
            raise SandboxUnavailableError(why.splitlines()[-1] if why else f"ended with status {status} at its start")
        self.notes = json.loads(message)
        if "error" in self.notes:
            raise SandboxUnavailableError(self.notes["error"])
        self.control.settimeout(None)

    def run(self, job: Job) -> Ran:
        """Run one program to its end or its limits."""
        self.settle()
        self.jobs += 1
        with contextlib.ExitStack() as stack:
            # In the order in which `zygote.job` unpacks them: source, stdin, stdout, stderr, result, call.
            inputs = [sealed(job.program, stack), sealed(job.stdin, stack) if job.stdin else silent(stack)]
            readers = {}
            write_ends = []
            most = {"stdout": job.limits.output, "stderr": job.limits.output, "result": job.limits.result}
            for name, bytes_kept in most.items():
                read_end, write_end = os.pipe()
                os.set_blocking(read_end, False)
                stack.callback(os.close, read_end)
                write_ends.append(write_end)
                readers[read_end] = PipeReader(name, bytes_kept)
            request = json.dumps({"limits": job.limits.plain(), "session": False, "followed": job.followed}).encode()
            try:
                self.begin(request, [*inputs, *write_ends, sealed(job.call, stack) if job.call else nothing()])
            finally:
                # The pipes end only if our copies of their writing ends are closed.
                for write_end in write_ends:
                    os.close(write_end)
            # Dropped before it was sent: `stop` had nothing to end.
            if job.dropped():
                self.stop()
            try:
                reply, stopped = self._read_streams(readers, job.limits)
            except BaseException:
                self.destroy()
                raise
            finally:
                with self.lock:
                    self.busy = False
            if job.limits.processes:
                self.destroy()  # the program's children end with the namespace, before the rest of its output is read
            for fd, reader in readers.items():
                reader.read(fd)
        return self._ran(job.limits, reply, stopped, {reader.name: reader for reader in readers.values()})

    @property
    def usable(self) -> bool:
        """True where the worker can take another job."""
        return self.control.fileno() >= 0

    def begin(self, request: bytes, fds: list[int]) -> None:
        """Send a job to the zygote. From here on `stop` ends it."""
        try:
            with self.lock:
                self.busy = True
            self.clean = False
            socket.send_fds(self.control, [request], fds)
        except OSError as error:
            self.destroy()
            raise SandboxBroken(f"{self.backend.name}: the sandbox is gone ({error})") from error

    def settle(self) -> None:
        """Wait until the files of the last job are removed."""
        if self.clean:
            return
        self.control.settimeout(START_SECONDS)
        try:
            message = self.control.recv(64)
        except OSError as error:
            message = str(error).encode()
        if message != CLEAN:
            self.destroy()
            raise SandboxBroken(f"{self.backend.name}: could not be cleaned after a job: {message.decode()}")
        self.control.settimeout(None)
        self.clean = True

    def stop(self) -> None:
        """End the running job from another thread, as if its time were over. Does nothing if none runs."""
        with self.lock:
            if self.busy:
                with contextlib.suppress(OSError):
                    self.control.send(KILL)

    def _read_streams(self, readers: dict[int, PipeReader], limits: ProgramLimits) -> tuple[dict[str, Any], Why | None]:
        """Read the streams until the zygote reports that the job has ended; do not wait for the streams to close."""
        start = time.monotonic()
        stopped: Why | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            for fd in readers:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                # Two deadlines: at the first one the program is killed, at the second one the sandbox counts as lost.
                late = limits.wall + (GRACE if stopped else 0.0)
                ready = selector.select(max(0.0, start + late - time.monotonic()))
                for key, _ in ready:
                    # The zygote's report ends the wait. The end of the streams does not, because a grandchild may keep
                    # them open.
                    if key.fileobj is self.control:
                        return self.reply(), stopped
                    reader = readers[key.fd]
                    if not reader.read(key.fd):
                        selector.unregister(key.fd)
                    if reader.total > SPILL * reader.kept and stopped is None:
                        stopped = "output"
                        self.control.send(KILL)
                if time.monotonic() - start > late:
                    if stopped and time.monotonic() - start > limits.wall + GRACE:
                        raise SandboxBroken(f"{self.backend.name}: no answer {GRACE:g} s after the job's time was over")
                    if not stopped:
                        stopped = "timeout"
                        self.control.send(KILL)

    def reply(self) -> dict[str, Any]:
        """The next message of the zygote. SandboxBroken if there is none."""
        try:
            message = self.control.recv(65536)
        except OSError as error:
            raise SandboxBroken(f"{self.backend.name}: the sandbox is gone ({error})") from error
        if not message:
            raise SandboxBroken(f"{self.backend.name}: the sandbox ended while a job ran")
        return json.loads(message)

    def _ran(
        self, limits: ProgramLimits, reply: dict[str, Any], stopped: Why | None, readers: dict[str, PipeReader]
    ) -> Ran:
        """The outcome of a job, from the zygote's report and the streams."""
        status = os.waitstatus_to_exitcode(reply["status"])
        # Without `DONE` the program did not run, and the text on the error stream is from the sandbox.
        if not reply["ran"]:
            why = bytes(readers["stderr"].head).decode(errors="replace").strip()
            raise SandboxBroken(
                f"{self.backend.name}: the job could not be confined, so it did not run: {why or status}"
            )
        return Ran(
            why=how_it_ended(status, stopped, reply["cpu"] >= limits.cpu),
            exit=status,
            stdout=bytes(readers["stdout"].head),
            stderr=bytes(readers["stderr"].head),
            cut=any(reader.total > reader.kept for reader in readers.values()),
            # A result that was cut is left out, because its beginning may be valid JSON of another value.
            result=bytes(readers["result"].head) if readers["result"].total <= readers["result"].kept else b"",
            seconds=reply["seconds"],
            cpu=reply["cpu"],
            peak=reply["peak"],
            sandbox=self.backend.name,
            network=reply["network"],
        )

    def close(self) -> None:
        """End an idle sandbox. In a namespace its first process is killed, so that bubblewrap reaps it: if the zygote
        ended by itself, process 1 of the machine would have to."""
        # Without a namespace the zygote notices the closed socket, and ends its spare child itself.
        if self._init < 0:
            self.control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.destroy()

    def destroy(self) -> None:
        """End everything inside at once, and wait until it has ended."""
        self.control.close()
        if self._init >= 0:
            with contextlib.suppress(ProcessLookupError):
                # The kernel kills every process of the namespace with its first one, detached children included.
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            os.close(self._init)
            self._init = -1
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(IDLE_SECONDS)  # an idle one reaps its own child first
            if self._process.poll() is None:
                self._process.kill()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PipeReader:
    """Reads one pipe: keeps its first `kept` bytes and counts all."""

    def __init__(self, name: str, kept: int) -> None:
        self.name = name
        self.kept = kept
        self.head = bytearray()
        self.total = 0

    def read(self, fd: int) -> bool:
        """Read what is available, unless it is too much already. Returns whether more may come."""
        # Beyond this bound nothing is read. The pipe fills, the program waits, and our memory does not grow.
        while self.total <= SPILL * self.kept:
            try:
                chunk = os.read(fd, CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.head += chunk[: max(0, self.kept - len(self.head))]
            self.total += len(chunk)
        return True


@functools.cache
def nothing() -> int:
    """An empty file in memory, shared by all jobs. No program has it open: two could exchange data over it."""
    return sealed(b"", contextlib.ExitStack())


def silent(stack: contextlib.ExitStack) -> int:
    """An empty standard input, for one program."""
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def sealed(data: bytes, stack: contextlib.ExitStack) -> int:
    """Bytes as a sealed (read-only) file in memory."""
    fd = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]
    # Standard input is read from the file's position, so it is set to the beginning. The seals come last, because after
    # them nobody can write.
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def how_it_ended(status: int, stopped: Why | None, spent: bool) -> Why:
    """Returns how a program ended. `stopped`: why we ended it; `spent`: whether its processor time was over."""
    if stopped:
        return stopped
    # A SIGKILL that we did not send is from the limit on processor time, if that is used up, or from somebody else.
    if -status == signal.SIGXCPU or (-status == signal.SIGKILL and spent):
        return "timeout"
    if status < 0:
        return "crashed"
    if status == MEMORY_ERROR:
        return "memory"
    return "ok" if status == 0 else "error"
