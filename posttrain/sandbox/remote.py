"""Programs sent to an executor over HTTP, which runs them on another machine. Its replies are checked before use.

The protocol is in docs/guides/sandbox.md, and `reference_server` implements it. If an executor gives no valid answer,
the program is not to blame: `SandboxBroken` is raised, the program is tried again, and in the end there is no score.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
import math
import os
import select
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import urlsplit

from posttrain.sandbox.backends import Start
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran, SandboxBroken, SandboxUnavailableError, Why
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker
from posttrain.system.errors import ConfigError
from posttrain.system.hostile_callers import in_the_clear

TOKEN = "POSTTRAIN_SANDBOX_TOKEN"
"""Default environment variable that holds an executor's token."""
VERSION = "1"
"""Version of the protocol."""
MOST_BYTES = 16 << 20
"""Most bytes of a valid reply."""
PATIENCE = 30.0
"""Seconds beyond a program's own time limit that a reply may take, since it may wait in the executor's queue."""
START_SECONDS = 10.0
"""Seconds in which a connection must be made and the executor must describe itself."""


@dataclass(frozen=True)
class RemoteExecutor:
    """An executor at `url`, with the bearer token that the environment variable `token` holds.

    Its certificate is checked. Without TLS only this machine is a valid address.
    """

    url: str
    token: str = TOKEN
    packages: tuple[str, ...] = ()
    name: str = "remote"
    processes: bool = True

    def __post_init__(self) -> None:
        try:
            parts, _ = urlsplit(self.url), urlsplit(self.url).port
        except ValueError:  # half of an IPv6 address, or a port that is none
            parts = urlsplit("")
        extra = parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in ("http", "https") or not parts.hostname or extra:
            raise ConfigError(f"sandbox: {self.url!r} is no address of an executor; wanted https://HOST[:PORT][/PATH]")
        # Anybody who reads the token on the way could run programs there.
        if in_the_clear(self.url):
            raise ConfigError(
                f"sandbox: {self.url!r} would send programs and the token in the clear; use https, or a tunnel to"
                " 127.0.0.1"
            )

    def start(self, control: int, limits: ProgramLimits) -> Start:
        raise SandboxUnavailableError("a remote executor is not started here")

    def begin(self, limits: ProgramLimits | None) -> RemoteWorker:
        """A connection that runs programs. SandboxUnavailableError where there is no executor or no token."""
        return RemoteWorker(self)


class RemoteWorker(SandboxWorker):
    """One connection to an executor, used by one thread at a time, with the interface of a local sandbox."""

    def __init__(self, backend: RemoteExecutor) -> None:
        self.backend = backend
        self.jobs = 0
        self.notes: dict[str, Any] = {}
        self.pids = ()
        self.lock = threading.Lock()
        self.busy = False
        self._open = True
        self._sock: socket.socket | None = None
        # The settings have only the name of the variable, because they are recorded with the run, and a token must not
        # be.
        token = os.environ.get(backend.token, "").strip()
        # Another text is no header, and the error of `http.client` would quote it.
        if not token or not (token.isascii() and token.isprintable()):
            raise SandboxUnavailableError(
                f"{backend.url}: the environment variable {backend.token} with its token is not set, or no line of"
                " ASCII"
            )
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        parts = urlsplit(backend.url)
        self._path = parts.path.rstrip("/")
        host, port = parts.hostname or "", parts.port
        tls = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
        kind: Any = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._wire: http.client.HTTPConnection = kind(host, port, timeout=START_SECONDS, **tls)
        try:
            self.notes = self.ask("GET", "/about", None, START_SECONDS)
        except SandboxBroken as error:
            self.destroy()
            raise SandboxUnavailableError(str(error)) from error
        # An executor without a sandbox would run the programs unconfined on another machine.
        if self.notes.get("version") != VERSION or self.notes.get("sandbox") in (None, "none"):
            self.destroy()
            raise SandboxUnavailableError(
                f"{backend.url}: says {str(self.notes)[:200]}, which is no executor of version {VERSION} with a sandbox"
            )

    def ask(self, method: str, path: str, body: Any, seconds: float) -> dict[str, Any]:
        """Send one request. Returns its answer, which must be complete after `seconds`.

        Raises:
            SandboxBroken: there is no valid answer.
            SandboxUnavailableError: the executor refuses the request, and would refuse it again.
        """
        received, status, late = b"", 0, threading.Event()
        # The socket's time-out is for each read, so a server that sends a byte now and then would never exceed it. The
        # timer limits the whole answer.
        timer = threading.Timer(seconds, self._hang_up, (late,))
        timer.daemon = True
        timer.start()
        try:
            self._wire.timeout = seconds
            # An executor closes a connection that was silent for long, and then there is its end to read.
            if (open_socket := self._wire.sock) is not None:
                poll = select.poll()
                poll.register(open_socket, select.POLLIN)
                if poll.poll(0):
                    self._wire.close()
            if self._wire.sock is None:
                self._wire.connect()
            self._sock = sock = self._wire.sock
            assert sock is not None
            sock.settimeout(seconds)
            self._wire.request(
                method, f"{self._path}/v{VERSION}{path}", None if body is None else json.dumps(body), self._headers
            )
            reply = self._wire.getresponse()
            # One byte more than allowed is read, so that an answer that is too large is noticed and not cut.
            status, received = reply.status, reply.read(MOST_BYTES + 1)
            answer = json.loads(received) if len(received) <= MOST_BYTES else None
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            self.destroy()
            slow = late.is_set() or isinstance(error, TimeoutError)
            why = f"no whole answer in {seconds:g} s" if slow else f"{type(error).__name__}: {error}"
            raise SandboxBroken(f"{self.backend.url}: {why}"[:300]) from error
        finally:
            timer.cancel()
        if status != 200 or not isinstance(answer, dict):
            self.destroy()
            why = f"{self.backend.url}: status {status}, {received[:200].decode(errors='replace')!r}"
            # A wrong request, token or address is still wrong at the next try. Other failures may be temporary.
            raise (SandboxUnavailableError if status in (400, 401, 403, 404, 413) else SandboxBroken)(why)
        return answer

    @property
    def usable(self) -> bool:
        return self._open

    def run(self, job: Job) -> Ran:
        self.jobs += 1
        texts = {"program": packed(job.program), "stdin": packed(job.stdin), "call": packed(job.call)}
        return self.asked("/run", {**texts, "limits": job.limits.plain()}, job.limits)

    def asked(self, path: str, body: dict[str, Any], limits: ProgramLimits) -> Ran:
        """The outcome of a program that the executor runs. `stop` ends the wait for it."""
        with self.lock:
            self.busy = True
        try:
            return self.heard(self.ask("POST", path, body, limits.wall + PATIENCE), limits)
        finally:
            with self.lock:
                self.busy = False

    def converse(self, limits: ProgramLimits) -> RemoteConversation:
        """Begin a session on the executor."""
        self.jobs += 1
        answer = self.ask("POST", "/session", {"limits": limits.plain()}, PATIENCE)
        if not isinstance(answer.get("session"), str):
            raise SandboxBroken(f"{self.backend.url}: began no session: {str(answer)[:200]}")
        return RemoteConversation(self, limits, answer["session"])

    def heard(self, reply: dict[str, Any], limits: ProgramLimits) -> Ran:
        """A reply as `Ran`. SandboxBroken where a part has the wrong type or is too large."""
        try:
            texts = {k: base64.b64decode(reply[k], validate=True) for k in ("stdout", "stderr", "result")}
            numbers = {k: float(reply[k]) for k in ("seconds", "cpu")}
            plain = {k: reply[k] for k in ("exit", "peak", "cut", "lost", "network")}
            most = {"stdout": limits.output, "stderr": limits.output, "result": limits.result}
            good = reply["why"] in get_args(Why) and isinstance(reply["sandbox"], str)
            good &= reply["sandbox"] not in ("", "none")
            # Exact types are compared, because True is an instance of int.
            good &= [type(plain[k]) for k in ("exit", "peak", "cut", "lost")] == [int, int, bool, bool]
            good &= all(type(reply[k]) in (int, float) and 0 <= numbers[k] < math.inf for k in numbers)
            good &= plain["network"] is None or (type(plain["network"]) is int and plain["network"] >= 0)
            good &= all(len(texts[k]) <= most[k] for k in texts)
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
            raise SandboxBroken(f"{self.backend.url}: the reply is not what a program did: {error!r}") from error
        if not good:
            raise SandboxBroken(f"{self.backend.url}: the reply is not what a program did: {str(reply)[:200]}")
        return Ran(why=reply["why"], sandbox=f"remote:{reply['sandbox'][:40]}", **texts, **numbers, **plain)

    def stop(self) -> None:
        """Close the connection while a program runs. On the executor it ends by its own limits."""
        with self.lock:
            if self.busy:
                self._hang_up()

    def _hang_up(self, late: threading.Event | None = None) -> None:
        """End the connection, for a request that waits for its answer in another thread."""
        if late is not None:
            late.set()
        # `shutdown` wakes the thread that reads. It does not close the descriptor, which belongs to that thread.
        for sock in filter(None, (self._sock, self._wire.sock)):  # http.client forgets one whose answer is its last
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        self._open = False
        self._wire.close()


@dataclass
class RemoteConversation:
    """A session on the executor, with the methods of `LocalConversation` that a session uses."""

    worker: RemoteWorker
    limits: ProgramLimits
    session: str
    alive: bool = True
    answered: int = field(default=0)

    def answer(self, piece: bytes) -> Ran:
        """Run one piece. A process that has ended is started anew on the executor."""
        # Counted before it is sent, as in `LocalConversation`, so that the loss of the first piece is recognised.
        self.answered += 1
        try:
            return self.worker.asked(f"/session/{self.session}", {"code": packed(piece)}, self.limits)
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        """End the session. If the executor cannot be reached, its idle time ends it."""
        if self.alive:
            self.alive = False
            with contextlib.suppress(SandboxBroken, SandboxUnavailableError):
                self.worker.ask("DELETE", f"/session/{self.session}", None, PATIENCE)

    def abandon(self) -> None:
        self.alive = False
        self.worker.destroy()


def packed(data: bytes) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(data).decode()
