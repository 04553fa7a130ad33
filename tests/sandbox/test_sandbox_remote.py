"""Programs on an executor over HTTP: the same answers, the same attacks, and every way in which it may fail is our
failure."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.types import Task
from posttrain.core.verdict import State
from posttrain.sandbox import executor_callers, reference_server, remote
from posttrain.sandbox.backends import Namespaces
from posttrain.sandbox.choose_backend import choose, examined
from posttrain.sandbox.comparison import heard, same
from posttrain.sandbox.reference_server import Executor
from posttrain.sandbox.remote import TOKEN, RemoteExecutor
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import Call, ProgramLimits, SandboxBroken, SandboxUnavailableError
from posttrain.sandbox.selftest import selftest
from posttrain.system.errors import ConfigError
from posttrain.verifier.code.code_reward import Code
from tests.sandbox.sandbox_parts import backend, gone

SECRET = "a-token-of-some-length"
LIMITS = ProgramLimits(wall=20.0, cpu=10.0)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    server = Executor(Sandbox(backend("namespaces"), workers=2, sessions=2), SECRET)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def far(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setenv(TOKEN, SECRET)
    with Sandbox(RemoteExecutor(executor.url), workers=4, limits=LIMITS, sessions=2) as box:
        yield box


@pytest.mark.prove
def test_the_same_answers_as_at_home(far: Sandbox) -> None:
    ran = far.run_sync("print(int(input()) * 2)", stdin="21")
    assert (ran.why, ran.said, ran.sandbox) == ("ok", "42\n", "remote:namespaces")
    ran = far.run_sync("def f(x, *, k): return {x: (k, b'\\0')}", call=Call("f", (1,), (("k", "ä\ud800"),)))
    assert same(heard(ran.result), {1: ("ä\ud800", b"\0")})
    assert far.run_sync("x = bytearray(1 << 30)").why == "memory"
    assert far.run_sync("while True: print('x' * 1000)").why == "output"
    assert far.run_sync("while True: pass", limits=ProgramLimits(wall=0.3)).why == "timeout"
    assert far.run_sync(b"x = '\xff'").why == "error"
    assert far.run_sync("import socket\ntry: socket.socket()\nexcept OSError: pass").network == 1
    assert far.run_sync("import os; print(os.fork() >= 0)", limits=ProgramLimits(processes=2)).said.startswith("True")

    async def main() -> None:
        done = await asyncio.gather(*(far.run(f"print({i})") for i in range(40)))
        assert [int(d.stdout) for d in done] == list(range(40))

    asyncio.run(main())


@pytest.mark.prove
def test_it_is_admitted_by_the_self_test_through_the_wire(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    assert selftest(RemoteExecutor(executor.url)) == []
    assert choose(executor.url).name == "remote"


@pytest.mark.prove
def test_sessions_live_over_there(far: Sandbox, executor: Executor) -> None:
    async def main() -> None:
        async with far.session(limits=ProgramLimits(wall=1.0)) as session:
            assert (await session.run("x = 6")).why == "ok"
            assert (await session.run("print('so'); x * 7")).said == "so\n42\n"
            assert (await session.run("while True: pass")).lost
            assert (await session.run("x")).complaint == "NameError: name 'x' is not defined"
            assert len(executor.sessions) == 1
        assert executor.sessions == {} and executor.sandbox.sessions.alive == 0

    asyncio.run(main())


@pytest.mark.prove
def test_a_connection_that_was_silent_for_long_is_made_anew(far: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor closes it, and the session and its definitions stay."""
    monkeypatch.setitem(executor_callers.SECONDS, "idle", 0.1)

    async def main() -> None:
        async with far.session() as session:
            assert (await session.run("x = 6")).why == (await far.run("1")).why == "ok"
            await asyncio.sleep(1.2)
            assert (await session.run("x")).said == "6\n" and (await far.run("1")).why == "ok"

    asyncio.run(main())
    assert far.counts.lost == 0


def test_programs_are_judged_over_there(far: Sandbox) -> None:
    code = Code(far)
    task = Task("t", "p", info={"tests": [{"function": "f", "args": [2], "expected": 4}]})
    assert [asyncio.run(code.verdict(task, f"def f(x): return {e}")).score for e in ("x * 2", "x")] == [1.0, 0.0]


# --- outages ----------------------------------------------------------------------------------------------------------

GOOD = {
    "why": "ok",
    "exit": 0,
    "stdout": "",
    "stderr": "",
    "result": "",
    "cut": False,
    "seconds": 0.1,
    "cpu": 0.1,
    "peak": 1,
    "sandbox": "x",
    "lost": False,
    "network": 0,
}
REPLIES: dict[str, tuple[int, bytes]] = {
    "A-12 status 500": (500, b"oops"),
    "A-12 status 503": (503, b'{"error": "no"}'),
    "A-12 no JSON": (200, b"{"),
    "A-12 a list": (200, b"[]"),
    "A-12 deep": (200, b"[" * 100_000),
    "A-12 nothing": (200, b""),
    "A-12 a key too few": (200, json.dumps({k: v for k, v in GOOD.items() if k != "why"}).encode()),
    "A-12 another why": (200, json.dumps(GOOD | {"why": "passed"}).encode()),
    "A-12 a status as text": (200, json.dumps(GOOD | {"exit": "0"}).encode()),
    "A-12 no base64": (200, json.dumps(GOOD | {"stdout": "%%%"}).encode()),
    "A-12 more than was asked for": (
        200,
        json.dumps(GOOD | {"stdout": base64.b64encode(bytes(100_000)).decode()}).encode(),
    ),
    "A-12 uncontained": (200, json.dumps(GOOD | {"sandbox": "none"}).encode()),
    "A-12 fewer than no attempts": (200, json.dumps(GOOD | {"network": -1}).encode()),
    "A-12 seconds that are no number": (200, json.dumps(GOOD | {"seconds": "x"}).encode()),
    "A-12 seconds as text": (200, json.dumps(GOOD | {"seconds": "1"}).encode()),
    "A-12 a truth value": (200, json.dumps(GOOD | {"cpu": True}).encode()),
    "A-12 NaN": (200, json.dumps(GOOD | {"seconds": float("nan")}).encode()),
    "A-12 infinity": (200, json.dumps(GOOD | {"cpu": float("inf")}).encode()),
    "A-12 beyond every float": (200, json.dumps(GOOD | {"cpu": 10**400}).encode()),
    "A-12 less than no time": (200, json.dumps(GOOD | {"seconds": -0.1}).encode()),
}


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that says of itself that it is an executor, and answers programs as it is told."""
    told: dict[str, Any] = {"run": (200, b""), "about": {"version": "1", "sandbox": "x"}, "asked": 0}

    class Liar(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(200, json.dumps(told["about"]).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            told["asked"] += 1
            reply = told["run"]() if callable(told["run"]) else told["run"]
            if reply is not None:
                self.say(*reply)

        def say(self, status: int, body: bytes) -> None:
            head = f"HTTP/1.0 {status} x\r\nContent-Length: {len(body)}\r\n".encode()
            drips = told.get("drips") if self.command == "POST" else None
            for part, name in ((head + b"\r\n", "head"), (body, "body")):
                for piece in [part] if name != drips else [part[i : i + 1] for i in range(len(part))]:
                    self.wfile.write(piece)
                    time.sleep(0.1 * (name == drips))

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv(TOKEN, SECRET)
    yield f"http://127.0.0.1:{server.server_address[1]}", told
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("reply", REPLIES)
def test_an_outage_is_asked_again_and_is_never_a_score(liar: tuple[str, dict[str, Any]], reply: str) -> None:
    """A-12, H-32: three times, then a verdict without a number."""
    url, told = liar
    told["run"] = REPLIES[reply]
    task = Task("t", "p", info={"tests": [{"stdin": "", "stdout": "3"}]})
    with Sandbox(RemoteExecutor(url), workers=1) as box:
        verdict = asyncio.run(Code(box).verdict(task, "print(3)"))
        assert (verdict.state, verdict.score, verdict.kind, told["asked"]) == (State.FAILED, None, "sandbox", 3), (
            verdict
        )
        told["run"] = (200, json.dumps(GOOD | {"stdout": base64.b64encode(b"3\n").decode()}).encode())
        assert asyncio.run(Code(box).verdict(task, "print(3)")).score == 1.0


@pytest.mark.prove
def test_silence_is_an_outage_after_its_time(liar: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, told = liar
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    told["run"] = lambda: time.sleep(1.0)
    with (
        Sandbox(RemoteExecutor(url), workers=1, limits=ProgramLimits(wall=0.1)) as box,
        pytest.raises(SandboxBroken, match="no whole answer in 0.3 s"),
    ):
        box.run_sync("print(1)")


@pytest.mark.prove
@pytest.mark.parametrize("drips", ["head", "body"])
def test_an_answer_that_comes_byte_by_byte_is_an_outage_after_its_time(
    drips: str, liar: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the answer never ends."""
    url, told = liar
    monkeypatch.setattr(remote, "PATIENCE", 0.4)
    told["run"], told["drips"] = (200, b" " * 200), drips
    with (
        Sandbox(RemoteExecutor(url), workers=1, limits=ProgramLimits(wall=0.1)) as box,
        pytest.raises(SandboxBroken, match=r"no whole answer in 0\.5 s"),
    ):
        box.run_sync("print(1)")


def test_an_executor_that_is_not_one_is_refused_at_the_start(
    liar: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, told = liar
    for about in ({}, {"version": "2", "sandbox": "x"}, {"version": "1", "sandbox": "none"}):
        told["about"] = about
        (why,) = selftest(RemoteExecutor(url))
        assert "no executor of version 1 with a sandbox" in why
    examined.cache_clear()
    with pytest.raises(SandboxUnavailableError, match="remote: .*no executor"):
        choose(url)
    (why,) = selftest(RemoteExecutor("http://127.0.0.1:9"))
    assert "refused" in why
    monkeypatch.delenv(TOKEN)
    (why,) = selftest(RemoteExecutor(url))
    assert f"environment variable {TOKEN} with its token is not set" in why


def test_addresses_that_would_tell_the_token_are_refused() -> None:
    for url, says in (
        ("http://example.com", "in the clear; use https"),
        ("http://10.0.0.1:80", "in the clear"),
        ("ftp://127.0.0.1", "no address of an executor"),
        ("https://", "no address"),
        ("https://[::1", "no address"),
        ("https://example.com:99999", "no address"),
        ("https://user@example.com", "no address"),
        ("https://:password@example.com", "no address"),
        ("https://example.com/?x=1", "no address"),
    ):
        with pytest.raises(ConfigError, match=says):
            choose(url)


@pytest.mark.parametrize("token", ["a-token-of\nsome-length", "a-t\u00f6ken-of-some-length"])
def test_a_token_that_is_no_header_is_refused_and_never_told(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    (why,) = selftest(RemoteExecutor("http://127.0.0.1:9"))
    assert "no line of ASCII" in why and "some-length" not in why
    with pytest.raises(ConfigError, match="all of printable ASCII"):
        Executor(Sandbox(Namespaces(())), token)


def test_a_server_that_cannot_listen_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], executor: Executor
) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    before = list(reference_server.LOG.filters)
    for words in (
        ["--port", str(executor.server_address[1])],
        ["--port", "70000"],
        ["--port", "0", "--certificate", "/no/file"],
    ):
        assert reference_server.main([*words, "--packages", ""]) == ConfigError.exit_code
        assert "cannot listen at 127.0.0.1:" in capsys.readouterr().err
    assert reference_server.LOG.filters == before, "a limit on lines outlives a server that was never there"


# --- the server -------------------------------------------------------------------------------------------------------


def asked(executor: Executor, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    wire = http.client.HTTPConnection("127.0.0.1", executor.server_address[1], timeout=20)
    wire.request(method, path, body, {"Authorization": f"Bearer {SECRET}"} | headers)
    reply = wire.getresponse()
    told = json.loads(reply.read())
    wire.close()
    return reply.status, told


@pytest.mark.parametrize(
    "given", ["", "Bearer ", "Bearer wrong", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", "Bearer \xff"]
)
def test_nobody_runs_programs_without_the_token(executor: Executor, given: str) -> None:
    before = executor.sandbox.counts.why.total()
    for method, path in (
        ("GET", "/v1/about"),
        ("POST", "/v1/run"),
        ("POST", "/v1/session"),
        ("DELETE", "/v1/session/x"),
    ):
        assert asked(executor, method, path, Authorization=given) == (401, {"error": "wrong or missing token"})
    assert executor.sandbox.counts.why.total() == before


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/run", b"{", 400, "no JSON"),
        ("/v1/run", b"[]", 400, "no JSON object"),
        ("/v1/run", b"[" * 100_000, 400, "no JSON"),
        ("/v1/run", b'{"program": 1}', 400, "no base64"),
        ("/v1/run", b'{"limits": {"wall": "x"}}', 400, "object of numbers"),
        ("/v1/run", b'{"limits": {"wll": 1}}', 400, "object of numbers"),
        ("/v1/run", b'{"limits": {"wall": true}}', 400, "object of numbers"),
        ("/v1/run", b'{"limits": {"wall": 1e999}}', 400, "object of numbers"),
        ("/v1/run", b'{"limits": {"wall": 0}}', 400, "more than 0"),
        ("/v1/run", b'{"limits": {"wall": 1000}}', 400, "beyond what is given here"),
        ("/v1/run", b'{"limits": {"memory": 1000000000000}}', 400, "beyond what is given here"),
        ("/v1/session", b'{"limits": {"processes": 1}}', 400, "cannot have processes"),
        ("/v1/session/nobody", b"{}", 503, "no such session"),
        ("/v1/elsewhere", b"{}", 400, "nothing to ask"),
        ("/../../etc/passwd", b"{}", 400, "nothing to ask"),
    ],
)
def test_what_is_not_understood_is_refused(executor: Executor, path: str, body: bytes, status: int, says: str) -> None:
    got, told = asked(executor, "POST", path, body)
    assert got == status and says in told["error"]


def test_a_body_without_end_is_not_read(executor: Executor) -> None:
    assert asked(executor, "POST", "/v1/run", **{"Content-Length": str(reference_server.MOST_BODY + 1)})[0] == 400


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_this_machine_alone_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """It ends when told to, also where it was started in the background by a shell that has signals ignored."""
    command = [
        sys.executable,
        "-m",
        "posttrain.sandbox.reference_server",
        "--port",
        "0",
        "--workers",
        "1",
        "--packages",
        "",
    ]
    env = {**os.environ, TOKEN: SECRET, "PYTHONPATH": str(Path(__file__).parents[2])}
    deaf = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", *command]
    server = subprocess.Popen(deaf, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    name, _, where = server.stdout.readline().split()
    assert where.startswith("127.0.0.1:")
    monkeypatch.setenv(TOKEN, SECRET)
    with Sandbox(RemoteExecutor(f"http://{where}"), workers=1) as box:
        assert box.run_sync("print(7)").sandbox == f"remote:{name}"
    server.send_signal(number)
    assert server.wait(60) == 128 + number and gone(server.pid)
    server.stdout.close()
    refusals: list[tuple[list[str], Callable[[], None], str]] = [
        (["--host", "0.0.0.0"], lambda: None, "needs --certificate and --key, or --plain"),
        ([], lambda: monkeypatch.delenv(TOKEN), f"set the environment variable {TOKEN}"),
    ]
    for words, before, says in refusals:
        before()
        with pytest.raises(SystemExit):
            reference_server.main(words)
        assert says in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at least 16 characters"):
        Executor(Sandbox(backend("namespaces"), workers=1), "short")
