"""What the lists of system calls say, and that each attempt to reach a network is refused and counted, whichever way it
is made."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.core.gauge import Gauge
from posttrain.core.stop import EpisodeLimits as Stops
from posttrain.core.types import Task
from posttrain.environment.tools.offered import OfferedTools
from posttrain.sandbox.cell import syscalls
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits
from posttrain.sandbox.selftest import selftest
from posttrain.verifier.calling import ToolCall
from posttrain.verifier.code.code_reward import Code
from tests.sandbox.sandbox_parts import NAMES, backend, made, patched

REFUSED = syscalls.ERRNO | syscalls.EPERM


def rank(verdict: int) -> int:
    """Of several filters' verdicts the kernel takes the lowest action as a signed number, and of equals the youngest's
    (seccomp(2))."""
    action = verdict & 0xFFFF0000
    return action - (1 << 32) if action >> 31 else action


def decision(filter: bytes, number: int, *arguments: int, architecture: int = syscalls.AUDIT_ARCH_X86_64) -> int:
    """What the kernel would do with a call whose other arguments are zero: the filter, worked through here."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at = held = 0
    while True:
        code, yes, no, value = struct.unpack_from("HBBI", filter, 8 * at)
        at += 1
        if code == syscalls.LOAD:
            (held,) = struct.unpack_from("I", data, value)
        elif code == syscalls.RETURN:
            return value
        else:
            found = {syscalls.EQUAL: held == value, syscalls.SET: bool(held & value), syscalls.AT_LEAST: held >= value}[
                code
            ]
            at += yes if found else no


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("host_files", [False, True])
@pytest.mark.parametrize("processes", [False, True])
def test_the_filter_says_of_every_number_what_the_list_says(host_files: bool, processes: bool, told: bool) -> None:
    filter = syscalls.program(111, 222, 333, host_files=host_files, processes=processes, told=told)
    allowed = {*syscalls.PLAIN, *(() if host_files else syscalls.FILES), *(syscalls.PROCESSES if processes else ())}
    looked_at = {56, 62, 72, 16, 157, 234, 302, 44, 53, 435, 2, 257, 41}
    assert not allowed & looked_at
    for number in set(range(1200)) - looked_at:
        refused = syscalls.ERRNO | syscalls.ENOTSUP if number in syscalls.ATTRIBUTES else REFUSED
        assert decision(filter, number) == (syscalls.ALLOW if number in allowed else refused), number
    for number in (0x40000000, 0x40000001, 0xFFFFFFFF):
        assert decision(filter, number) == syscalls.KILL
    assert decision(filter, 1, architecture=0x40000003) == syscalls.KILL
    assert decision(filter, 41, 2) == (syscalls.TRACE if told else REFUSED)


def test_both_filters_together_tell_of_networks_and_allow_nothing_more() -> None:
    one, both = (syscalls.program(111, 222, 333, host_files=False, processes=False, told=t) for t in (False, True))
    for number in range(1200):
        for family in (0, 1, 2, 10, 16, 17, 1 << 32 | 2):
            alone = decision(one, number, family)
            verdict = min(decision(both, number, family), decision(syscalls.telling(), number, family), key=rank)
            network = number == 41 and family & 0xFFFFFFFF not in (1, 16)
            assert (alone, verdict) == ((REFUSED, syscalls.TELL) if network else (alone, alone)), (number, family)


# --- a real kernel ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=NAMES)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend(request.param), workers=1, sessions=1, limits=ProgramLimits(wall=20.0, cpu=10.0)) as sandbox:
        yield sandbox


TRY = "try: {}\nexcept OSError as e: print(e.errno)\n"
WAYS = [
    ("socket", "import socket\n" + TRY.format("socket.socket()"), 1, "1\n"),
    (
        "IPv6 and raw packets",
        "import socket\n" + TRY.format("socket.socket(10)") + TRY.format("socket.socket(17, 3)"),
        2,
        "1\n1\n",
    ),
    (
        "past Python",
        "import ctypes\nl = ctypes.CDLL(None)\nprint([l.syscall(41, 2, 1, 0) for _ in range(5)])",
        5,
        "[-1, -1, -1, -1, -1]\n",
    ),
    (
        "several threads",
        (
            "import socket, threading\ndef f():\n for _ in range(50):\n  try: socket.socket()\n  except OSError: pass\n"
            "them = [threading.Thread(target=f) for _ in range(4)]\n[t.start() for t in them]; [t.join() for t in them]"
        ),
        200,
        "",
    ),
    (
        "this machine's own",
        "import socket\n" + TRY.format("socket.socket(1)") + TRY.format("socket.socket(16, 3)"),
        0,
        "1\n1\n",
    ),
    ("none", "import asyncio, pwd, socket\nasyncio.run(asyncio.sleep(0))\nsocket.socketpair()", 0, ""),
]


@pytest.mark.parametrize(("source", "count", "said"), [pytest.param(*w[1:], id=w[0]) for w in WAYS])
def test_every_attempt_is_refused_and_counted(box: Sandbox, source: str, count: int, said: str) -> None:
    ran = box.run_sync(source)
    assert (ran.why, ran.network, ran.said) == ("ok", count, said), ran


def test_a_name_to_look_up_is_an_attempt(box: Sandbox) -> None:
    ran = box.run_sync("import socket\ntry: socket.getaddrinfo('example.com', 80)\nexcept OSError: print('no name')")
    assert ran.said == "no name\n" and ran.network and ran.network >= 1


@pytest.mark.prove
def test_an_attempt_counts_for_who_made_it_and_however_it_ended(box: Sandbox) -> None:
    """Killed in the middle of them, after them, or by its limits: the next program begins at none."""
    for end in ("while True: {}", "{}\nimport os; os.abort()", "{}\nwhile True: pass"):
        attempt = (
            "\n try: socket.socket()\n except OSError: pass"
            if end.startswith("while")
            else "try: socket.socket()\nexcept OSError: pass"
        )
        ended = box.run_sync("import socket\n" + end.format(attempt), limits=ProgramLimits(wall=0.5))
        assert ended.why in ("timeout", "crashed") and ended.network and ended.network >= 1
        assert box.run_sync("1").network == 0


@pytest.mark.prove
def test_a_flood_is_ended_by_the_programs_limits_and_a_cancelled_one_at_once(box: Sandbox) -> None:
    flood = "import socket\nwhile True:\n try: socket.socket()\n except OSError: pass"
    spent = box.run_sync(flood, limits=ProgramLimits(wall=60, cpu=1))
    assert spent.why == "timeout" and spent.seconds < 50 and spent.network and spent.network > 100

    async def main() -> None:
        task = asyncio.create_task(box.run(flood, limits=ProgramLimits(wall=60, cpu=60)))
        await asyncio.sleep(0.3)
        task.cancel()
        assert (await asyncio.wait_for(box.run("1"), 30)).network == 0

    asyncio.run(main())


def test_a_piece_of_a_session_has_its_own(box: Sandbox) -> None:
    async def main() -> list[int | None]:
        async with box.session() as session:
            tries = "import socket\nfor _ in range(3):\n try: socket.socket()\n except OSError: pass"
            return [
                (await session.run(piece)).network
                for piece in ("1", tries, "2", tries + "\nimport os; os._exit(0)", "3")
            ]

    assert asyncio.run(main()) == [0, 3, 0, 3, 0]


def test_children_are_counted_with_their_program() -> None:
    source = (
        "import os, socket\nfor _ in range(3):\n if os.fork() == 0:\n  try: socket.socket()\n  except OSError:"
        " os._exit(0)\nfor _ in range(3): os.wait()"
    )
    with Sandbox(backend("namespaces"), workers=1) as box:
        ran = box.run_sync(source, limits=ProgramLimits(wall=20, processes=4))
    assert (ran.why, ran.network) == ("ok", 3)


@pytest.mark.parametrize("name", NAMES)
def test_where_the_kernel_does_not_tell_they_are_refused_uncounted(tmp_path: Path, name: str) -> None:
    backend(name)
    deaf = made(
        name,
        patched(
            tmp_path,
            "attempts.py",
            "SECCOMP, FILTER, NEW_LISTENER = 317, 1, 8",
            "SECCOMP, FILTER, NEW_LISTENER = 317, 1, 1 << 20",
        ),
    )
    assert selftest(deaf) == []
    with Sandbox(deaf, workers=1) as box:
        ran = box.run_sync(WAYS[0][1])
        assert (ran.said, ran.network, box.network.take()) == ("1\n", None, (0, 0))


def test_each_filter_refuses_where_the_other_is_gone(tmp_path: Path) -> None:
    """Planted: the one that tells lets everything through. What is left refuses by itself (ENOSYS)."""
    backend("namespaces")
    holed = made(
        "namespaces", patched(tmp_path, "syscalls.py", "local + op(RETURN, TELL)", "local + op(RETURN, ALLOW)")
    )
    with Sandbox(holed, workers=1) as box:
        assert box.run_sync(WAYS[0][1]).said == f"{syscalls.ENOSYS}\n"


# --- gauges -----------------------------------------------------------------------------------------------------------


def test_a_run_sees_how_often_its_policy_tried(box: Sandbox) -> None:
    code = Code(box)
    box.network.take()
    task = Task("t", "p", info={"tests": [{"function": "f", "args": [i], "expected": i} for i in (1, 2)]})
    program = "import socket\ntry: socket.socket()\nexcept OSError: pass\ndef f(x): return x"
    assert asyncio.run(code.verdict(task, program)).score == 1.0
    assert code.gauges()["verifier/code/network"] == Gauge(2, 2) and code.gauges()["verifier/code/network"].count == 0


async def test_the_python_tool_tells_too() -> None:
    backend("namespaces")
    offered = OfferedTools.of("python")
    assert offered.gauges() == {}
    try:
        async with offered.box(Task("t", "p")) as tools:
            seen = [
                (await tools.call(ToolCall("python", {"code": piece}), Stops())).kind
                for piece in ("import socket", "socket.socket()")
            ]
        assert seen == ["ok", "refused"] and offered.gauges() == {"tools/python/network": Gauge(1, 2)}
    finally:
        offered.close()
