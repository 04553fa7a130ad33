"""`posttrain serve` under callers that mean harm: times, counts, bytes. Over loopback, bounded in number and time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from posttrain.core.types import SampledTurn, Stop
from posttrain.serve import connections, intake, listen
from posttrain.serve.caller_limits import LOG, CallerLimits, most_connections, read_limits
from posttrain.system.errors import ConfigError
from posttrain.system.hostile_callers import LINES, network, raise_file_limit
from tests.serve.serve_parts import TOKEN, Up, save_model, up

CALLERS = Path(__file__).with_name("hostile_callers.py")
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@dataclass
class Endless:
    """An engine that says tokens until it is cancelled, as fast as the loop goes."""

    context: int = 1 << 20
    speaking: int = 0

    async def generate(self, prompt: np.ndarray, sampling: Any, place: int, heard: Any = None) -> SampledTurn:
        ids, logp = np.full(64, 70, np.int32), np.zeros(64, np.float32)
        self.speaking += 1
        try:
            while True:
                if heard is not None:
                    heard(ids, logp)
                await asyncio.sleep(0.001)
        finally:
            self.speaking -= 1


@dataclass
class Brief:
    """An engine that answers one token at once."""

    context: int = 96
    prompts: list[int] = field(default_factory=list[int])

    async def generate(self, prompt: np.ndarray, sampling: Any, place: int, heard: Any = None) -> SampledTurn:
        self.prompts.append(len(prompt))
        return SampledTurn(np.array([70], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), Stop.LENGTH)


def post(
    body: bytes | dict[str, Any], *headers: str, path: str = "completions", token: bytes = TOKEN.encode()
) -> bytes:
    """A whole request on a connection that is closed after it."""
    raw = body if isinstance(body, bytes) else json.dumps({"model": "tiny"} | body).encode()
    given = (
        [*headers]
        if any(h.lower().startswith("content-type") for h in headers)
        else ["Content-Type: application/json", *headers]
    )
    length = (
        []
        if any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers)
        else [f"Content-Length: {len(raw)}"]
    )
    lines = [f"POST /v1/{path} HTTP/1.1", "Host: localhost", "Connection: close", *given, *length]
    return "\r\n".join(lines).encode("latin-1") + b"\r\nAuthorization: Bearer " + token + b"\r\n\r\n" + raw


class Caller:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self, seconds: float = 30) -> bytes:
        """All that comes until the server closes."""
        got = bytearray()
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):
                while chunk := await self.reader.read(1 << 16):
                    got += chunk
        return bytes(got)


@asynccontextmanager
async def caller(u: Up, **how: Any) -> AsyncIterator[Caller]:
    at = urlsplit(u.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port, **how)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


async def answered(u: Up, data: bytes, seconds: float = 30) -> tuple[int, dict[str, Any]]:
    """(status, body) of one request; every body is JSON."""
    async with caller(u) as c:
        with contextlib.suppress(ConnectionError):
            await c.send(data)
        head, _, body = (await c.rest(seconds)).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body) if body else {}


async def until(true: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


# -------------------------------------------------------------------------------------------------------------------
# times


def test_the_defaults_are_what_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text()
    for name, value in vars(CallerLimits()).items():
        assert f"| `{name}` | {value:g} |" in page
    assert CallerLimits().header_seconds == 10 and CallerLimits().per_address >= 1800


@pytest.mark.prove
@pytest.mark.parametrize("trickle", [False, True])
async def test_headers_that_do_not_end_are_cut_off(model: Path, trickle: bool) -> None:
    async with up(model, limits=CallerLimits(header_seconds=1)) as u, caller(u) as c:
        start = time.monotonic()
        await c.send(HALF)
        rest = asyncio.create_task(c.rest(20))
        while trickle and not rest.done() and time.monotonic() - start < 20:
            with contextlib.suppress(ConnectionError):
                await c.send(b"a")
            await asyncio.sleep(0.1)
        assert await rest == b""
        assert 0.9 < time.monotonic() - start < 8


@pytest.mark.prove
async def test_a_connection_that_was_kept_is_closed_when_idle_and_its_next_headers_have_their_time(model: Path) -> None:
    async with (
        up(model, limits=CallerLimits(header_seconds=1, idle_seconds=4)) as u,
        caller(u) as idle,
        caller(u) as half,
    ):
        for c in (idle, half):
            await c.send(GET)
            assert (await c.reader.readline()).startswith(b"HTTP/1.1 200")
            await c.reader.readuntil(b"}")
        start = time.monotonic()
        await half.send(HALF)
        await half.rest()
        first = time.monotonic() - start
        await idle.rest()
        assert 0.9 < first < 3.5 <= time.monotonic() - start < 12


@pytest.mark.prove
@pytest.mark.parametrize("how", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_end_is_refused_in_time(model: Path, how: str) -> None:
    piece = b" " if how.startswith("Content") else b"1\r\n \r\n"
    async with up(model, limits=CallerLimits(body_seconds=1)) as u, caller(u) as c:
        start = time.monotonic()
        await c.send(post(b"", how))
        rest = asyncio.create_task(c.rest(20))
        while not rest.done():
            with contextlib.suppress(ConnectionError):
                await c.send(piece)
            await asyncio.sleep(0.05)
        said = await rest
        assert said.startswith(b"HTTP/1.1 408") and b"was not complete after 1 s" in said
        assert time.monotonic() - start < 10


@pytest.mark.prove
async def test_a_chunked_body_without_end_is_refused_by_its_bytes(model: Path) -> None:
    async with up(model, limits=CallerLimits(body_mib=0.25)) as u, caller(u) as c:
        await c.send(post(b"", "Transfer-Encoding: chunked"))
        rest = asyncio.create_task(c.rest(20))
        sent = 0
        while not rest.done() and sent < 64 << 20:
            with contextlib.suppress(ConnectionError):
                await c.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536
            await asyncio.sleep(0)
        said = await rest
        assert said.startswith(b"HTTP/1.1 413") or (not said and sent > 262_144)
        assert u.server._intake._held == 0


@pytest.mark.prove
async def test_a_caller_that_does_not_read_is_cut_off_and_its_answers_end(model: Path) -> None:
    engine = Endless()
    async with up(model, sampler=engine, limits=CallerLimits(write_seconds=1)) as u, caller(u, limit=1024) as c:
        c.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await c.send(post({"prompt": "user", "stream": True, "max_tokens": 2**31 - 1, "logprobs": 0, "n": 4}))
        await until(lambda: engine.speaking == 4)
        start = time.monotonic()
        await until(lambda: not engine.speaking and not u.server.running, 60)
        assert time.monotonic() - start < 45
        assert not u.server.answers


@pytest.mark.prove
async def test_a_caller_that_reads_slowly_is_served(model: Path) -> None:
    """What is taken at some kilobytes a second goes on longer than `write_seconds`."""
    engine = Endless()
    async with up(model, sampler=engine, limits=CallerLimits(write_seconds=6)) as u, caller(u, limit=4096) as c:
        await c.send(post({"prompt": "user", "stream": True, "max_tokens": 2**31 - 1, "n": 8}))
        start, got = time.monotonic(), 0
        while time.monotonic() - start < 9:
            got += len(await c.reader.read(1 << 16))
            await asyncio.sleep(0.01)
        assert engine.speaking == 8 and got > 1 << 18


# -------------------------------------------------------------------------------------------------------------------
# counts


async def test_a_new_caller_displaces_one_that_asks_for_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "YOUNG", 0.2)
    async with (
        up(model, sampler=Brief(), limits=CallerLimits(connections=20, header_seconds=60)) as u,
        contextlib.AsyncExitStack() as stack,
    ):
        held = [await stack.enter_async_context(caller(u)) for _ in range(60)]
        for c in held[::2]:
            with contextlib.suppress(ConnectionError):
                await c.send(HALF)
        start = time.monotonic()
        assert (await answered(u, post({"prompt": "user"})))[0] == 200
        assert time.monotonic() - start < 10
        await until(lambda: sum(c.reader.at_eof() for c in held) >= 40)


async def test_one_address_cannot_have_all_connections(model: Path) -> None:
    """Where all of an address's connections are being answered, the next one is told so; others' callers are not asked
    to wait."""
    engine = Endless()
    async with up(model, sampler=engine, limits=CallerLimits(per_address=5)) as u, contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            c = await stack.enter_async_context(caller(u))
            await c.send(post({"prompt": "user", "max_tokens": 9}))
        await until(lambda: engine.speaking == 5)
        status, body = await answered(u, GET)
        assert status == 429 and "from this address" in body["error"]["message"]
        at = urlsplit(u.url)
        async with asyncio.timeout(10):  # another address of loopback
            reader, writer = await asyncio.open_connection(at.hostname, at.port, local_addr=("127.0.0.2", 0))
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_answers_that_wait_are_bounded(model: Path) -> None:
    engine = Endless()
    async with up(model, sampler=engine, limits=CallerLimits(answers=100)) as u, caller(u) as c:
        await c.send(post({"prompt": "user", "n": 99}))
        await until(lambda: engine.speaking == 99)
        status, body = await answered(u, post({"prompt": "user", "n": 2}))
        assert status == 429 and body["error"]["type"] == "rate_limit_error"


async def test_bodies_are_bounded_all_together(model: Path) -> None:
    async with up(model, limits=CallerLimits(bodies_mib=1)) as u, caller(u) as a, caller(u) as b:
        for c in (a, b):
            await c.send(post(b" " * 500_000, "Content-Length: 600000"))
        await until(lambda: u.server._intake._held == 1_000_000)
        status, body = await answered(u, post(b" " * 100_000))
        assert status == 503 and "too much is being sent" in body["error"]["message"]
        a.writer.transport.abort()
        await until(lambda: u.server._intake._held == 500_000)
        await b.send(b" " * 100_000)
        assert (await b.rest()).startswith(b"HTTP/1.1 400")
    assert u.server._intake._held == 0


def test_an_ipv6_caller_is_its_network() -> None:
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert (
        network("::ffff:10.0.0.1") == "10.0.0.1"
        and network("::1") == "::1"
        and network("fe80::1%eth0") == network("fe80::2")
    )


@asynccontextmanager
async def crowd(u: Up, what: str, count: int, text: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """Callers in their own process."""
    at = urlsplit(u.url)
    escaped = text.decode("latin-1").encode("unicode_escape").decode()
    words = (str(CALLERS), what, str(at.hostname), str(at.port), str(count), escaped)
    child = await asyncio.create_subprocess_exec(sys.executable, "-I", *words, stdin=-1, stdout=-1)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def heard(child: asyncio.subprocess.Process) -> dict[str, Any]:
    async with asyncio.timeout(150):
        out, _ = await child.communicate()
    return json.loads(out)


@pytest.mark.prove
async def test_eighteen_hundred_honest_callers_at_once_under_attack(model: Path) -> None:
    """All are answered while others hold half-sent headers; as many as this user may open files, where those are
    fewer."""
    count = min(1800, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        honest = post({"prompt": "user says", "max_tokens": 2, "seed": 1})
        async with up(model) as u, crowd(u, "hold", 300, HALF) as attack:
            assert attack.stdout is not None and await attack.stdout.readline() == b"held\n"
            async with crowd(u, "ask", count, honest) as callers:
                said = await heard(callers)
        assert said["status"] == {"200": count} and not said["errors"], said
        assert said["seconds"] < 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.prove
async def test_no_file_left_is_no_spin_and_no_flood(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sockets beyond the limit on files wait; a few log lines, little time, and an honest caller gets through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with up(model, sampler=Brief(), limits=CallerLimits(header_seconds=4)) as u:
        opened = connections.most_connections(CallerLimits(connections=10**9))
        room = soft - opened - 128 + 12  # twelve files more than are open
        async with crowd(u, "hold", 100, HALF) as attack:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
                start, spent = time.monotonic(), time.process_time()
                await asyncio.sleep(3)
                assert time.process_time() - spent < 1.5, "the accept loop spins"
                lines = len(caplog.records)
                assert 0 < lines <= LINES and all("Too many open files" in r.getMessage() for r in caplog.records)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert attack.returncode is None
            async with crowd(u, "ask", 1, post({"prompt": "user"})) as honest:
                assert (await heard(honest))["status"] == {"200": 1}
            assert time.monotonic() - start < 30


async def test_few_files_make_callers_wait_not_fail(model: Path) -> None:
    """With room for 16 connections, 200 honest callers are all answered: the backlog holds them."""
    async with (
        up(model, sampler=Brief(), limits=CallerLimits(connections=16)) as u,
        crowd(u, "ask", 200, post({"prompt": "user"})) as callers,
    ):
        said = await heard(callers)
        assert said["status"] == {"200": 200} and not said["errors"]


def test_connections_fit_the_limit_on_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert 16 <= most_connections(CallerLimits()) < 512 - 128
        assert raise_file_limit() >= hard > 0 or hard == resource.RLIM_INFINITY
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -------------------------------------------------------------------------------------------------------------------
# bytes

JSON = "Content-Type: application/json"
ODD: dict[str, tuple[bytes, int]] = {
    "a token that is no text": (post({"prompt": "x"}, token=b"\xe9"), 401),
    "a token that is no utf-8": (post({"prompt": "x"}, token=b"\xff\xfe" * 9), 401),
    "an odd charset": (post({"prompt": "x"}, f"{JSON}; charset=nonsense"), 415),
    "a charset that is no text": (post({"prompt": "x"}, f"{JSON}; charset=\xe9"), 415),
    "utf-16": (post(json.dumps({"model": "tiny", "prompt": "x"}).encode("utf-16"), f"{JSON}; charset=utf-16"), 415),
    "utf-7": (post({"prompt": "x"}, f"{JSON}; charset=utf-7"), 415),
    "a codec of bytes": (post({"prompt": "x"}, f"{JSON}; charset=zlib"), 415),
    "utf-8 by name": (post({"prompt": "x"}, f'{JSON}; charset="UTF-8"'), 200),
    "a content type that is none": (post({"prompt": "x"}, "Content-Type: ;;=\xe9"), 415),
    "a compressed body": (post(b"\x1f\x8b\x08", "Content-Encoding: gzip"), 415),
    "bytes that are no utf-8": (post(b'{"model": "tiny", "prompt": "\xff"}'), 400),
    "a byte order mark": (post(b"\xef\xbb\xbf{}"), 400),
    "not a number": (post(b'{"model": "tiny", "prompt": "x", "temperature": NaN}'), 400),
    "infinity": (post(b'{"model": "tiny", "prompt": "x", "temperature": Infinity}'), 400),
    "a float that overflows": (post(b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'), 400),
    "an integer of 100,000 digits": (post(b'{"model": "tiny", "prompt": "x", "n": ' + b"9" * 100_000 + b"}"), 400),
    "a name twice": (post(b'{"model": "tiny", "prompt": "x", "n": 1, "n": 2}'), 400),
    "a name twice, deeper": (post(b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": 1, "5": 2}}'), 400),
    "nested without end": (post(b"[" * 1_000_000), 400),
    "nested objects": (post(b'{"a":' * 200_000), 400),
    "half a character": (post(b'{"model": "tiny", "prompt": "\\ud800"}'), 400),
    "half a character to stop at": (post(b'{"model": "tiny", "prompt": "x", "stop": "\\ud800"}'), 400),
    "half a character for a model": (post(b'{"model": "\\ud800", "prompt": "x"}'), 404),
    "half a character for a name": (post(b'{"model": "tiny", "prompt": "x", "\\ud800": 1}'), 400),
    "an answer count without end": (post({"prompt": "x", "n": 10**12}), 400),
    "a million unknown fields": (post({f"a{i}": 1 for i in range(400_000)}), 400),
    "a million wrong messages": (post({"messages": [1] * 1_000_000}, path="chat/completions"), 400),
    "a message of many fields": (
        post({"messages": [{f"a{i}": 1 for i in range(300_000)}]}, path="chat/completions"),
        400,
    ),
    "many empty messages": (
        post({"messages": [{"role": "user", "content": ""}] * 50_000}, path="chat/completions"),
        400,
    ),
    "a million wrong ids": (post({"prompt": "x", "stop_token_ids": ["a"] * 1_000_000}), 400),
    "a million wrong biases": (post({"prompt": "x", "logit_bias": {str(i): "a" for i in range(300_000)}}), 400),
    "biases out of bounds": (post({"prompt": "x", "logit_bias": {str(i): 1000 for i in range(300_000)}}), 400),
    "a million stop strings": (post({"prompt": "x", "stop": [""] * 1_000_000}), 400),
    "a name of a megabyte": (post({"prompt": "x", "a" * 1_000_000: 1}), 400),
    "a model of a megabyte": (post({"prompt": "x", "model": "a" * 1_000_000}), 404),
    "a prompt far over the context": (post({"prompt": "cat " * 1_900_000}), 400),
    "more bytes than are read": (post(b" " * (9 << 20)), 413),
    "a length that is none": (post(b"{}", "Content-Length: x"), 400),
    "two lengths": (post(b"{}", "Content-Length: 2", "Content-Length: 3"), 400),
    "a length below zero": (post(b"{}", "Content-Length: -2"), 400),
    "a length and chunks": (post(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    "chunks that are none": (post(b"zz\r\n", "Transfer-Encoding: chunked"), 400),
    "a chunk of a size without end": (post(b"f" * 100_000, "Transfer-Encoding: chunked"), 400),
    "very many headers": (GET[:-2] + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n", 400),
    "a header of a megabyte": (GET[:-2] + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n", 400),
    "an address of a megabyte": (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "an address of odd bytes": (
        b"GET /v1/models/%ff%00%1b[31m HTTP/1.0\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n",
        404,
    ),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01" * 50 + b"\r\n\r\n", 400),
    "an unknown method": (b"BREW /health HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n", 400),
    "another method": (b"PATCH /health HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n", 405),
    "options": (b"OPTIONS * HTTP/1.0\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n", 404),
    "a tunnel": (b"CONNECT evil:80 HTTP/1.0\r\n\r\n", 401),
    "an old version": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "a version to come": (b"GET /health HTTP/9.9\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
    "the head alone": (b"HEAD /health HTTP/1.0\r\n\r\n", 200),
    "an expectation": (post({"prompt": "x"}, "Expect: the-moon"), 417),
    "an upgrade": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        200,
    ),
}


@pytest.mark.prove
async def test_odd_bytes_are_refused_by_what_they_are_and_never_a_bug(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "REST", 0.0)
    wrong: dict[str, Any] = {}
    async with up(model, sampler=Brief()) as u:
        for name, (sent, wanted) in ODD.items():
            start = time.monotonic()
            status, body = await answered(u, sent)
            took = time.monotonic() - start
            if status != wanted or (status >= 400 and len(json.dumps(body)) > 4000) or took > 10:
                wrong[name] = (status, wanted, str(body)[:200], took)
            if status >= 400 and not body["error"]["message"]:
                wrong[name] = "no message"
        assert (await answered(u, post({"prompt": "user"})))[0] == 200
    assert not wrong
    assert not caplog.records, "hostile requests are no news for the log"


async def test_without_a_token_a_request_without_a_host_is_refused_at_once(model: Path) -> None:
    """aiohttp would ask the network for this machine's name."""
    async with up(model, token=None) as u:
        assert (await answered(u, b"GET /v1/models HTTP/1.0\r\n\r\n", 5))[0] == 403
        assert (await answered(u, b"GET /v1/models HTTP/1.0\r\nHost: \xe9\r\n\r\n"))[0] == 403


async def test_a_text_far_over_the_context_is_not_tokenized(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with up(model, sampler=Brief()) as u:
        monkeypatch.setattr(u.served.renderer, "prompt", lambda *_: pytest.fail("it was tokenized"))
        for status, body in [
            await answered(u, post({"prompt": "cat " * 1000})),
            await answered(
                u, post({"messages": [{"role": "user", "content": "cat " * 1000}]}, path="chat/completions")
            ),
        ]:
            assert (
                status == 400
                and body["error"]["code"] == "context_length_exceeded"
                and "4,0" in body["error"]["message"]
            )
        monkeypatch.undo()
        longest = 96 * max(16, u.served.words.longest)
        status, body = await answered(u, post({"prompt": "user says" * 2}))
        assert status == 200 and longest < 4000
        status, body = await answered(u, post({"prompt": " " * longest}))
        assert "tokens leave no room" in body["error"]["message"], "what may fit is tokenized first"


@pytest.mark.prove
async def test_tokenizing_holds_up_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one large prompt is read, small ones and the server itself answer; and the tokenizer lets other threads
    run."""
    async with up(model, sampler=Brief(context=1 << 20)) as u:
        go, prompt = threading.Event(), u.served.renderer.prompt

        def slow(content: Any, **more: Any) -> np.ndarray:
            assert len(content) < 1000 or go.wait(60)
            return prompt(content, **more)

        monkeypatch.setattr(u.served.renderer, "prompt", slow)
        large = asyncio.create_task(answered(u, post({"prompt": "user says" * 10_000}), 60))
        await asyncio.sleep(0.3)
        assert (await answered(u, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))[0] == 200
        assert (await answered(u, post({"prompt": "user"})))[0] == 200
        assert not large.done()
        go.set()
        assert (await large)[0] == 200
        start, longest = time.monotonic(), 0.0
        work = asyncio.create_task(answered(u, post({"prompt": "user says 7 " * 80_000}), 60))
        while not work.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)
        assert (await work)[0] == 200 and longest < (time.monotonic() - start) / 2


@pytest.mark.prove
async def test_large_requests_leave_time_to_small_ones(model: Path) -> None:
    """Reading megabytes of JSON keeps every other thread from running; before their thread rested, a small request
    waited half a minute."""
    junk = post(b'{"model": "tiny", "prompt": [' + b",".join([b"300"] * 900_000) + b"]}")
    async with up(model) as u:

        async def again() -> None:
            while True:
                assert (await answered(u, junk, 120))[0] == 400

        others = [asyncio.create_task(again()) for _ in range(4)]
        await asyncio.sleep(1)
        start = time.monotonic()
        for _ in range(5):
            assert (await answered(u, post({"prompt": "user", "max_tokens": 4})))[0] == 200
        assert time.monotonic() - start < 20
        for task in others:
            task.cancel()


# ------------------------------------------------------------------------------------------------------- leaving, and
# logs


@pytest.mark.parametrize("ahead", [1, 20, 200])
async def test_a_caller_that_sends_ahead_and_leaves_frees_its_slots(model: Path, ahead: int) -> None:
    """So much is pipelined behind the first request that the connection is not read any more, and its end not seen."""
    engine = Endless()
    async with up(model, sampler=engine) as u:
        async with caller(u) as c:
            await c.send(
                post({"prompt": "user", "max_tokens": 10**6}).replace(b"Connection: close\r\n", b"") + GET * ahead
            )
            await until(lambda: engine.speaking == 1 or u.server._intake._held == 0)
            await asyncio.sleep(0.2)
        await until(lambda: not engine.speaking and not u.server.running)


@pytest.mark.prove
@pytest.mark.parametrize("asked", [{"stream": True}, {"stream": True, "n": 4}, {"n": 4}, None])
async def test_a_caller_that_goes_away_is_no_line_in_the_log(
    model: Path, asked: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Hung up (RST) at once, while the answer begins and in its middle; None: while its body is read."""
    request = post({"prompt": "user", "max_tokens": 10**6, **(asked or {})})
    async with up(model, sampler=(engine := Endless())) as u:
        for after in (0.0, *np.linspace(0.01, 0.09, 9), 0.3):
            async with caller(u) as c:
                await c.send(request if asked is not None else request[:-10])
                await asyncio.sleep(after)
                wire = c.writer.get_extra_info("socket")
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: not engine.speaking and not u.server.running)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.prove
async def test_leaving_with_open_connections_takes_its_time_and_no_longer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent, half-sent, not reading, and being answered without end: the server ends `GRACE` seconds after it was
    asked to."""
    monkeypatch.setattr(listen, "GRACE", 1.0)
    engine = Endless()
    async with contextlib.AsyncExitStack() as stack:
        async with up(model, sampler=engine) as u:
            held = [await stack.enter_async_context(caller(u)) for _ in range(30)]
            for c in held[:10]:
                await c.send(HALF)
            for c in held[10:15]:
                c.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await c.send(post({"prompt": "user", "stream": True, "max_tokens": 10**9, "logprobs": 0}))
            await held[15].send(post({"prompt": "user", "max_tokens": 10**9}))
            await held[16].send(post({"prompt": "user", "max_tokens": 10**9, "stream": True}))
            streamed = asyncio.create_task(held[16].rest())  # one that reads hears the last word
            await until(lambda: engine.speaking == 7)
            await asyncio.sleep(0.5)
            start = time.monotonic()
        assert time.monotonic() - start < 8 and not engine.speaking
        assert b"the server is stopping" in await streamed


async def test_a_log_line_is_not_a_callers_to_repeat(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with up(model, sampler=Brief()) as u:
        monkeypatch.setattr(u.served.renderer, "prompt", None)
        monkeypatch.setattr(u.server._intake, "_ids", None)  # a bug
        for _ in range(3 * LINES):
            assert (await answered(u, post({"prompt": "user"})))[0] == 500
        assert len([r for r in caplog.records if r.name == LOG.name]) == LINES
    with caplog.at_level(logging.WARNING):
        LOG.warning("after the server")
    assert caplog.records[-1].getMessage() == "after the server"


def test_limits_are_read_and_refused_by_name() -> None:
    assert read_limits(["connections=10", "body_mib=0.5"]) == CallerLimits(connections=10, body_mib=0.5)
    for word, said in (
        ("conections=3", "did you mean 'connections'"),
        ("connections=x", "a whole number"),
        ("connections=1.5", "a whole number"),
        ("connections=0", "lies in 1..1e9"),
        ("header_seconds=nan", "lies in 0.01..1e9"),
        ("header_seconds", "is a number"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_limits([word])
