"""One session in one sandbox, used by the thread that owns the sandbox: it begins, answers pieces, and ends.

The process inside runs only while a piece is being answered and is stopped in between. So an idle session costs memory
but no time, and nothing that it started continues between pieces.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import time
from typing import Any

from posttrain.sandbox.cell.cells import LENGTH
from posttrain.sandbox.cell.program import MEMORY_ERROR
from posttrain.sandbox.cell.zygote import GO, KILL, REST
from posttrain.sandbox.sandbox_types import KIB, ProgramLimits, Ran, SandboxBroken, Why
from posttrain.sandbox.sandbox_worker import GRACE, SPILL, PipeReader, SandboxWorker, how_it_ended, nothing, silent

DONE = re.compile(rb"([0-9]{1,9}) ([0-9]{1,3})\n")
"""The line that says that a piece is done: its number and its status, `3 0`."""
CHATTER = 4 * KIB
"""Most bytes on a session's control pipe for one piece; a normal answer has about ten."""


class LocalConversation:
    """A session's process in `worker`, which takes no other job until the session is over.

    A piece that ends the process (time limit, output limit, crash) ends the conversation too; `alive` is False then.
    `answered` counts the pieces so far.
    """

    def __init__(self, worker: SandboxWorker, limits: ProgramLimits) -> None:
        self.worker = worker
        self.limits = limits
        self.alive = True
        self.answered = 0
        self._used = 0.0
        """Seconds of processor time of all pieces so far."""
        self._last_account: dict[str, Any] | None = None
        """The zygote's report about the whole process, once it has ended."""
        self._read_ends: dict[str, int] = {}
        """Our ends of the pipes of standard output and standard error."""
        worker.settle()
        worker.jobs += 1
        with contextlib.ExitStack() as stack:
            writers: list[int] = []
            for name in ("stdout", "stderr"):
                self._read_ends[name], writer = os.pipe()
                os.set_blocking(self._read_ends[name], False)
                stack.callback(os.close, writer)
                writers.append(writer)
            self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(theirs.close)
            self._wire.setblocking(False)
            # In place of the pipe for a result, the job gets the socket that brings the pieces. Source and call are
            # empty.
            request = json.dumps({"limits": limits.plain(), "session": True, "followed": False}).encode()
            try:
                worker.begin(request, [nothing(), silent(stack), *writers, theirs.fileno(), nothing()])
            except BaseException:
                self._over()
                raise

    def answer(self, piece: bytes) -> Ran:
        """Run one piece to its end or its limits. SandboxBroken where the sandbox is lost; that ends it."""
        start = time.monotonic()
        self.answered += 1
        readers = {fd: PipeReader(name, self.limits.output) for name, fd in self._read_ends.items()}
        try:
            status, stopped = self._exchange(piece, readers, start)
            # If the process has not ended, it is stopped until the next piece, and the zygote sends the account of this
            # piece. A piece that was told to end just when it was done gets the account of its process's end instead.
            if (account := self._last_account) is None:
                if stopped is None:
                    self._send(REST)
                account = self._read_reply()
            for fd, reader in readers.items():
                reader.read(fd)
        except BaseException:
            self.abandon()
            raise
        # Only the account of a process that has ended has a status.
        if "status" in account:
            self._over()
        return self._ran(status, stopped, account, {r.name: r for r in readers.values()}, time.monotonic() - start)

    def _exchange(self, piece: bytes, readers: dict[int, PipeReader], start: float) -> tuple[int | None, Why | None]:
        """Send the piece and read its output. Returns (status, why we stopped it); status None: the process ended."""
        stopped: Why | None = None
        # Written and read at once: else a piece larger than the socket's buffer and a full pipe wait for each other.
        unsent, control_text = memoryview(len(piece).to_bytes(LENGTH, "big") + piece), b""
        self._send(GO + f"{self.limits.cpu:f}".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(self.worker.control, selectors.EVENT_READ)
            selector.register(self._wire, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for fd in readers:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                # Two deadlines, as in `SandboxWorker._read_streams`: first for the piece, then for the sandbox.
                seconds_left = start + self.limits.wall + (GRACE if stopped else 0.0) - time.monotonic()
                if seconds_left <= 0 and stopped:
                    raise SandboxBroken(
                        f"{self.worker.backend.name}: no answer {GRACE:g} s after a session was told to end"
                    )
                ready = selector.select(max(0.0, seconds_left))
                for key, events in ready:
                    # The zygote sends a message without a request only if the process has ended.
                    if key.fileobj is self.worker.control:
                        self._last_account = self.worker.reply()
                        return None, stopped
                    if key.fileobj is not self._wire:
                        if not readers[key.fd].read(key.fd):
                            selector.unregister(key.fd)
                        continue
                    if events & selectors.EVENT_WRITE:
                        unsent = self._write(unsent)
                        if not unsent:
                            selector.modify(self._wire, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ:
                        received = self._read_control()
                        control_text += received
                        if not received:
                            selector.unregister(self._wire)
                        # The program can write this line itself, and so end its own piece early. A line with the number
                        # of another piece is ignored.
                        for number, status in DONE.findall(control_text):
                            if int(number) == self.answered:
                                return int(status), stopped
                # The control pipe is bounded like the streams, since the program can write to it.
                too_much = len(control_text) > CHATTER or any(e.total > SPILL * e.kept for e in readers.values())
                if stopped is None and (too_much or time.monotonic() - start > self.limits.wall):
                    stopped = "output" if too_much else "timeout"
                    self._send(KILL)

    def _write(self, unsent: memoryview) -> memoryview:
        """Sends a part of the piece. Returns the rest."""
        try:
            return unsent[self._wire.send(unsent) :]
        except BlockingIOError:
            return unsent
        except OSError:
            return unsent[:0]  # the process has ended, which the zygote reports

    def _read_control(self) -> bytes:
        """What the session has written on its socket; empty if it has ended."""
        try:
            return self._wire.recv(CHATTER)
        except OSError:
            return b""

    def _send(self, message: bytes) -> None:
        try:
            self.worker.control.send(message)
        except OSError as error:
            raise SandboxBroken(f"{self.worker.backend.name}: the sandbox is gone ({error})") from error

    def _read_reply(self) -> dict[str, Any]:
        """The next reply of the zygote, within `GRACE` seconds."""
        self.worker.control.settimeout(GRACE)
        message = self.worker.reply()
        self.worker.control.settimeout(None)
        return message

    def _ran(
        self,
        status: int | None,
        stopped: Why | None,
        account: dict[str, Any],
        readers: dict[str, PipeReader],
        seconds: float,
    ) -> Ran:
        """The outcome of a piece. `status` is None if its process has ended."""
        if account.get("ran") is False:
            why = bytes(readers["stderr"].head).decode(errors="replace").strip()
            raise SandboxBroken(
                f"{self.worker.backend.name}: the session could not be confined, so it did not run: {why}"
            )
        # The account of a process that has ended is of its whole life, so the time of earlier pieces is subtracted.
        lost = "status" in account
        cpu = max(0.0, float(account["cpu"]) - (self._used if lost else 0.0))
        self._used += cpu
        outcome: Why
        if status is None:
            status = os.waitstatus_to_exitcode(account["status"])
            # A piece that ends its process by os._exit(0) counts as an error, because all definitions are lost.
            why_ended = "timeout" if account["spent"] else how_it_ended(status, stopped, False)
            outcome = "error" if why_ended == "ok" else why_ended
        else:
            outcome = stopped or ("ok" if status == 0 else "memory" if status == MEMORY_ERROR else "error")
        return Ran(
            why=outcome,
            exit=status,
            stdout=bytes(readers["stdout"].head),
            stderr=bytes(readers["stderr"].head),
            cut=any(r.total > r.kept for r in readers.values()),
            result=b"",
            seconds=seconds,
            cpu=cpu,
            peak=int(account.get("peak", 0)),
            sandbox=self.worker.backend.name,
            lost=lost,
            network=account["network"],
        )

    def end(self) -> None:
        """End the process, so that the sandbox can take another job. If that fails, the sandbox is destroyed."""
        if not self.alive:
            return
        try:
            self._send(KILL)
            # A reply to REST may come before the last reply.
            while "status" not in self._read_reply():
                pass
            self._over()
        except SandboxBroken:
            self.abandon()

    def abandon(self) -> None:
        """End the whole sandbox."""
        self._over()
        self.worker.destroy()

    def _over(self) -> None:
        """Frees the sandbox and closes the descriptors."""
        if not self.alive:
            return
        self.alive = False
        with self.worker.lock:
            self.worker.busy = False
        self._wire.close()
        for fd in self._read_ends.values():
            os.close(fd)
