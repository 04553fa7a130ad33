"""An executor under callers that mean harm: times, counts, bytes. Over loopback, bounded in number and time."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from posttrain.sandbox import executor_callers, reference_server
from posttrain.sandbox.reference_server import Executor
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.system.errors import ConfigError
from posttrain.system.hostile_callers import LINES
from tests.sandbox.sandbox_parts import made

SECRET = "a-token-of-some-length"
CALLERS = Path(__file__).parents[1] / "serve/hostile_callers.py"
AUTH = b"Authorization: Bearer " + SECRET.encode() + b"\r\n"
ABOUT = b"GET /v1/about HTTP/1.1\r\nConnection: close\r\n" + AUTH + b"\r\n"


@contextmanager
def executor(connections: int = 512, per_address: int = 256) -> Iterator[Executor]:
    server = Executor(Sandbox(made("namespaces"), workers=1), SECRET, connections=connections, per_address=per_address)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@contextmanager
def connected(server: Executor, sent: bytes = b"", source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(
        ("127.0.0.1", server.server_address[1]), timeout=30, source_address=(source, 0)
    ) as wire:
        wire.sendall(sent)
        yield wire


def rest(wire: socket.socket) -> bytes:
    """All that comes until the server closes."""
    got = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := wire.recv(1 << 16):
            got += chunk
    return bytes(got)


def asked(server: Executor, sent: bytes, source: str = "127.0.0.1") -> int:
    """The status of one request; every answer is JSON."""
    with connected(server, source=source) as wire:
        with contextlib.suppress(ConnectionError):
            wire.sendall(sent)
        head, _, body = rest(wire).partition(b"\r\n\r\n")
        assert not body or json.loads(body)
        return int(head.split()[1])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("phase", "sent", "piece"),
    [
        ("headers", b"", b""),
        ("headers", b"POST /v1/run HTTP/1.1\r\nX: ", b"a"),
        ("headers", b"POST /v1/run HTTP/1.1\r\n", b"X: y\r\n"),
        ("body", b"POST /v1/run HTTP/1.1\r\n" + AUTH + b"Content-Length: 100000\r\n\r\n", b" "),
        ("idle", ABOUT.replace(b"Connection: close\r\n", b""), b""),
    ],
)
def test_what_does_not_end_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, phase: executor_callers.Phase, sent: bytes, piece: bytes
) -> None:
    """Also where a byte comes now and then, which a time-out for each read never sees."""
    monkeypatch.setitem(executor_callers.SECONDS, phase, 1.0)
    with executor() as server, connected(server, sent) as wire:
        start = time.monotonic()
        ended = threading.Event()
        reader = threading.Thread(target=lambda: (rest(wire), ended.set()))
        reader.start()
        while not ended.wait(0.1) and time.monotonic() - start < 20:
            with contextlib.suppress(OSError):
                wire.sendall(piece)
        reader.join(30)
        assert 0.9 < time.monotonic() - start < 10
        while len(server.callers) and time.monotonic() - start < 20:
            time.sleep(0.05)
        assert not len(server.callers) and not server.held


@pytest.mark.prove
def test_a_new_caller_displaces_one_that_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_callers, "YOUNG", 0.2)
    with executor(connections=8) as server, contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(connected(server, b"GET /v1/about HTTP/1.1\r\nX: "))
        start = time.monotonic()
        assert asked(server, ABOUT) == 200
        assert time.monotonic() - start < 20 and len(server.callers) <= 8


def test_one_address_cannot_have_all_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    monkeypatch.setattr(reference_server.Handler, "_answer_to", lambda *_: go.wait(60) and {})
    with executor(per_address=3) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server, ABOUT)) for _ in range(3)]
        while sum(phase == "answer" for _, phase, _ in list(server.callers._held.values())) < 3:
            time.sleep(0.01)
        for _ in range(3 * LINES):
            with connected(server) as wire:
                assert rest(wire) == b""
        assert 0 < len([r for r in caplog.records if "all being answered" in r.getMessage()]) <= LINES
        with connected(server, ABOUT, "127.0.0.2") as other:
            time.sleep(0.2)
            go.set()
            assert b" 200 " in rest(other) and all(b" 200 " in rest(wire) for wire in held)


def test_many_honest_callers_wait_for_each_other() -> None:
    with executor(connections=16) as server:
        words = [sys.executable, "-I", str(CALLERS), "ask", "127.0.0.1", str(server.server_address[1]), "200"]
        done = subprocess.run(
            [*words, ABOUT.decode().encode("unicode_escape")], capture_output=True, timeout=120, check=True
        )
        said = json.loads(done.stdout)
        assert said["status"] == {"200": 200} and not said["errors"], said


@pytest.mark.prove
def test_no_file_left_is_no_spin(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with executor() as server:
        words = [
            sys.executable,
            "-I",
            str(CALLERS),
            "hold",
            "127.0.0.1",
            str(server.server_address[1]),
            "60",
            "GET / HTTP/1.1",
        ]
        with socket.socket() as probe:
            free = probe.fileno()
        child = subprocess.Popen(words, stdin=-1, stdout=-1)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 6, hard))
            spent = time.process_time()
            time.sleep(3)
            assert time.process_time() - spent < 1.5, "the accept loop spins"
            assert 0 < len(caplog.records) <= LINES
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            child.communicate(b"", timeout=30)
        assert asked(server, ABOUT) == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (ABOUT.replace(SECRET.encode(), b"\xe9"), 401),
        (ABOUT.replace(SECRET.encode(), b"\xff\xfe" * 999), 401),
        (ABOUT.replace(AUTH, b""), 401),
        (b"POST /v1/run HTTP/1.0\r\n" + AUTH + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST /v1/run HTTP/1.0\r\n" + AUTH + b"Content-Length: \xb2\r\n\r\n", 400),
        (b"POST /v1/run HTTP/1.0\r\n" + AUTH + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /v1/run HTTP/1.1\r\n" + AUTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/run HTTP/1.0\r\n" + AUTH + b"Content-Length: 3\r\n\r\n\xff{}", 400),
        (b"POST /v1/run HTTP/1.0\r\n" + AUTH + b'Content-Length: 26\r\n\r\n{"limits": {"wall": NaN}}  ', 400),
        (b"GET /v1/about HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n", 431),
        (b"GET /v1/about HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /v1/about HTTP/9.9\r\n\r\n", 505),
        (b"BREW /v1/about HTTP/1.1\r\n\r\n", 501),
        (b"\x16\x03\x01 \x00 \x01\r\n\r\n", 400),
    ],
)
def test_odd_bytes_are_refused_as_json_and_without_a_line(
    sent: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with executor() as server:
        assert asked(server, sent) == status
        assert asked(server, ABOUT) == 200
    assert capfd.readouterr().err == ""


def test_bodies_are_bounded_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_server, "MOST_HELD", 1_000_000)
    head = b"POST /v1/run HTTP/1.0\r\n" + AUTH + b"Content-Length: %d\r\n\r\n"
    with executor() as server:
        with connected(server, head % 900_000):
            while not server.held:
                time.sleep(0.01)
            assert asked(server, head % 200_000) == 503
        while server.held:
            time.sleep(0.01)
        assert asked(server, head % 2 + b"[]") == 400


def test_a_bug_is_told_so_often_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reference_server.Handler, "_answer_to", None)
    with executor() as server:
        for _ in range(2 * LINES):
            with connected(server, ABOUT) as wire:
                rest(wire)
    assert len([r for r in caplog.records if r.name == reference_server.LOG.name]) == LINES
    with caplog.at_level(logging.WARNING):
        reference_server.LOG.warning("after")
    assert caplog.records[-1].getMessage() == "after"
    with pytest.raises(ConfigError, match="at least 1"), Sandbox(made("namespaces"), workers=1) as box:
        Executor(box, SECRET, connections=0)
