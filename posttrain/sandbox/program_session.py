"""Sessions (`Sandbox.session`): programs in pieces, each with the definitions of earlier ones, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from posttrain.sandbox.backends import Backend
from posttrain.sandbox.local_conversation import LocalConversation
from posttrain.sandbox.remote import RemoteConversation, RemoteWorker
from posttrain.sandbox.sandbox_types import (
    NetworkAttempts,
    ProgramLimits,
    Ran,
    SandboxBroken,
    SandboxUnavailableError,
    as_bytes,
)
from posttrain.sandbox.sandbox_worker import SandboxWorker, begin
from posttrain.system.errors import ConfigError
from posttrain.system.worker_threads import WorkerThreads, settle

RECYCLE = 1000
"""Sessions of one sandbox before it is replaced by a fresh one."""
TRIES = 3
"""Sandboxes that a session without definitions may lose before SandboxBroken is raised."""
SPARE_SECONDS = 30.0
"""Seconds after which an unused sandbox is ended."""
CLOSED = "this session was closed"


class PythonSession:
    """One interpreter of an episode's own, in a sandbox of its own. Use `async with`, or `close` it.

    It takes a sandbox at its first piece, and waits for one if all are taken. It returns the sandbox when it ends: when
    it is closed or garbage-collected, its call is cancelled, `idle` seconds pass without a piece, or `Sandbox` closes.
    """

    def __init__(self, sessions: Sessions, limits: ProgramLimits, idle: float) -> None:
        self._sessions = sessions
        # The thread refers only to the shared state. So an unused session is collected, and its finalizer ends it.
        self._shared = _SharedSession(limits, idle)
        self._finalizer = weakref.finalize(self, _SharedSession.end, self._shared, CLOSED)

    async def run(self, code: str | bytes) -> Ran:
        """Run a piece of Python after those before it.

        `stdout` is what it printed, then the repr of its last expression if that has a value. `stderr` ends with the
        traceback where `why` is `error`. An exception (also `SystemExit` and MemoryError) ends the piece; its
        definitions are kept. With `timeout`, `output` and `crashed`, and where the program ended itself, the process
        has ended: `lost` is True, and the next piece begins in a fresh one without the earlier definitions. Every limit
        is per piece, except `memory`, which is for the whole session. Between pieces the process and its threads are
        stopped.

        Concurrent calls run in the order they were made. Cancelling one ends the session.

        Raises:
            SandboxBroken: the sandbox was lost, which is our failure, or the session has ended; the message says which.
            SandboxUnavailableError: a sandbox could not be started (any more).
        """
        answer = self._ask(code)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.end()
            raise

    def run_sync(self, code: str | bytes) -> Ran:
        """`run` for callers without an event loop."""
        answer = self._ask(code)
        try:
            return answer.result()
        except KeyboardInterrupt:
            self.end()
            raise

    def _ask(self, code: str | bytes) -> Future[Ran]:
        piece = _Piece(as_bytes(code), Future())
        if self._shared.ask(piece):
            self._sessions.queue(self._shared)
        return piece.answer

    @property
    def ended(self) -> bool:
        """True where the session takes no more pieces."""
        return bool(self._shared.ended)

    def end(self) -> None:
        """End the session, also during a piece, without waiting for it."""
        self._finalizer()

    async def close(self) -> None:
        """End the session and wait until its process is gone."""
        self.end()
        await asyncio.wrap_future(self._shared.over)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass
class _Piece:
    code: bytes
    answer: Future[Ran]


@dataclass
class _SharedSession:
    """The state that a session and its thread share. It has no reference to the session, which can be collected."""

    limits: ProgramLimits
    idle: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[_Piece] = field(default_factory=deque[_Piece])
    ended: str = ""
    """The reason why the session takes no more pieces."""
    worker: SandboxWorker | None = None
    begun: bool = False
    """Whether a first piece was asked for, so that the session waits for a sandbox or has one."""
    taken: bool = False
    """Whether a thread has taken it. That thread then calls `leave` at the end."""
    over: Future[None] = field(default_factory=Future[None])
    """Done when its process has ended."""

    def __post_init__(self) -> None:
        self.over.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it

    def ask(self, piece: _Piece) -> bool:
        """Add a piece. Returns whether it is the first, so that the session needs a sandbox now."""
        with self.changed:
            if self.ended:
                raise SandboxBroken(self.ended)
            self.pieces.append(piece)
            self.changed.notify()
            first, self.begun = not self.begun, True
            return first

    def begin(self) -> bool:
        """Called by the thread that will run the pieces. False if the session has ended already."""
        with self.changed:
            self.taken = not self.ended
            return self.taken

    def use(self, worker: SandboxWorker) -> None:
        """Set the sandbox that `end` has to stop."""
        with self.changed:
            self.worker = worker

    def next(self) -> _Piece | None:
        """Wait for the next piece. None when the session has ended."""
        with self.changed:
            # Without a piece for `idle` seconds the session ends, so that others can use the sandbox.
            if not self.changed.wait_for(lambda: self.pieces or self.ended, min(self.idle, threading.TIMEOUT_MAX)):
                self.ended = f"this session was ended, as nothing was asked of it for {self.idle:g} s"
            return self.pieces.popleft() if self.pieces and not self.ended else None

    def end(self, why: str) -> None:
        """End the session: waiting pieces are refused and the running one is stopped."""
        with self.changed:
            self.ended = self.ended or why
            refused = list(self.pieces)
            self.pieces.clear()
            worker = self.worker
            # If no thread has taken the session, none calls `leave`, for which `close` waits. Then it is called here.
            never_taken = not self.taken
            if worker is not None:
                worker.stop()  # under the lock: afterwards the sandbox may belong to another session
            self.changed.notify()
        # Outside the lock: a future's callbacks run in this thread and may take locks of their own.
        for piece in refused:
            settle(piece.answer.set_exception, SandboxBroken(self.ended))
        if never_taken:
            self.leave()

    def refuse(self) -> None:
        """End the session, because all sandboxes end."""
        self.end("the sandbox of this session was closed")

    def leave(self) -> None:
        """Record that the session's process has ended."""
        with self.changed:
            self.worker = None
        settle(self.over.set_result, None)


class Sessions:
    """Runs at most `most` sessions at once, each in its own sandbox and thread. More wait in order."""

    def __init__(self, backend: Backend, most: int, network: NetworkAttempts) -> None:
        if most < 1:
            raise ConfigError(f"sandbox: sessions={most} must be 1 or more")
        # What the threads refer to must not refer to `self`, or an unused one would never be garbage-collected.
        self._threads = WorkerThreads[_SharedSession](
            "sandbox session", most, lambda sessions: _SessionThread(backend, network).serve(sessions), SPARE_SECONDS
        )
        self._finalizer = weakref.finalize(self, self._threads.close, _SharedSession.refuse, wait=True)

    def session(self, limits: ProgramLimits, idle: float) -> PythonSession:
        """A new session. It costs nothing before its first piece."""
        if limits.processes:
            raise ConfigError("sandbox: a session cannot have processes; set processes=0")
        if not idle > 0:
            raise ConfigError(f"sandbox: idle={idle!r} must be more than 0 seconds")
        return PythonSession(self, limits, idle)

    def queue(self, shared: _SharedSession) -> None:
        """Queue a session for the next free sandbox."""
        if self._threads.put(shared) is None:
            shared.refuse()

    @property
    def alive(self) -> int:
        """Sessions that have a sandbox now."""
        return sum(not shared.over.done() for shared in self._threads.running)

    @property
    def waiting(self) -> int:
        """Sessions that wait for a sandbox."""
        return sum(not shared.ended for shared in list(self._threads.waiting))

    @property
    def begun(self) -> int:
        """Sessions that have had a sandbox so far."""
        return self._threads.taken

    def close(self) -> None:
        """End every session and every sandbox, and wait until they have ended."""
        self._finalizer()


@dataclass
class _SessionThread:
    """One thread: it takes a session, runs its pieces in a sandbox until it ends, and takes the next."""

    backend: Backend
    network: NetworkAttempts
    worker: SandboxWorker | None = None
    held: LocalConversation | RemoteConversation | None = None
    """The session that runs in `worker` now."""

    def serve(self, sessions: Iterator[_SharedSession]) -> None:
        try:
            for shared in sessions:
                try:
                    self._run_pieces(shared)
                finally:
                    shared.leave()
        finally:
            if self.worker is not None:
                self.worker.close()

    def _run_pieces(self, shared: _SharedSession) -> None:
        """Run a session's pieces until it ends; then end its process."""
        try:
            while (piece := shared.next()) is not None:
                if not piece.answer.set_running_or_notify_cancel():
                    continue
                try:
                    ran = self._answer(shared, piece.code)
                except Exception as error:
                    known = isinstance(error, SandboxBroken | SandboxUnavailableError)
                    failure = error if known else SandboxBroken(f"{error!r}")
                    shared.end(f"this session was lost: {error}")
                    settle(piece.answer.set_exception, failure)
                else:
                    settle(piece.answer.set_result, ran)
        finally:
            if self.held is not None:
                self.held.end()
                self._keep_usable()
                self.held = None

    def _answer(self, shared: _SharedSession, code: bytes) -> Ran:
        """Run one piece. If a sandbox is lost before anything was defined in it, use another one."""
        tries = TRIES
        while True:
            try:
                if self.held is None or not self.held.alive:
                    self.worker = self.worker or begin(self.backend)
                    shared.use(self.worker)
                    remote = self.worker if isinstance(self.worker, RemoteWorker) else None
                    self.held = (
                        remote.converse(shared.limits) if remote else LocalConversation(self.worker, shared.limits)
                    )
                # If `end` was called before it knew the sandbox, it has stopped nothing. So this is checked again.
                if shared.ended:
                    raise SandboxBroken(shared.ended)
                return self.network.add(self.held.answer(code))
            # ValueError and KeyError: the reply of a broken sandbox is no JSON, or lacks a part.
            except (SandboxBroken, OSError, ValueError, KeyError):
                # The lost piece is already counted. If it was the first piece, nothing was defined before it, so
                # another sandbox can replace this one.
                answered = self.held.answered if self.held is not None else 0
                self._lose()
                tries -= 1
                if answered > 1 or not tries or shared.ended:
                    raise

    def _lose(self) -> None:
        """Gives up the sandbox, with the session in it."""
        if self.held is not None:
            self.held.abandon()
        elif self.worker is not None:
            self.worker.destroy()
        self.held = self.worker = None

    def _keep_usable(self) -> None:
        """Keep the sandbox for the next session, if it is still usable."""
        if self.worker is None or not self.worker.usable:
            self.worker = None
        elif self.worker.jobs >= RECYCLE:
            self.worker.close()
            self.worker = None
