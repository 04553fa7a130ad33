"""HTTP to a server that runs elsewhere, an engine or a judge: retries, time limits, and errors that name the endpoint.

An `Endpoint` is a base address with a role ("rollout", "judge") and a key in an environment variable, which is sent as
a bearer token and appears in no message, repr or record.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from posttrain.core.redact_secrets import scrubbed
from posttrain.system.errors import ConfigError, EndpointError
from posttrain.system.hostile_callers import in_the_clear, loopback

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of temporary failures: overload, a restart, a proxy that lost its server."""
MAX_ANSWER = 256 << 20
"""Most bytes of an answer. A longer one is not read to its end."""
MAX_QUOTED = 400
"""Most characters of a server's own message that an error quotes."""
_ADVICE = "See whether the server runs, and what it logged"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The time that a call may take and the number of its tries. Between tries it waits `first` seconds, doubled each
    time up to `longest`, times a random number in [0.5, 1]; or as long as `Retry-After` says, up to `longest`."""

    connect: float = 10.0
    """Seconds to get a connection."""
    answer: float = 600.0
    """Seconds for one whole try."""
    tries: int = 6
    first: float = 0.5
    longest: float = 30.0

    def __post_init__(self) -> None:
        if self.tries < 1 or min(self.connect, self.answer) <= 0 or not 0 <= self.first <= self.longest:
            raise ConfigError(f"{self}: tries >= 1, connect and answer > 0 seconds, 0 <= first <= longest")

    def pause(self, failed: int, asked: float | None) -> float:
        """Seconds to wait before the next try.

        `failed`: tries that failed so far. `asked`: the seconds of the server's `Retry-After`, None without it.
        """
        # At most 64 doublings: a much higher power of two is no float. The random factor parts calls that failed
        # together.
        seconds = min(self.longest, self.first * 2 ** min(failed - 1, 64)) * random.uniform(0.5, 1)
        return seconds if asked is None else min(self.longest, max(seconds, asked))


class Endpoint:
    """JSON calls below one base address, in the event loop that makes the first call. Use it with `async with`, or call
    `close`.

    Args:
        url: base address, such as http://127.0.0.1:8000/v1; paths are appended to it.
        role: the endpoint's role in the run; every message begins with it.
        key_env: name of the environment variable with the bearer token; None: no token is sent.
        connections: most requests at once. Further ones wait, and this wait does not count for their time limit.
        silent: seconds without an answer after which the server counts as down; one that never answered does after the
            first call. While it is down, one call at a time tries it, once, and the others fail at once. None: never.

    Raises:
        ConfigError: the address is not http(s) or holds a key, the environment variable is empty, or its key would be
            sent to another machine in the clear.
    """

    def __init__(
        self,
        url: str,
        role: str,
        *,
        key_env: str | None = None,
        patience: Patience | None = None,
        connections: int = 1024,
        silent: float | None = None,
    ) -> None:
        try:
            parts, _ = urlsplit(url), urlsplit(url).port
        except ValueError:  # half of an IPv6 address, or a port that is none
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{role}: {url!r} is no address of a server; write it like http://127.0.0.1:8000/v1")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ConfigError(
                f"{role}: the address holds a password or query, which would be recorded; put keys into environment"
                " variables"
            )
        self.url, self.role, self.patience = url.rstrip("/"), role, patience or Patience()
        self.key_env = key_env
        self._key = os.environ.get(key_env, "").strip() if key_env else ""
        if key_env and not self._key:
            raise ConfigError(f"{role}: environment variable {key_env} is empty; put the key of {self.url} there")
        # Another text is no header, and the errors of the client would quote it.
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(f"{role}: environment variable {key_env} holds no key: a key is one line of ASCII")
        if key_env and in_the_clear(url):
            raise ConfigError(
                f"{role}: {url!r} would send the key in {key_env} in the clear; use https, or a tunnel to 127.0.0.1"
            )
        # A proxy of the environment cannot reach this machine's own addresses.
        self._proxied = not (loopback(parts.hostname) or parts.hostname.endswith(".localhost"))
        self._connections = connections
        self._client: httpx2.AsyncClient | None = None
        self._places = asyncio.Semaphore(connections)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._silent = silent
        self._since = -math.inf
        """When the silence began: infinite after an answer, and minus infinite before the first one, so that a server
        that never answered is down after one call."""
        self._down = ""
        """The message of a server that is down, else ''."""
        self._trying = False
        """Whether a call is asking the server now."""
        self.retried = 0
        """Failed tries that were repeated, since construction."""

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, role={self.role!r}, key_env={self.key_env!r})"

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def get(self, path: str, *, patience: Patience | None = None) -> Any:
        """The JSON at `path`."""
        return await self.call("GET", path, None, patience=patience)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        again: bool = True,
        patience: Patience | None = None,
        plain: bool = False,
    ) -> Any:
        """The JSON answer to `body`. Use `again=False` for a call that changes the server and must not be repeated, and
        `plain` where the answer is a plain text."""
        return await self.call("POST", path, body, again=again, patience=patience, plain=plain)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        again: bool = True,
        patience: Patience | None = None,
        plain: bool = False,
    ) -> Any:
        """One request and its JSON answer. Temporary failures are tried again. EndpointError if it is refused,
        unreadable, or still fails after the last try; its `status` is None where there was no answer."""
        patience = patience or self.patience
        client = self._open()
        failed = 0
        # With many requests at once the wait for a place may be long, so it counts in no time limit.
        async with self._places:
            # While the server is down, one call at a time asks it, and only once. The others fail at once and do not go
            # through all their tries.
            if self._down and self._trying:
                raise EndpointError(self._down, self.role)
            self._trying = True
            try:
                while True:
                    try:
                        answer = await self._once(client, method, path, body, patience, plain)
                    except _TransientError as error:
                        # A silence begins with its first failure. `min` keeps that time.
                        failed, self._since = failed + 1, min(self._since, time.monotonic())
                        if not again or failed >= patience.tries or self._down:
                            times = f" (tried {failed} times)" if failed > 1 else ""
                            why = self._message(f"{method} {path}: {error}{times}. {_ADVICE}")
                            if self._silent is not None and time.monotonic() - self._since > self._silent:
                                self._down = why
                            raise EndpointError(why, self.role, error.status) from error
                        self.retried += 1
                        pause = patience.pause(failed, error.after)
                    # A refusal is an answer, so the server is up.
                    except EndpointError:
                        self._since, self._down = math.inf, ""
                        raise
                    else:
                        self._since, self._down = math.inf, ""
                        return answer
                    await asyncio.sleep(pause)
            finally:
                self._trying = False

    async def _once(
        self,
        client: httpx2.AsyncClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        patience: Patience,
        plain: bool,
    ) -> Any:
        """One try. Raises _TransientError where another try may succeed, and EndpointError for a refusal."""
        # httpx limits each read alone, so a server that sends one byte a second would never be late. Therefore a limit
        # of the whole try is put around it.
        limits = httpx2.Timeout(None, connect=patience.connect)
        # Escaped, so that half of a surrogate pair in a text can be sent too.
        sent = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with asyncio.timeout(patience.answer):
                async with client.stream(method, self.url + path, content=sent, timeout=limits) as response:
                    received = await _read_answer(response)
        except TimeoutError:
            raise _TransientError(f"no answer in {patience.answer:g} s") from None
        except httpx2.TimeoutException:
            raise _TransientError(f"no connection in {patience.connect:g} s") from None
        except httpx2.RequestError as error:  # includes bytes that cannot be decompressed
            raise _TransientError(f"the connection failed ({type(error).__name__}: {error})") from error
        status = received.status
        # An answer that is too long is not asked for again, whatever its status.
        if status in RETRIED and received.body is not None:
            raise _TransientError(
                f"status {status}: {_server_message(received)}", status, _seconds(received.headers.get("retry-after"))
            )
        if received.body is None:
            why = f"the answer is longer than {MAX_ANSWER >> 20} MiB"
        elif not 200 <= status < 300:
            why = f"status {status}: {self._refusal(received)}"
        elif plain or not received.body:
            return received.body.decode("utf-8", errors="replace") if received.body else None
        else:
            try:
                return received.json()
            except ValueError:
                why = f"the answer is no JSON: {_server_message(received)}"
        raise EndpointError(self._message(f"{method} {path}: {why}"), self.role, status)

    def _refusal(self, answer: _Answer) -> str:
        """What a message says about an answer that refuses the request."""
        # A redirect is not followed: the key would go to an address that nobody named.
        if 300 <= answer.status < 400:
            return f"it redirects to {answer.headers.get('location', '?')[:MAX_QUOTED]}; give that address"
        no_key = "no key was sent; name an environment variable that holds one"
        key_note = f" (the key in {self.key_env})" if self.key_env else f" ({no_key})"
        return _server_message(answer) + (key_note if answer.status in (401, 403) else "")

    def _open(self) -> httpx2.AsyncClient:
        """The client of the running loop. A client of a closed loop is replaced."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the loop that opened them, and cannot be closed from another one.
            if self._client is not None and self._loop is not None and not self._loop.is_closed():
                raise EndpointError(
                    f"{self.role} ({self.url}): in use in another event loop; close it there first", self.role
                )
            self._loop, self._places = loop, asyncio.Semaphore(self._connections)
            authorization = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = httpx2.AsyncClient(
                headers={"Content-Type": "application/json", **authorization},
                limits=httpx2.Limits(max_connections=self._connections, max_keepalive_connections=64),
                trust_env=self._proxied,
            )
        return self._client

    def _message(self, text: str) -> str:
        """An error message with role and address, and without the key, which servers may quote."""
        text = f"{self.role} ({self.url}): {text}"
        return scrubbed(text.replace(self._key, f"[{self.key_env}]") if self._key else text)


class _TransientError(Exception):
    """A temporary failure: another try may succeed."""

    def __init__(self, why: str, status: int | None = None, after: float | None = None) -> None:
        super().__init__(why)
        self.status, self.after = status, after


@dataclass(frozen=True)
class _Answer:
    """A server's answer. `body` is None where it was too long."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None

    def json(self) -> Any:
        """The parsed body; ValueError where it is not JSON."""
        try:
            return json.loads(self.body or b"")
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


async def _read_answer(response: httpx2.Response) -> _Answer:
    """The answer of a response, read to its end or to `MAX_ANSWER` bytes."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER:
            return _Answer(response.status_code, response.headers, None)
    return _Answer(response.status_code, response.headers, bytes(body))


def _server_message(answer: _Answer) -> str:
    """The server's error message: the one inside an OpenAI-shaped error, else the text."""
    try:
        content: Any = answer.json()
        # OpenAI: {"error": {"message": ...}}; others put it under `message` or `detail`.
        while isinstance(content, dict) and (
            inner := content.get("error") or content.get("message") or content.get("detail")
        ):
            content = inner
        text = content if isinstance(content, str) else json.dumps(content)
    except ValueError:
        text = (answer.body or b"").decode(errors="replace")
    text = " ".join(text[: 10 * MAX_QUOTED].split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _seconds(header: str | None) -> float | None:
    """Seconds of a Retry-After header. Its form with a date is ignored."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
