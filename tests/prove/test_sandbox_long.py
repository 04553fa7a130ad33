"""The sandbox for a long time, and as an ordinary user when the tests run as root: nothing is left, nothing grows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from posttrain.sandbox.sandbox_pool import RECYCLE, Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits
from tests.sandbox.sandbox_parts import NAMES, backend, living

pytestmark = pytest.mark.prove

JOBS = 10_000
ROOT = Path(__file__).parents[2]


def resident() -> int:
    """Pages of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_thousands_of_programs_leave_nothing() -> None:
    """H-29: descriptors, children, memory and shared memory as before; sandboxes are recycled on the way."""
    inner = backend("namespaces")
    limits = ProgramLimits(wall=30.0)
    with Sandbox(inner, workers=2, limits=limits) as pool:

        async def batch(count: int) -> None:
            done = await asyncio.gather(*(pool.run("print(input())", stdin=str(i)) for i in range(count)))
            assert [int(d.stdout) for d in done] == list(range(count))

        asyncio.run(batch(500))
        descriptors, pages = len(os.listdir("/proc/self/fd")), resident()
        for _ in range(JOBS // 500 - 1):
            asyncio.run(batch(500))
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert resident() - pages < 4096
        assert pool.counts.why == {"ok": JOBS} and pool.counts.lost == 0
        assert 2 + (JOBS // RECYCLE - 2) <= pool.counts.started <= 3 + JOBS // RECYCLE
    mine = [
        line
        for line in living("cell.zygote")
        if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{line.split()[0]}/status").read_text()
    ]
    assert mine == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_sessions_leave_nothing(name: str) -> None:
    """One after another on four sandboxes, some of which crash or run out of time: descriptors, memory and processes as
    before."""
    ends = (
        "x * 7",
        "import os; os.abort()",
        "1 / 0",
        "open('f', 'w')",
        "import os\nwhile True: os.write(1, b'x' * 10**6)",
    )
    with Sandbox(backend(name), workers=1, sessions=4, limits=ProgramLimits(wall=30.0)) as pool:

        async def one(i: int) -> None:
            async with pool.session() as session:
                assert (await session.run(f"x = {i}")).why == "ok"
                await session.run(ends[i % len(ends)])

        async def batch(count: int) -> None:
            await asyncio.gather(*map(one, range(count)))

        asyncio.run(batch(200))
        descriptors, pages = len(os.listdir("/proc/self/fd")), resident()
        for _ in range(9):
            asyncio.run(batch(200))
        assert len(os.listdir("/proc/self/fd")) <= descriptors and resident() - pages < 4096
        assert (pool.sessions.begun, pool.sessions.alive, pool.sessions.waiting) == (2000, 0, 0)
    mine = [
        line
        for line in living("cell.zygote")
        if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{line.split()[0]}/status").read_text()
    ]
    assert mine == []


@pytest.mark.parametrize("name", NAMES)
def test_hostile_programs_beside_honest_ones(name: str) -> None:
    """What one program does shows in no other's answer."""
    hostile = (
        "while True: pass",
        "import os\nwhile True: os.write(1, b'x' * 10**6)",
        "x = bytearray(1 << 30)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.kill(os.getpid(), 19)",
        "import builtins; builtins.print = None; open('left', 'w').write('x')",
    )
    with Sandbox(backend(name), workers=2, limits=ProgramLimits(wall=1.0)) as pool:

        async def main() -> None:
            honest = [pool.run("import os\nprint(6 * 7)", limits=ProgramLimits(wall=30.0)) for _ in range(60)]
            bad = [pool.run(hostile[i % len(hostile)]) for i in range(18)]
            mixed = [x for pair in zip(honest[:18], bad, strict=True) for x in pair] + honest[18:]
            done = await asyncio.gather(*mixed)
            assert sum(d.stdout == b"42\n" and d.why == "ok" for d in done) == 60
            assert all(d.why != "ok" for d in done[1:24:12])

        asyncio.run(main())
        assert pool.counts.lost == 0


def test_all_of_it_as_an_ordinary_user(tmp_path: Path) -> None:
    """Root drops its rights inside; an ordinary user has none to drop, and goes another way, which has to hold as
    well."""
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    python = Path("/usr/bin/python3")
    if not python.exists() or not os.stat(ROOT).st_mode & 0o005:
        pytest.skip("an ordinary user can read no Python, or not this folder")
    source = """
import sys, time
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
from posttrain.sandbox.backends import *
from posttrain.sandbox.choose_backend import *
from posttrain.sandbox.sandbox_types import *
from posttrain.sandbox.selftest import selftest
print(selftest(Namespaces(())), selftest(Landlock(())))
with open_sandbox(packages=(), workers=1) as pool:
    print(pool.name, pool.run_sync("import os; print(os.getuid())").said.strip())
    bomb = '''
import os, time
n = 0
for _ in range(60):
    try:
        if os.fork() == 0: time.sleep(60)
        n += 1
    except OSError: pass
print(n)
'''
    print(pool.run_sync(bomb, limits=ProgramLimits(processes=6)).said.strip())
import os, warnings
warnings.simplefilter("ignore")
try: open_sandbox("none")
except SandboxUnavailableError as error: print(error)
os.environ["ALLOW_UNSANDBOXED_CODE"] = "1"
with open_sandbox("none", packages=(), workers=1) as pool:
    done = pool.run_sync("import os; print(os.getuid())")
    print(done.sandbox, done.said.strip(), pool.run_sync("while True: pass", limits=ProgramLimits(wall=0.5)).why)
"""
    done = subprocess.run(
        [str(python), "-c", source, str(ROOT)],
        user=2001,
        group=2001,
        extra_groups=[],
        env={"PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, inside, children, refused, unconfined = done.stdout.splitlines()
    assert "ALLOW_UNSANDBOXED_CODE=1 as well" in refused and unconfined == "none 2001 timeout"
    assert found == "[] []" and inside == "namespaces 65534" and 1 <= int(children) <= 8


def test_the_time_of_a_warm_program_is_milliseconds() -> None:
    """Not a benchmark: a bound that a cold start of Python for each program could not keep on the same machine."""
    with Sandbox(backend("namespaces"), workers=1) as pool:
        pool.run_sync("print(1)")
        start = time.perf_counter()
        for _ in range(30):
            pool.run_sync("import numpy; print(1)")
        warm = (time.perf_counter() - start) / 30
        start = time.perf_counter()
        for _ in range(5):
            pool.run_sync("import numpy; print(1)", limits=ProgramLimits(processes=1))
        assert warm < (time.perf_counter() - start) / 5 / 4
