"""A pool of sandboxes for many programs at once, from coroutines or from threads. Each sandbox has its own thread.

Thousands of programs may wait. A waiting program is an entry in a queue, and does not block the event loop.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Self

from posttrain.sandbox.backends import Backend
from posttrain.sandbox.cell.program import encode
from posttrain.sandbox.program_session import PythonSession, Sessions
from posttrain.sandbox.sandbox_types import (
    Call,
    NetworkAttempts,
    ProgramLimits,
    Ran,
    SandboxBroken,
    SandboxUnavailableError,
    as_bytes,
)
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker, begin
from posttrain.system.errors import ConfigError
from posttrain.system.machine import cores
from posttrain.system.worker_threads import WorkerThreads, settle

RECYCLE = 1000
"""Jobs of one zygote before it is replaced by a fresh one."""
SESSIONS = 16
"""Default number of sessions at once. Each is a process with Python and its packages loaded."""
IDLE = 900.0
"""Seconds that an idle session is kept; longer than a policy takes for its longest turn."""
TRIES = 3
"""Sandboxes that a job may lose before SandboxBroken is raised: several, because the job need not be the reason."""


@dataclass
class JobCounts:
    """Counts of a pool: jobs by how they ended, sandboxes started and lost."""

    why: Counter[str] = field(default_factory=Counter)
    started: int = 0
    lost: int = 0


@dataclass
class _Submission:
    """A program that was submitted, with the future of its outcome."""

    job: Job
    answer: Future[Ran]
    worker: SandboxWorker | None = None
    dropped: bool = False

    def begin(self) -> bool:
        return not self.dropped and self.answer.set_running_or_notify_cancel()

    def refuse(self) -> None:
        settle(self.answer.set_exception, SandboxBroken("the sandbox was closed before this program had its turn"))


class Sandbox:
    """A pool of sandboxes of one backend. Use as a context manager, or call `close`.

    `run` is for coroutines, `run_sync` for other code. Cancelling a `run` ends its program. `session` takes programs
    in pieces.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        workers: int | None = None,
        limits: ProgramLimits | None = None,
        sessions: int = SESSIONS,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"sandbox: workers={workers} must be 1 or more")
        self.backend = backend
        self.limits = limits or ProgramLimits()
        self.network = NetworkAttempts()
        self.sessions = Sessions(backend, sessions, self.network)
        self.counts = JobCounts()
        # Neither the threads nor the finalizer may refer to `self`, or an unused pool would never be collected.
        self._threads = _Programs(backend, self.counts, self.network, workers or cores()).threads
        self._finalizer = weakref.finalize(self, self._threads.close, wait=True)

    @property
    def name(self) -> str:
        """Name of the backend, as records state it."""
        return self.backend.name

    @property
    def waiting(self) -> int:
        """Programs that no sandbox has taken yet."""
        return len(self._threads.waiting)

    async def run(
        self,
        program: str | bytes,
        *,
        stdin: str | bytes = b"",
        call: Call | None = None,
        limits: ProgramLimits | None = None,
    ) -> Ran:
        """Run one program, or call one of its functions.

        Raises:
            SandboxBroken: several sandboxes were lost; this is no result of the program.
            SandboxUnavailableError: a sandbox could not be started (any more).
        """
        submission = self._ask(program, stdin, call, limits)
        try:
            return await asyncio.wrap_future(submission.answer)
        except asyncio.CancelledError:
            self._drop(submission)
            raise

    def run_sync(
        self,
        program: str | bytes,
        *,
        stdin: str | bytes = b"",
        call: Call | bytes | None = None,
        limits: ProgramLimits | None = None,
    ) -> Ran:
        """`run` for callers without an event loop; an interrupt ends the program too. `call` may be encoded already."""
        submission = self._ask(program, stdin, call, limits)
        try:
            return submission.answer.result()
        except KeyboardInterrupt:
            self._drop(submission)
            raise

    def _drop(self, submission: _Submission) -> None:
        """End a program that nobody waits for any more, and no other."""
        with self._threads.lock:
            submission.dropped = True
            # Once the program has ended, `_serve` clears the worker under the same lock. So no other program is stopped
            # here.
            if submission.worker is not None:
                submission.worker.stop()

    def session(self, *, limits: ProgramLimits | None = None, idle: float = IDLE) -> PythonSession:
        """An interpreter for a program in pieces that keeps the definitions of earlier pieces: the Python tool of an
        episode.

            async with sandbox.session(limits=ProgramLimits(wall=10)) as session:
                await session.run("x = 6")
                ran = await session.run("x * 7")      # ran.why == "ok", ran.said == "42\\n"

        It is confined exactly like a program. With the backend `namespaces` it may write 32 MiB of files under /tmp,
        which are removed with it; elsewhere it can write none. It costs nothing before its first piece, which waits
        while `sessions` others are open.

        Args:
            limits: of each piece, but `memory` is of the whole session. None: those of this sandbox.
            idle: seconds it is kept without a piece; afterwards `run` raises SandboxBroken.
        """
        return self.sessions.session(limits or self.limits, idle)

    def _ask(
        self, program: str | bytes, stdin: str | bytes, call: Call | bytes | None, limits: ProgramLimits | None
    ) -> _Submission:
        encoded_call = b"" if call is None else as_json(call) if isinstance(call, Call) else call
        job = Job(as_bytes(program), as_bytes(stdin), encoded_call, limits or self.limits)
        submission = _Submission(job, Future())
        if self._threads.put(submission) is None:
            raise SandboxBroken("this sandbox has been closed")
        return submission

    def close(self) -> None:
        """Refuse waiting programs, let running ones reach their end or their limits, then end every sandbox."""
        self.sessions.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Programs:
    """The work of all threads of a pool. It does not refer to the pool, so the pool can be collected."""

    def __init__(self, backend: Backend, counts: JobCounts, network: NetworkAttempts, most: int) -> None:
        self.backend, self.counts, self.network = backend, counts, network
        self.threads = WorkerThreads("sandbox", most, self._work)

    def _work(self, calls: Iterator[_Submission]) -> None:
        """Runs in each thread: takes a program, runs it in a sandbox, returns the outcome."""
        worker: SandboxWorker | None = None
        try:
            for submission in calls:
                worker = self._serve(submission, worker)
        finally:
            if worker is not None:
                worker.close()

    def _serve(self, submission: _Submission, worker: SandboxWorker | None) -> SandboxWorker | None:
        """Run one program. Returns the sandbox to use next, if it is still usable.

        A job that may start processes gets a sandbox for itself, which ends with it; the warm one is kept.
        """
        lost: Exception | None = None
        alone = submission.job.limits.processes > 0
        for _ in range(TRIES):
            used: SandboxWorker | None = None
            try:
                used = submission.worker = self._start(submission.job.limits) if alone else worker or self._start(None)
                ran = used.run(
                    replace(submission.job, followed=bool(self.threads.waiting), dropped=lambda: submission.dropped)
                )
            # Whatever is raised is a failure of the sandbox, so another one is tried. What the program did is in `ran`.
            # An error that left this thread would leave the job without an answer.
            except Exception as error:
                lost = error
                with self.threads.lock:
                    self.counts.lost += 1
                if used is not None:
                    used.destroy()
                worker = worker if alone else None
                # If a sandbox cannot be started, the next try would fail too.
                if isinstance(error, SandboxUnavailableError) or submission.dropped:
                    break
                continue
            with self.threads.lock:
                submission.worker = None  # from here on the sandbox may run another program
                self.counts.why[ran.why] += 1
            if alone:
                used.destroy()
            else:
                worker = used
            settle(submission.answer.set_result, self.network.add(ran))
            if worker is not None and worker.jobs >= RECYCLE:
                worker.close()
                worker = None
            return worker
        if not isinstance(lost, SandboxBroken | SandboxUnavailableError):
            lost = SandboxBroken(f"{self.backend.name}: {type(lost).__name__}: {lost}")
        settle(submission.answer.set_exception, lost)
        return worker

    def _start(self, limits: ProgramLimits | None) -> SandboxWorker:
        with self.threads.lock:
            self.counts.started += 1
        return begin(self.backend, limits)


def as_json(call: Call) -> bytes:
    """A call as JSON; its arguments have exact built-in types."""
    arguments = {"args": encode(list(call.args)), "kwargs": encode(dict(call.kwargs))}
    return json.dumps({"function": call.function, **arguments}).encode()
