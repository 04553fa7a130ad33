"""Sessions: what one piece defines the next one sees, each piece within its limits, contained as a program is, nothing
left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.sandbox.cell.zygote import GO, KILL
from posttrain.sandbox.local_conversation import LocalConversation
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran, SandboxBroken, Why
from posttrain.sandbox.selftest import ATTACK, attacks, bait
from posttrain.system.errors import ConfigError
from tests.sandbox.sandbox_parts import backend, living

LIMITS = ProgramLimits(wall=20.0, cpu=10.0)


@pytest.fixture(scope="module", params=["namespaces", pytest.param("landlock", marks=pytest.mark.prove)])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend(request.param), workers=1, sessions=2, limits=LIMITS) as sandbox:
        yield sandbox
        assert sandbox.sessions.alive == sandbox.sessions.waiting == 0
    assert mine() == []


def mine() -> list[str]:
    """Sandboxes that this process started."""
    found = []
    for line in living("cell.zygote"):
        with contextlib.suppress(FileNotFoundError):
            if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{line.split()[0]}/status").read_text():
                found.append(line)
    return found


def told(box: Sandbox, *pieces: str, limits: ProgramLimits = LIMITS) -> list[Ran]:
    """The answers of one session."""

    async def main() -> list[Ran]:
        async with box.session(limits=limits) as session:
            return [await session.run(piece) for piece in pieces]

    return asyncio.run(main())


def test_what_one_piece_defines_the_next_one_sees(box: Sandbox) -> None:
    *_, last = told(box, "import math\nx = 6", "def f(y):\n    return x * y", "x = math.isqrt(50)", "print('so'); f(6)")
    assert (last.why, last.said, last.exit, last.lost, last.sandbox) == ("ok", "so\n42\n", 0, False, box.name)


def test_a_piece_is_answered_as_a_cell_of_a_notebook_is(box: Sandbox) -> None:
    said = [r.said for r in told(box, "1; 'a'", "_ + 'b'", "None", "x = 3", "", "# nothing", "if x: x", "[x,\n x]")]
    assert said == ["'a'\n", "'ab'\n", "", "", "", "", "", "[3, 3]\n"]


@pytest.mark.parametrize(
    ("piece", "complaint", "line"),
    [
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero", "return 1 / 0"),
        ("(", "SyntaxError: '(' was never closed", "("),
        ("nothing", "NameError: name 'nothing' is not defined", "nothing"),
        ("input()", "EOFError: EOF when reading a line", "input()"),
        ("raise SystemExit(3)", "SystemExit: 3", ""),
        ("quit()", "SystemExit: None", ""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("x = '\ud800'", "SyntaxError: ", ""),
        ("x = 1\0", "source code string cannot contain null bytes", ""),
    ],
)
def test_an_exception_is_data_and_what_was_defined_stays(box: Sandbox, piece: str, complaint: str, line: str) -> None:
    _, bad, after = told(box, "kept = 1", piece, "kept")
    assert (bad.why, bad.exit, bad.lost) == ("error", 1, False) and complaint in bad.complaint, bad
    assert line in bad.stderr.decode() and "cells.py" not in bad.stderr.decode()
    assert after.said == "1\n"


ENDS = [
    ("while True: pass", "timeout"),
    ("import time; time.sleep(100)", "timeout"),
    ("import os; os.kill(os.getpid(), 19)", "timeout"),
    ("import os; os.closerange(0, 99)\nwhile True: pass", "timeout"),
    ("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "timeout"),
    ("import os\nwhile True: os.write(1, b'x' * 10**6)", "output"),
    ("import os\nwhile True: os.write(2, b'x' * 10**6)", "output"),
    ("import os\nwhile True: os.write(3, b'x' * 1000)", "output"),
    ("import ctypes; ctypes.string_at(0)", "crashed"),
    ("import os; os.abort()", "crashed"),
    ("import os; os._exit(0)", "error"),
    ("import os; os.close(3)", "error"),
]


@pytest.mark.parametrize(("piece", "why"), ENDS)
def test_a_piece_that_ends_the_process_says_so_and_the_next_begins_anew(box: Sandbox, piece: str, why: str) -> None:
    _, bad, fresh, again = told(box, "kept = 1", piece, "kept", "kept = 2; kept", limits=ProgramLimits(wall=0.3))
    assert (bad.why, bad.lost) == (why, True), bad
    assert fresh.complaint == "NameError: name 'kept' is not defined" and (again.why, again.said, again.lost) == (
        "ok",
        "2\n",
        False,
    )


def test_too_much_memory_is_an_error_of_the_piece(box: Sandbox) -> None:
    first, big, after = told(box, "kept = bytearray(1 << 20)", "x = bytearray(1 << 30)", "len(kept)")
    assert (first.why, big.why, big.lost, after.said) == ("ok", "memory", False, "1048576\n")


@pytest.mark.prove
def test_processor_time_is_by_the_piece_and_no_program_can_ignore_its_end(box: Sandbox) -> None:
    """Two threads use two seconds of it in one; five pieces may each use what one may."""
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    several = told(box, *[busy] * 5, limits=ProgramLimits(wall=20, cpu=0.6))
    assert [r.why for r in several] == ["ok"] * 5 and all(0.25 < r.cpu < 0.6 for r in several)
    source = (
        "import signal, threading\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f():\n while True: pass\n"
        "threading.Thread(target=f, daemon=True).start()\nf()"
    )
    (stopped,) = told(box, source, limits=ProgramLimits(wall=60, cpu=0.5))
    assert (stopped.why, stopped.lost) == ("timeout", True) and stopped.seconds < 55


def test_it_stands_still_between_pieces(box: Sandbox) -> None:
    """What a thread counts while nobody asks is nothing: the process uses no processor time then."""
    counting = (
        "import threading, time\ndef f():\n while True: time.sleep(0.001)\nthreading.Thread(target=f,"
        " daemon=True).start()"
    )

    async def main() -> tuple[float, float]:
        async with box.session() as session:
            await session.run(counting)
            before = float((await session.run("time.process_time()")).said)
            await asyncio.sleep(0.5)
            return before, float((await session.run("time.process_time()")).said)

    before, after = asyncio.run(main())
    assert after - before < 0.1


def test_waits_that_a_pause_interrupted_go_on(box: Sandbox) -> None:
    """The kernel resumes a timed wait by a system call of its own, which the list of allowed ones has to name: a lock's
    wait that is refused there ends the process."""
    waits = (
        "import queue, select, threading, time\nended = []\ndef sleeps(): time.sleep(0.2)\ndef locks():\n k ="
        " threading.Lock(); k.acquire(); k.acquire(timeout=0.2)\ndef polls(): select.select([], [], [], 0.2)\ndef"
        " gets():\n try: queue.Queue().get(timeout=0.2)\n except queue.Empty: pass\ndef tell(f):\n try: f();"
        " ended.append(f.__name__)\n except BaseException as e: ended.append(repr(e))\nthem ="
        " [threading.Thread(target=tell, args=(f,), daemon=True) for f in (sleeps, locks, polls, gets)]\n[t.start() for"
        " t in them]; time.sleep(0.05)"
    )
    began, *_, after = told(box, waits, *["time.sleep(0.01)"] * 4, "[t.join() for t in them]; sorted(ended)")
    assert (began.why, after.lost, after.said) == ("ok", False, "['gets', 'locks', 'polls', 'sleeps']\n"), after


def test_forged_answers_are_the_sessions_own_trouble(box: Sandbox) -> None:
    forged, sleeps, well = told(
        box,
        "import os, time; os.write(3, b'x\\n99 0\\n1 zero\\n'); print('one')",
        "time.sleep(0.05); 2",
        "os.write(3, b'1 0\\n2 1\\n'); 3",
    )
    assert [r.said for r in (forged, sleeps, well)] == ["one\n", "2\n", "8\n3\n"[2:]] and well.why == "ok"


def test_the_attacks_fail_in_a_session_too(box: Sandbox) -> None:
    with bait() as target:
        source = attacks(target)
        (done,) = told(box, source.decode(), limits=ProgramLimits(wall=30, cpu=20))
    said = done.said.splitlines()
    assert done.why == "ok" and said[0] == f"tried {source.count(ATTACK)}", done
    assert said[1:] in ([], [""])


def test_files_last_as_long_as_their_session(box: Sandbox) -> None:
    wrote, read = told(box, "open('f', 'w').write('kept')", "open('f').read()")
    if box.name == "landlock":
        assert wrote.complaint.startswith("PermissionError") and read.complaint.startswith("FileNotFoundError")
    else:
        assert read.said == "'kept'\n"
    (after,) = told(box, "import os\ntry: left = os.listdir('.')\nexcept OSError: left = []\nleft")
    assert after.said == "[]\n"


def test_no_more_at_once_than_asked_and_the_rest_wait_their_turn(box: Sandbox) -> None:
    async def main() -> None:
        held = [box.session(), box.session()]
        for session in held:
            await session.run("x = 1")
        late = [box.session() for _ in range(3)]
        waits = [asyncio.create_task(s.run("x = 2; x")) for s in late]
        await asyncio.sleep(0.1)
        assert (box.sessions.alive, box.sessions.waiting, len(mine())) == (2, 3, 2) and not any(w.done() for w in waits)
        await late[1].close()
        with pytest.raises(SandboxBroken, match="this session was closed"):
            await waits[1]
        await held[0].close()
        assert (await waits[0]).said == "2\n" and (await held[1].run("x")).said == "1\n"
        await late[0].close()
        assert (await waits[2]).said == "2\n"
        for session in (*held, *late):
            await session.close()
            await session.close()
        with pytest.raises(SandboxBroken, match="this session was closed"):
            await held[0].run("x")
        await box.session().close()

    asyncio.run(main())
    assert (box.sessions.alive, box.sessions.waiting) == (0, 0)


@pytest.mark.prove
def test_one_that_is_forgotten_idle_or_cancelled_is_ended(box: Sandbox) -> None:
    async def main() -> None:
        forgotten, brief = box.session(), box.session(idle=0.2)
        await forgotten.run("1")
        await brief.run("1")
        del forgotten
        gc.collect()
        await until(lambda: box.sessions.alive == 0)
        with pytest.raises(SandboxBroken, match="nothing was asked of it for 0.2 s"):
            await brief.run("1")
        session = box.session()
        running = asyncio.create_task(session.run("while True: pass"))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await session.close()
        assert time.monotonic() - start < 5 and box.sessions.alive == 0

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def lose() -> None:
    """End the sandboxes that there are; what is inside ends a moment after what is outside."""
    lost = mine()
    commands = {line.split(" ", 1)[1] for line in lost}
    inside = {line for line in living("cell.zygote") if line.split(" ", 1)[1] in commands}
    for line in lost:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    await until(lambda: not inside & set(living("cell.zygote")))


@pytest.mark.prove
def test_a_lost_sandbox_is_our_failure_and_ends_the_session(box: Sandbox) -> None:
    """Also in the middle of a piece; before there is anything to lose, another sandbox takes over."""

    async def main() -> None:
        async with box.session() as session, box.session() as other:
            await session.run("x = 1")
            await lose()
            with pytest.raises(SandboxBroken, match="the sandbox is gone|ended while a job ran"):
                await session.run("x")
            with pytest.raises(SandboxBroken, match="this session was lost"):
                await session.run("x")
            assert (await other.run("7")).said == "7\n"
        async with box.session() as warm:
            await warm.run("1")
        async with box.session() as session:
            slow = asyncio.create_task(session.run("import time; time.sleep(1); 'first'"))
            await asyncio.sleep(0.5)
            await lose()
            assert (await slow).said == "'first'\n"

    asyncio.run(main())


def test_closing_the_sandbox_ends_every_session() -> None:
    others = mine()
    box = Sandbox(backend("namespaces"), workers=1, sessions=1, limits=LIMITS)

    async def main() -> list[object]:
        first, second = box.session(), box.session()
        await first.run("1")
        asked = [asyncio.create_task(s.run("while True: pass")) for s in (first, second)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(box.close)
        with pytest.raises(SandboxBroken, match="closed"):
            await box.session().run("1")
        return list(await asyncio.gather(*asked, return_exceptions=True))

    start = time.monotonic()
    first, second = asyncio.run(main())
    assert (isinstance(first, SandboxBroken) or (isinstance(first, Ran) and first.lost)) and isinstance(
        second, SandboxBroken
    )
    assert time.monotonic() - start < 10 and mine() == others


def test_a_piece_that_is_done_when_it_is_told_to_end_has_lost_its_process(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that it is done and the end cross each other: the next piece begins anew, and is not said to crash."""
    exchange, send = LocalConversation._exchange, LocalConversation._send
    messages = list[bytes]()

    def late(self: LocalConversation, *piece: Any) -> tuple[int | None, Why | None]:
        status, stopped = exchange(self, *piece)
        if self.answered != 2:
            return status, stopped
        self._send(KILL)
        return status, "timeout"

    def sent(self: LocalConversation, message: bytes) -> None:
        messages.append(message)
        send(self, message)

    monkeypatch.setattr(LocalConversation, "_exchange", late)
    monkeypatch.setattr(LocalConversation, "_send", sent)
    _, ended, fresh = told(box, "kept = 1", "kept = 2", "kept")
    assert (ended.why, ended.lost) == ("timeout", True)
    assert messages[messages.index(KILL) + 1].startswith(GO), "a reply to REST would say that the process still lives"
    assert fresh.complaint == "NameError: name 'kept' is not defined" and not fresh.lost


def test_sessions_one_after_another_leave_nothing() -> None:
    """A hundred here and thousands in `make prove`: descriptors as before, no sandbox but the one, no file of
    another."""
    others = mine()
    with Sandbox(backend("namespaces"), workers=1, sessions=1, limits=LIMITS) as box:
        told(box, "1")
        before, pids = len(os.listdir("/proc/self/fd")), mine()
        assert len(pids) == len(others) + 1
        for i in range(100):
            (done,) = told(box, f"import os; open('f{i}', 'w').close(); os.listdir('.')")
            assert done.said == f"['f{i}']\n"
        told(box, "import os; os.abort()")
        assert len(os.listdir("/proc/self/fd")) <= before and mine() == pids and box.sessions.begun == 102
    assert mine() == others


def test_one_may_be_kept_for_ever(box: Sandbox) -> None:
    async def main() -> None:
        async with box.session(idle=float("inf")) as session:
            await session.run("x = 6")
            await asyncio.sleep(0.1)
            assert (await session.run("x")).said == "6\n"

    asyncio.run(main())


def test_what_cannot_be_asked_is_refused(box: Sandbox) -> None:
    with pytest.raises(ConfigError, match="cannot have processes"):
        box.session(limits=ProgramLimits(processes=1))
    with pytest.raises(ConfigError, match="idle=0 must be more than 0"):
        box.session(idle=0)
    with pytest.raises(ConfigError, match="sessions=0 must be 1 or more"):
        Sandbox(box.backend, sessions=0)
