"""Hostile programs in a real sandbox: contained, called by the right name, and the sandbox good for the next one.

Case numbers are those of the list of hostile cases the sandbox was designed against (H: hostile code).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.sandbox import probes
from posttrain.sandbox.sandbox_types import Ran
from posttrain.sandbox.sandbox_worker import SandboxWorker
from posttrain.sandbox.selftest import attacks, bait
from tests.sandbox.sandbox_parts import backend, ran


@pytest.fixture(scope="module", params=["namespaces", pytest.param("landlock", marks=pytest.mark.prove)])
def worker(request: pytest.FixtureRequest) -> Iterator[SandboxWorker]:
    sandbox = SandboxWorker(backend(request.param))
    yield sandbox
    sandbox.close()
    ended = time.monotonic() + 5  # one that outlived its parent is reaped by process 1, when that gets to it
    while any(Path(f"/proc/{pid}").exists() for pid in sandbox.pids):
        assert time.monotonic() < ended, "a process of the sandbox is still there"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def got_out(worker: SandboxWorker) -> list[str]:
    """What the attacks of the self-test achieved."""
    with bait() as target:
        done = ran(worker, attacks(target), wall=30.0, cpu=20.0)
    assert done.why == "ok", done
    assert done.said.splitlines()[0].startswith("tried ")
    return done.said.splitlines()[1:]


ATTACKS = [
    ("H-01", "find the host's environment"),
    ("H-02", "read a file of the host"),
    ("H-02b", "read /etc/passwd"),
    ("H-03", "write beside the canary"),
    ("H-03b", "write to the system"),
    ("H-05", "walk /proc"),
    ("H-06", "TCP to loopback"),
    ("H-06b", "UDP"),
    ("H-07", "abstract unix socket"),
    ("H-07b", "abstract unix socket through a socket pair"),
    ("H-08", "fork"),
    ("H-08b", "vfork and exec"),
    ("H-08c", "exec"),
    ("H-16", "signal another process"),
    ("H-16b", "tgkill"),
    ("H-16c", "open a pidfd"),
    ("H-17", "ptrace"),
    ("H-17b", "read another process's memory"),
    ("H-18", "new user namespace"),
    ("H-18b", "mount"),
    ("H-18c", "chroot"),
    ("H-18d", "join a namespace"),
    ("H-19", "bpf, io_uring, keyctl, perf, userfaultfd, memfd, SysV shm"),
    ("H-21", "change a file of the host"),
    ("H-22", "raise a limit"),
    ("H-33", "keep a descriptor of the host"),
    ("trap-1", "be root or hold a capability"),
]


@pytest.mark.parametrize("attack", [pytest.param(a, id=i) for i, a in ATTACKS])
def test_an_attack_achieves_nothing(got_out: list[str], attack: str) -> None:
    assert attack in probes.ATTACKS + probes.NO_PROCESSES, "the attack was renamed"
    assert attack not in got_out


def test_every_attack_is_in_the_table() -> None:
    tried = (probes.ATTACKS + probes.NO_PROCESSES).count('@attack("')
    assert tried == len(ATTACKS)


ENDS: list[tuple[str, str, str]] = [
    ("H-10 one large allocation", "x = bytearray(1 << 30)", "memory"),
    ("H-10 many small ones", "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    ("H-11 loop", "while True: pass", "timeout"),
    ("H-11 sleep", "import time; time.sleep(1000)", "timeout"),
    ("H-11 regular expression", "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", "timeout"),
    ("H-11 power", "x = 9**9**9", "timeout"),
    ("H-11 catches everything", "while True:\n try:\n  while True: pass\n except BaseException: pass", "timeout"),
    ("H-14 stdout", "while True: print('x' * 1000)", "output"),
    ("H-14 stderr", "import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    ("H-14 both", "import sys\nwhile True: print('x' * 1000); sys.stderr.write('y' * 1000)", "output"),
    ("H-14 one write", "import os\nwhile True: os.write(1, b'x' * 10**8)", "output"),
    ("H-15 reads for ever", "import sys\nwhile sys.stdin.read(1): pass\nprint('end')", "ok"),
    ("H-20 i386", probes.OTHER_ARCHITECTURE, "crashed"),
    ("H-20 x32", probes.X32, "crashed"),
    ("H-23 segmentation fault", "import ctypes; ctypes.string_at(0)", "crashed"),
    ("H-23 abort", "import os; os.abort()", "crashed"),
    ("H-23 kills itself", "import os; os.kill(os.getpid(), 9)", "crashed"),
    (
        "H-23 stack",
        "import sys; sys.setrecursionlimit(10**9)\nclass A:\n def __repr__(self): return repr(self)\nrepr(A())",
        "crashed|memory|error",
    ),
    ("H-24 stops itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    ("H-24 closes its files", "import os; os.closerange(0, 99)\nwhile True: pass", "timeout"),
    (
        "H-24 blocks signals",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "timeout",
    ),
    (
        "H-24 ignores the cpu limit",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    (
        "H-25 writes to every descriptor",
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'{\"ran\":true}')\n except OSError: pass",
        "ok",
    ),
    ("H-34 NUL", "x = 1\0", "error"),
    ("H-34 byte order mark", "\ufeffprint('end')", "ok"),
    ("H-34 lone surrogate", "x = '\ud800'", "error"),
    ("H-36 parentheses", "(" * 100_000 + ")" * 100_000, "error|memory|crashed"),
    ("H-36 minus signs", "-" * 300_000 + "1", "error|memory|crashed"),
    ("H-36 attribute chain", "x" + ".a" * 100_000, "error|memory|crashed"),
    ("H-36 huge literal", "x = " + "9" * 100_000, "error"),
    ("exception", "1/0", "error"),
    ("exit status", "import sys; sys.exit(3)", "error"),
    ("raises SystemExit with text", "raise SystemExit('no')", "error"),
    ("ends well", "print('end')", "ok"),
    ("ends early and well", "import os; os._exit(0)", "ok"),
]


@pytest.mark.parametrize(("source", "why"), [pytest.param(s, w, id=i) for i, s, w in ENDS])
def test_how_a_program_ends_and_that_the_next_one_is_well(worker: SandboxWorker, source: str, why: str) -> None:
    slow = "timeout" in why
    start = time.monotonic()
    done = ran(worker, source, wall=0.25 if slow else 20.0, cpu=20.0)
    assert done.why in why.split("|"), done
    assert len(done.stdout) <= 65536 and len(done.stderr) <= 65536
    if slow:
        assert time.monotonic() - start < 0.25 + 2.0
    assert ran(worker, "print('well')").stdout == b"well\n"


def test_bad_bytes_and_ten_megabytes_of_source(worker: SandboxWorker) -> None:
    assert ran(worker, b"x = '\xff\xfe'").why == "error"
    assert ran(worker, b"# " + b"x" * 10_000_000 + b"\nprint('end')", wall=30.0).said == "end\n"


@pytest.mark.prove
def test_the_cpu_limit_alone_ends_a_program(worker: SandboxWorker) -> None:
    done = ran(worker, "while True: pass", wall=60.0, cpu=1.0)
    assert done.why == "timeout" and done.exit == -signal.SIGXCPU and done.seconds < 30


def test_threads_are_limited_and_end_with_the_program(worker: SandboxWorker) -> None:
    """H-09, and trap 10: with one malloc arena the address space holds dozens of threads, not a dozen."""
    source = """
import threading, time
started = 0
try:
    for _ in range(500):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        started += 1
except (RuntimeError, MemoryError): pass
print(started, flush=True)
"""
    done = ran(worker, source, wall=5.0)
    assert 20 <= int(done.stdout.split()[0]) < 100, done


def test_files_are_bounded_and_not_there_for_the_next(worker: SandboxWorker) -> None:
    """H-10 (a full disk), H-27, and H-04: no link to anything."""
    fill = """
import os
total = 0
try:
    for i in range(100):
        with open(f"f{i}", "wb") as f:
            for _ in range(15): total += f.write(bytes(1 << 20)); f.flush()
except OSError as e: print("stopped", e.errno)
os.makedirs("0/er", exist_ok=True); os.chmod("0", 0)
print(total >> 20)
try:
    for _ in range(3000): os.mkdir("d"); os.chdir("d")
except OSError: pass
"""
    done = ran(worker, fill, wall=30.0)
    if worker.backend.name == "landlock":
        assert done.why == "error" and b"PermissionError" in done.stderr
    else:
        assert done.stdout.startswith(b"stopped 28") and int(done.stdout.split()[2]) <= 32
    look = "import os\ntry: print(os.listdir('.'))\nexcept OSError: print([])"
    assert ran(worker, look).stdout == b"[]\n"
    for link in ("os.symlink('/etc/passwd', 'a')", "os.link('/dev/null', 'a')"):
        assert b"PermissionError" in ran(worker, f"import os; {link}").stderr


def test_files_are_bounded_in_number_where_root_could_ask_for_that(worker: SandboxWorker) -> None:
    if not worker.notes["inodes"]:
        pytest.skip("an ordinary user cannot bound the number of files; the time limit bounds it")
    done = ran(
        worker, "n = 0\ntry:\n while True: open(str(n), 'w').close(); n += 1\nexcept OSError: print(n)", wall=20.0
    )
    assert 1000 < int(done.stdout) <= 4096


def test_one_program_poisons_only_itself(worker: SandboxWorker) -> None:
    """H-26: builtins, modules and the random state are the next program's own again; trap 11: and the same each
    time."""
    poison = (
        "import builtins, json, random, os\nbuiltins.len = lambda x: 0\njson.dumps = None\nos._exit ="
        " None\nrandom.seed(5)\nprint = None"
    )
    ran(worker, poison)
    fresh = "import json, random; print(len([1, 2]), json.dumps(1), random.random())"
    first, second = ran(worker, fresh), ran(worker, fresh)
    assert first.stdout.startswith(b"2 1 ") and first.stdout == second.stdout


def test_numpy_is_there_at_no_cost_and_seeded(worker: SandboxWorker) -> None:
    if not worker.backend.packages:  # type: ignore[attr-defined]
        pytest.skip("this interpreter has no numpy")
    source = "import numpy as np; print(np.random.rand(), np.linalg.det(np.eye(2)))"
    assert ran(worker, source).stdout == ran(worker, source).stdout != b""
    assert ran(worker, "import torch").why == "error", "nothing but the packages asked for"


def test_sockets_of_every_family_are_refused_and_asyncio_still_runs(worker: SandboxWorker) -> None:
    source = (
        "import socket\nfor f in (1, 2, 10, 16, 17, 40):\n try: socket.socket(f, 1); print(f)\n except PermissionError:"
        " pass"
    )
    assert ran(worker, source).stdout == b""
    assert ran(worker, "import asyncio\nasync def f(): print('ran')\nasyncio.run(f())").stdout == b"ran\n"


def test_a_limit_cannot_be_raised_by_a_pointer_whose_low_half_is_zero(worker: SandboxWorker) -> None:
    """Trap 7: a filter that compares 32 bits takes this pointer for null."""
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
at = libc.mmap(1 << 32, 4096, 3, 0x32, -1, 0)
assert at == 1 << 32, at
(ctypes.c_uint64 * 2).from_address(at)[:] = [64, 64]
print(libc.syscall(ctypes.c_long(302), 0, 7, ctypes.c_void_p(at), None), ctypes.get_errno())
"""
    assert ran(worker, source).stdout == b"-1 1\n"


def test_tracebacks_name_no_file_of_ours(worker: SandboxWorker) -> None:
    """Trap 13."""
    done = ran(worker, "def f():\n    return 1 / 0\nf()")
    text = done.stderr.decode()
    assert (
        text.count("File") == 2 == text.count('File "<program>"')
        and "cell" not in text
        and done.complaint.startswith("ZeroDivisionError")
    )


def test_control_characters_are_kept_raw_and_shown_escaped(worker: SandboxWorker) -> None:
    """H-35."""
    done: Ran = ran(worker, "import sys; print('\\x1b[31mred\\r'); sys.stderr.write('\\x1b[2J\\u202eabc')")
    assert b"\x1b[31m" in done.stdout
    assert done.complaint == "\\x1b[2J\\u202eabc"


def test_the_environment_of_the_sandbox_itself_is_empty_of_ours(worker: SandboxWorker) -> None:
    """Trap 2: bubblewrap's own process shows what it was started with."""
    os.environ["POSTTRAIN_SECRET_CANARY"] = "x"
    try:
        fresh = SandboxWorker(worker.backend)
        # a process that gave up being dumped shows nothing to anyone but root
        with contextlib.suppress(PermissionError):
            assert b"POSTTRAIN_SECRET_CANARY" not in Path(f"/proc/{fresh.pids[0]}/environ").read_bytes()
        fresh.close()
    finally:
        del os.environ["POSTTRAIN_SECRET_CANARY"]


def test_no_zombie_is_left_by_closing_or_destroying(worker: SandboxWorker) -> None:
    """Trap 12: whoever is orphaned is left to process 1, which may not bury it."""
    for end in (SandboxWorker.close, SandboxWorker.destroy):
        sandbox = SandboxWorker(worker.backend)
        ran(sandbox, "print(1)")
        end(sandbox)
        assert [pid for pid in sandbox.pids if Path(f"/proc/{pid}").exists()] == []
