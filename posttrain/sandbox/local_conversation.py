"""One session in one sandbox, from the thread that holds the sandbox: begin, answer pieces, end.

The process inside runs only while a piece is being answered and stands still in between, so a session that is left
alone costs memory and no time, and nothing it started goes on behind our back.
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
from posttrain.sandbox.port import KIB, ProgramLimits, Ran, SandboxBroken, Why
from posttrain.sandbox.worker import GRACE, SPILL, PipeReader, SandboxWorker, how_it_ended, nothing, silent

DONE = re.compile(rb"([0-9]{1,9}) ([0-9]{1,3})\n")
CHATTER = 4 * KIB
"""Bytes that a session may say on its wire about one piece; the honest answer has some ten."""


class LocalConversation:
    """A session's process in `worker`, which takes no other job until it is over.

    A piece that ends the process (its time, its output, a crash) ends the conversation: `alive` is False then.
    `answered` counts the pieces so far.
    """

    def __init__(self, worker: SandboxWorker, limits: ProgramLimits) -> None:
        self.worker = worker
        self.limits = limits
        self.alive = True
        self.answered = 0
        self._used = 0.0
        self._ended: dict[str, Any] | None = None
        self._ends: dict[str, int] = {}
        worker.settle()
        worker.jobs += 1
        with contextlib.ExitStack() as held:
            writers: list[int] = []
            for name in ("stdout", "stderr"):
                self._ends[name], writer = os.pipe()
                os.set_blocking(self._ends[name], False)
                held.callback(os.close, writer)
                writers.append(writer)
            self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            held.callback(theirs.close)
            self._wire.setblocking(False)
            request = json.dumps({"limits": limits.plain(), "session": True, "followed": False}).encode()
            try:
                worker.begin(request, [nothing(), silent(held), *writers, theirs.fileno(), nothing()])
            except BaseException:
                self._over()
                raise

    def answer(self, piece: bytes) -> Ran:
        """Run one piece to its end or its limits. Raises SandboxBroken, and is over, where the sandbox was lost."""
        start = time.monotonic()
        self.answered += 1
        ears = {fd: PipeReader(name, self.limits.output) for name, fd in self._ends.items()}
        try:
            status, stopped = self._listen(piece, ears, start)
            account = self._ended or self._rest()
            for fd, ear in ears.items():
                ear.hear(fd)
        except BaseException:
            self.abandon()
            raise
        if "status" in account:
            self._over()
        return self._ran(status, stopped, account, {ear.name: ear for ear in ears.values()}, time.monotonic() - start)

    def _listen(self, piece: bytes, ears: dict[int, PipeReader], start: float) -> tuple[int | None, Why | None]:
        """Give the piece and hear the streams: its status, None where the process ended instead, and why we ended
        that."""
        stopped: Why | None = None
        rest, said = memoryview(len(piece).to_bytes(LENGTH, "big") + piece), b""
        self._tell(GO + f"{self.limits.cpu:f}".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(self.worker.control, selectors.EVENT_READ)
            selector.register(self._wire, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for fd in ears:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                left = start + self.limits.wall + (GRACE if stopped else 0.0) - time.monotonic()
                if left <= 0 and stopped:
                    raise SandboxBroken(
                        f"{self.worker.backend.name}: no answer {GRACE:g} s after a session was told to end"
                    )
                ready = selector.select(max(0.0, left))
                for key, events in ready:
                    if key.fileobj is self.worker.control:
                        self._ended = self.worker.reply()
                        return None, stopped
                    if key.fileobj is not self._wire:
                        if not ears[key.fd].hear(key.fd):
                            selector.unregister(key.fd)
                        continue
                    if events & selectors.EVENT_WRITE:
                        rest = self._give(rest)
                        if not rest:
                            selector.modify(self._wire, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ:
                        more = self._heard()
                        said += more
                        if not more:
                            selector.unregister(self._wire)
                        for number, status in DONE.findall(said):
                            if int(number) == self.answered:
                                return int(status), stopped
                much = len(said) > CHATTER or any(e.total > SPILL * e.kept for e in ears.values())
                if stopped is None and (much or time.monotonic() - start > self.limits.wall):
                    stopped = "output" if much else "timeout"
                    self._tell(KILL)

    def _give(self, rest: memoryview) -> memoryview:
        try:
            return rest[self._wire.send(rest) :]
        except BlockingIOError:
            return rest
        except OSError:
            return rest[:0]  # it has ended, which the zygote tells

    def _heard(self) -> bytes:
        try:
            return self._wire.recv(CHATTER)
        except OSError:
            return b""

    def _tell(self, what: bytes) -> None:
        try:
            self.worker.control.send(what)
        except OSError as error:
            raise SandboxBroken(f"{self.worker.backend.name}: the sandbox is gone ({error})") from error

    def _rest(self) -> dict[str, Any]:
        """Make it stand still; the zygote's account of the piece, or of the whole process where it ended meanwhile."""
        self._tell(REST)
        return self._replied()

    def _replied(self) -> dict[str, Any]:
        self.worker.control.settimeout(GRACE)
        said = self.worker.reply()
        self.worker.control.settimeout(None)
        return said

    def _ran(
        self,
        status: int | None,
        stopped: Why | None,
        account: dict[str, Any],
        ears: dict[str, PipeReader],
        seconds: float,
    ) -> Ran:
        if account.get("ran") is False:
            why = bytes(ears["stderr"].head).decode(errors="replace").strip()
            raise SandboxBroken(
                f"{self.worker.backend.name}: the session could not be confined, so it did not run: {why}"
            )
        lost = "status" in account
        cpu = max(0.0, float(account["cpu"]) - (self._used if lost else 0.0))
        self._used += cpu
        how: Why
        if status is None:
            status = os.waitstatus_to_exitcode(account["status"])
            ended = "timeout" if account["spent"] else how_it_ended(status, stopped, False)
            how = "error" if ended == "ok" else ended
        else:
            how = stopped or ("ok" if status == 0 else "memory" if status == MEMORY_ERROR else "error")
        return Ran(
            why=how,
            exit=status,
            stdout=bytes(ears["stdout"].head),
            stderr=bytes(ears["stderr"].head),
            cut=any(ear.total > ear.kept for ear in ears.values()),
            result=b"",
            seconds=seconds,
            cpu=cpu,
            peak=int(account.get("peak", 0)),
            sandbox=self.worker.backend.name,
            lost=lost,
            network=account["network"],
        )

    def end(self) -> None:
        """End the process, so that the sandbox can take another. A sandbox that does not obey is destroyed."""
        if not self.alive:
            return
        try:
            self._tell(KILL)
            while "status" not in self._replied():
                pass
            self._over()
        except SandboxBroken:
            self.abandon()

    def abandon(self) -> None:
        """End the whole sandbox."""
        self._over()
        self.worker.destroy()

    def _over(self) -> None:
        if not self.alive:
            return
        self.alive = False
        with self.worker.lock:
            self.worker.busy = False
        self._wire.close()
        for fd in self._ends.values():
            os.close(fd)
