"""A sandbox for other machines: the reference server of the executor's protocol (docs/guides/sandbox.md).

    POSTTRAIN_SANDBOX_TOKEN=$(openssl rand -hex 16) python -m posttrain.sandbox.reference_server --port 8642

Callers with the token may run programs here, confined as in a local sandbox. It listens on this machine only unless
--host is given, which needs --certificate and --key, or --plain where a proxy in front of it does TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import hmac
import json
import logging
import os
import secrets
import signal
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.sandbox.executor_callers import Callers
from posttrain.sandbox.program_session import PythonSession
from posttrain.sandbox.remote import TOKEN, VERSION, packed
from posttrain.sandbox.sandbox_pool import IDLE, SESSIONS, Sandbox
from posttrain.sandbox.sandbox_types import MIB, MOST_SAID, ProgramLimits, Ran, SandboxBroken
from posttrain.system.errors import ConfigError, PosttrainError
from posttrain.system.hostile_callers import LogRateLimit, loopback, raise_file_limit
from posttrain.system.terminal_output import tell

MOST_BODY = 64 * MIB
"""Most bytes of a request's body."""
MOST_WALL = 300.0
MOST_MEMORY = 8192 * MIB
"""Most seconds and bytes of memory that a request may ask for."""
SHORTEST_TOKEN = 16
"""Fewest characters of the token."""
MOST_HELD = 512 * MIB
"""Most bytes of all request bodies at once."""
WRITE_SECONDS = 60.0
"""Seconds a caller has to read an answer before its connection is closed."""
CONNECTIONS, PER_ADDRESS = 512, 256
"""Defaults: connections at once, in all and from one address."""
SPARE_FILES = 256
"""Files kept free for sandboxes and everything else beside the connections."""
LOG = logging.getLogger("posttrain.sandbox")


class BadRequest(ValueError):
    """The request is not valid, or asks for more than is allowed."""


class Busy(RuntimeError):
    """The request's body is more than can be held at the moment."""


class Executor(ThreadingHTTPServer):
    """Answers `/v1/about`, `/v1/run` and `/v1/session`; each connection has a thread, the sandbox its own queue.

    Closing it ends every session and every sandbox.

    Args:
        connections: connections at once. At the limit a silent one is closed for a new one; if all are being answered,
            new ones wait.
        per_address: connections at once from one address. If all of those are being answered, further ones are closed.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        sandbox: Sandbox,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        connections: int = CONNECTIONS,
        per_address: int = PER_ADDRESS,
    ) -> None:
        if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable()):
            raise ConfigError(f"the token must have at least {SHORTEST_TOKEN} characters, all of printable ASCII")
        if min(connections, per_address) < 1:
            raise ConfigError("connections and per_address are at least 1")
        self.sandbox, self.token = sandbox, token
        self.sessions: dict[str, PythonSession] = {}
        self.guard = threading.Lock()
        self.callers = Callers(connections, per_address)
        self.held = 0
        """Bytes of request bodies being read or answered."""
        self._rate = LogRateLimit()
        LOG.addFilter(self._rate)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """Its address, as `RemoteExecutor` takes it on this machine."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def server_close(self) -> None:
        super().server_close()
        self.callers.cut()
        self.sandbox.close()
        LOG.removeFilter(self._rate)

    def service_actions(self) -> None:
        self.callers.sweep()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection. At the limit it waits in the backlog: OSError after a pause, because the server's loop
        calls again at once."""
        if not self.callers.room():
            time.sleep(0.05)
            raise OSError("all connections are being answered")
        try:
            return super().get_request()
        except OSError as error:
            LOG.warning(
                "connections wait: %s. Lower --connections %d, or raise the limit on files", error, self.callers.most
            )
            # Most often no file is free, and `sweep` frees those of connections that have been silent too long.
            self.callers.sweep()
            time.sleep(0.5)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if self.callers.enter(request, client_address[0]):
            return True
        message = "%s has %d connections, all being answered: a further one was closed"
        LOG.warning(message, client_address[0], self.callers.per_address)
        return False

    def shutdown_request(self, request: Any) -> None:
        self.callers.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is not logged. Anything else is a bug, logged at a limited rate."""
        if not isinstance(sys.exception(), OSError):
            LOG.exception("a request from %s", client_address[0])

    def hold(self, size: int) -> None:
        """Count a body's bytes (negative: it is done). Busy where there would be too many."""
        with self.guard:
            if size > 0 and self.held + size > MOST_HELD:
                raise Busy("too much is being sent at once; try again")
            self.held += size

    def new_session(self, limits: ProgramLimits) -> str:
        """Begin a session. Sessions that their idle time has ended are removed first."""
        # All callers have the same token. Only the name, which cannot be guessed, keeps one out of others' sessions.
        name = secrets.token_hex(16)
        with self.guard:
            for old in [k for k, s in self.sessions.items() if s.ended]:
                del self.sessions[old]
            self.sessions[name] = self.sandbox.session(limits=limits, idle=IDLE)
        return name


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Executor
    timeout = WRITE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because requests contain what models wrote."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer invalid HTTP and unknown methods like every other refusal."""
        # With an invalid HTTP version in the request, no status line would be sent.
        self.close_connection, self.request_version = True, self.protocol_version
        self._say(code, {"error": (message or explain or HTTPStatus(code).phrase)[:200]})

    def _answer(self) -> None:
        """Answers one request: checks the token, reads the body, does what is asked."""
        body_size = 0
        try:
            # The token is compared in constant time, and before the body is read.
            authorization = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(authorization, f"Bearer {self.server.token}".encode()):
                self.close_connection = True
                return self._say(401, {"error": "wrong or missing token"})
            self.server.callers.now(self.connection, "body")
            body_size = self._length()
            body = self._body(body_size)
            self.server.callers.now(self.connection, "answer")
            self._say(200, self._answer_to(self.path.removeprefix(f"/v{VERSION}/").split("/"), body))
        except (BadRequest, Busy, PosttrainError) as error:
            # The unread body of a refused request would be read as the next request, so the connection is closed.
            self.close_connection |= not isinstance(error, PosttrainError)
            self._say(400 if isinstance(error, BadRequest | ConfigError) else 503, {"error": str(error)})
        finally:
            self.server.hold(-body_size)
            self.server.callers.now(self.connection, "idle")

    do_GET = do_POST = do_DELETE = _answer

    def _length(self) -> int:
        """Length of the request body, which counts as held from now on."""
        # Exactly one plain length is accepted. Servers differ in how they read two lengths, a sign, or a transfer
        # encoding, and this could hide a request from a proxy. A body without a length could not be checked against the
        # bound, and `int` raises at a text of thousands of digits.
        lengths = self.headers.get_all("Content-Length", ["0"])
        length = lengths[0] if len(lengths) == 1 else ""
        if (
            not (length.isascii() and length.isdecimal() and len(length) < 12)
            or int(length) > MOST_BODY
            or "Transfer-Encoding" in self.headers
        ):
            raise BadRequest(f"a body has a Content-Length of at most {MOST_BODY}")
        # The bytes are counted before they are read, so that the announced bodies of all callers together are bounded.
        self.server.hold(int(length))
        return int(length)

    def _body(self, length: int) -> dict[str, Any]:
        """The JSON object in a body of this length."""
        try:
            value = json.loads(self.rfile.read(length) or b"{}")
        except (ValueError, RecursionError):
            raise BadRequest("the body is no JSON") from None
        if not isinstance(value, dict):
            raise BadRequest("the body is no JSON object")
        return value

    def _answer_to(self, path: list[str], body: dict[str, Any]) -> dict[str, Any]:
        box = self.server.sandbox
        match self.command, path:
            case "GET", ["about"]:
                return {"version": VERSION, "sandbox": box.name}
            case "POST", ["run"]:
                program, stdin, call = (unpacked(body, name) for name in ("program", "stdin", "call"))
                return told(box.run_sync(program, stdin=stdin, call=call or None, limits=limits_of(body)))
            case "POST", ["session"]:
                return {"session": self.server.new_session(limits_of(body))}
            case "POST", ["session", name]:
                return told(self._session(name).run_sync(unpacked(body, "code")))
            case "DELETE", ["session", name]:
                # The session is removed from the table first, so that no piece comes to it while it ends. The wait for
                # its process is outside the lock.
                session = self._session(name)
                with self.server.guard:
                    self.server.sessions.pop(name, None)
                asyncio.run(session.close())
                return {}
        raise BadRequest(f"{self.command} {self.path[:80]} is nothing to ask")

    def _session(self, name: str) -> PythonSession:
        with self.server.guard:
            if name not in self.server.sessions:
                raise SandboxBroken("there is no such session (any more)")
            return self.server.sessions[name]

    def _say(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def unpacked(body: dict[str, Any], name: str) -> bytes:
    """The bytes of a field, which is base64; empty if it is missing."""
    try:
        return base64.b64decode(body.get(name, ""), validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadRequest(f"{name!r} is no base64") from None


def limits_of(body: dict[str, Any]) -> ProgramLimits:
    """The requested limits. Each must be a number; time and memory are at most those of this executor."""
    requested = body.get("limits", {})
    names = {f.name for f in fields(ProgramLimits)}
    if (
        not isinstance(requested, dict)
        or set(requested) - names
        or not all(type(v) in (int, float) and 0 <= v < 2**63 for v in requested.values())
    ):
        raise BadRequest(f"'limits' is an object of numbers named {', '.join(sorted(names))}")
    limits = ProgramLimits(**{k: v if k in ("cpu", "wall") else int(v) for k, v in requested.items()})
    # `cpu` needs no bound of its own, because a program ends after `wall` seconds.
    too_large = limits.wall > MOST_WALL or limits.memory > MOST_MEMORY or max(limits.output, limits.result) > MOST_SAID
    if too_large or limits.processes > 64:
        raise BadRequest(
            f"limits beyond what is given here: wall {MOST_WALL:g} s, memory {MOST_MEMORY} B, 64 processes, output"
            " 4 MiB"
        )
    return limits


def told(ran: Ran) -> dict[str, Any]:
    """The outcome of a program as JSON."""
    texts = {k: packed(getattr(ran, k)) for k in ("stdout", "stderr", "result")}
    return texts | {
        k: getattr(ran, k) for k in ("why", "exit", "cut", "seconds", "cpu", "peak", "sandbox", "lost", "network")
    }


class _Ended(BaseException):
    """Raised by a signal that ends the server."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _: object) -> None:
    raise _Ended(number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.sandbox.reference_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8642, help="0: any free one")
    parser.add_argument(
        "--token",
        default=TOKEN,
        metavar="VARIABLE",
        help=f"environment variable that holds the token (default: {TOKEN})",
    )
    parser.add_argument("--workers", type=int, default=None, help="programs at once (default: one a core)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"sessions at once (default: {SESSIONS})")
    parser.add_argument("--packages", default="numpy", help="installed packages that programs may import, with commas")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help=f"held at once (default: {CONNECTIONS})")
    parser.add_argument(
        "--per-address", type=int, default=PER_ADDRESS, help=f"of them from one address (default: {PER_ADDRESS})"
    )
    parser.add_argument("--certificate", help="PEM file: speak TLS")
    parser.add_argument("--key", help="PEM file of its key")
    parser.add_argument(
        "--plain", action="store_true", help="no TLS although --host is not this machine: something in front speaks it"
    )
    o = parser.parse_args(argv)
    # Without TLS the token would be sent unencrypted.
    if not loopback(o.host) and not o.certificate and not o.plain:
        parser.error(
            "--host other than this machine needs --certificate and --key, or --plain behind something that speaks TLS"
        )
    token = os.environ.get(o.token, "").strip()
    if not token:
        parser.error(f"set the environment variable {o.token} to a long random text: {o.token}=$(openssl rand -hex 16)")
    try:
        packages = tuple(p for p in o.packages.split(",") if p)
        box = open_sandbox("auto", workers=o.workers, packages=packages, sessions=o.sessions)
        # Every connection needs a file descriptor. Some are kept free, so that sandboxes can be started.
        most = min(o.connections, max(1, raise_file_limit() - SPARE_FILES))
        # Before the server is made: one that has no certificate would listen, and nobody would close it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if o.certificate:
            context.load_cert_chain(o.certificate, o.key)
        executor = Executor(box, token, o.host, o.port, connections=most, per_address=o.per_address)
        if o.certificate:
            # The thread of a connection does the handshake. In the accepting loop one silent caller would block all.
            executor.socket = context.wrap_socket(executor.socket, server_side=True, do_handshake_on_connect=False)
    except PosttrainError as error:
        tell(str(error), file=sys.stderr)
        return error.exit_code
    except (OSError, OverflowError) as error:  # the address is taken or is none; a file is missing or is no certificate
        tell(f"cannot listen at {o.host}:{o.port} with certificate {o.certificate}: {error}", file=sys.stderr)
        return ConfigError.exit_code
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the parent process ignored them
        signal.signal(number, _end)
    tell(f"{box.name} at {o.host}:{executor.server_address[1]}")
    try:
        executor.serve_forever()
    except _Ended as ended:
        return 128 + ended.number
    finally:
        executor.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
