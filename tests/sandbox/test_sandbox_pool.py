"""The sandbox as a service: refused where nothing contains, lost and found again, cancelled, interrupted, left
clean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from posttrain.sandbox.backends import ALLOW, Landlock, Namespaces, Start, Unconfined
from posttrain.sandbox.choose_backend import ORDER, choose, first
from posttrain.sandbox.comparison import heard, same
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import Call, ProgramLimits, SandboxBroken, SandboxUnavailableError
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker
from posttrain.sandbox.selftest import CANARY, bait, selftest
from posttrain.system.errors import ConfigError
from tests.sandbox.sandbox_parts import NAMES, backend, gone, interpreter, living, made, patched, ran


@pytest.fixture(scope="module", params=NAMES)
def pool(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend(request.param), workers=2) as sandbox:
        yield sandbox


def test_many_at_once_and_the_loop_goes_on(pool: Sandbox) -> None:
    async def main() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.005)
                beats += 1

        heart = asyncio.create_task(beat())
        done = await asyncio.gather(*(pool.run(f"print({i})") for i in range(60)))
        heart.cancel()
        assert [int(d.stdout) for d in done] == list(range(60)) and all(d.sandbox == pool.name for d in done)
        return beats

    assert asyncio.run(main()) >= 10


def test_a_call_gets_arguments_and_gives_a_value(pool: Sandbox) -> None:
    source = "class Solution:\n def f(self, x, *, k): return {'x': (x, k), 2: {1.5}}"
    done = pool.run_sync(source, call=Call("Solution.f", ([1, "ä", b"\0"],), (("k", None),)))
    assert same(heard(done.result), {"x": ([1, "ä", b"\0"], None), 2: {1.5}})


def test_a_cancelled_question_ends_its_program(pool: Sandbox) -> None:
    async def main() -> float:
        tasks = [
            asyncio.create_task(pool.run("while True: pass", limits=ProgramLimits(wall=30, cpu=30))) for _ in range(4)
        ]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        start = time.monotonic()
        assert (await pool.run("print(1)")).why == "ok"
        return time.monotonic() - start

    assert asyncio.run(main()) < 5.0


@pytest.mark.prove
def test_a_sandbox_killed_in_the_middle_is_replaced_and_the_program_run_again(pool: Sandbox) -> None:
    """H-28: the loss is ours, so the program gets another try and the others notice nothing."""

    async def main() -> None:
        await asyncio.gather(*[pool.run("print(0)") for _ in range(4)])
        before = pool.counts.lost
        slow = asyncio.create_task(pool.run("import time; time.sleep(1.0); print('slow')"))
        await asyncio.sleep(0.3)
        children = living("cell.zygote")
        assert children
        for line in children:
            status = Path(f"/proc/{line.split()[0]}/status")
            with contextlib.suppress(FileNotFoundError):  # another program's sandbox, gone meanwhile
                if f"PPid:\t{os.getpid()}\n" in status.read_text():
                    os.kill(int(line.split()[0]), signal.SIGKILL)
        assert (await slow).stdout == b"slow\n"
        assert (await pool.run("print(1)")).stdout == b"1\n"
        assert pool.counts.lost > before

    asyncio.run(main())


@dataclass(frozen=True)
class Fails:
    """A backend that works until `broken` exists."""

    inner: Namespaces | Landlock
    broken: Path
    name: str = "fails"
    processes: bool = False

    def start(self, control: int, limits: ProgramLimits) -> Start:
        if self.broken.exists():
            raise SandboxUnavailableError("the kernel feature is gone")
        return self.inner.start(control, limits)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_that_breaks_in_mid_run_is_our_failure_and_never_a_weaker_sandbox(name: str, tmp_path: Path) -> None:
    """H-32."""
    inner = backend(name)
    assert isinstance(inner, Namespaces | Landlock)
    with Sandbox(Fails(inner, tmp_path / "broken"), workers=1) as sandbox:
        assert sandbox.run_sync("print(1)").why == "ok"
        (tmp_path / "broken").touch()
        with pytest.raises(SandboxUnavailableError, match="feature is gone"):
            sandbox.run_sync("print(1)", limits=ProgramLimits(processes=1))
        assert sandbox.run_sync("print(1)").why == "ok"
    with pytest.raises(SandboxBroken, match="closed"):
        sandbox.run_sync("print(1)")


def test_whatever_goes_wrong_outside_of_a_sandbox_is_an_answer() -> None:
    class Confused(Unconfined):
        def start(self, control: int, limits: ProgramLimits) -> Start:
            raise OverflowError("too large a number")

    with Sandbox(Confused(), workers=1) as sandbox, pytest.raises(SandboxBroken, match="OverflowError: too large"):
        sandbox.run_sync("print(1)")


def test_a_job_that_cannot_be_confined_does_not_run(tmp_path: Path) -> None:
    """Our failure while locking the doors is told from the program's own, which no program can imitate."""
    backend("namespaces")
    cell = patched(
        tmp_path,
        "confine.py",
        "    if rules is not None:\n        checked",
        "    raise OSError('no lock')\n    if rules is not None:\n        checked",
    )
    worker = SandboxWorker(made("namespaces", cell))
    with pytest.raises(SandboxBroken, match="did not run: OSError: no lock"):
        worker.run(Job(b"print(1)"))
    worker.close()


VERSION = "return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(CREATE_RULESET_VERSION)))"
"""Where the inside asks for Landlock's version: tests pretend an older kernel there."""
PLANTED = [
    pytest.param(
        "namespaces",
        "confine.py",
        'prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, "seccomp", ctypes.addressof(header))',
        "del header",
        "can: fork",
        id="no seccomp",
    ),
    pytest.param(
        "namespaces",
        "syscalls.py",
        "op(EQUAL, AUDIT_ARCH_X86_64, 1, 0) + op(RETURN, KILL)",
        "b''",
        "i386",
        id="trap 6: no check of the architecture",
    ),
    pytest.param(
        "namespaces",
        "syscalls.py",
        "    return arg(0) + op(SET, NEW_NAMESPACE, 0, 1) + refuse + op(SET, CLONE_THREAD, 1, 0) + refuse + op(RETURN,"
        " ALLOW)",
        "    return op(RETURN, ALLOW)",
        "can: fork",
        id="clone without a look at its flags",
        marks=pytest.mark.prove,
    ),
    pytest.param(
        "namespaces",
        "confine.py",
        '(resource.RLIMIT_AS, limits["memory"], limits["memory"]),',
        "",
        "allocate",
        id="no limit on memory",
        marks=pytest.mark.prove,
    ),
    pytest.param(
        "landlock",
        "confine.py",
        "    for paths, access in ((read, reading)",
        "    for paths, access in (([*read, '/'], reading)",
        "read a file of the host",
        id="landlock shows everything",
    ),
    pytest.param(
        "landlock",
        "syscalls.py",
        "plain = PLAIN + (() if host_files else FILES)",
        "plain = PLAIN + FILES",
        "change a file of the host",
        id="trap 5: chmod and utime are not Landlock's",
    ),
]


@pytest.mark.parametrize(("name", "file", "old", "new", "finds"), PLANTED)
def test_a_leak_disqualifies(tmp_path: Path, name: str, file: str, old: str, new: str, finds: str) -> None:
    """The self-test notices each wall that is taken away, by what a program could do then."""
    backend(name)
    found = selftest(made(name, patched(tmp_path, file, old, new)))
    assert finds in " ".join(found), found


@dataclass(frozen=True)
class Inherits:
    """A backend whose sandboxes get the environment of this process."""

    inner: Landlock
    name: str = "inherits"
    processes: bool = False

    def start(self, control: int, limits: ProgramLimits) -> Start:
        start = self.inner.start(control, limits)
        return replace(start, environment={**os.environ, **start.environment})


def test_an_environment_that_leaks_is_found() -> None:
    inner = backend("landlock")
    assert isinstance(inner, Landlock)
    assert selftest(Inherits(inner)) == ["a program can: find the host's environment"]
    with bait() as target:
        assert CANARY.encode() in Path(f"/proc/{target.started}/environ").read_bytes()
    assert gone(target.started) and CANARY not in os.environ


def test_an_address_for_sendto_is_a_leak_where_landlock_does_not_watch_abstract_sockets(tmp_path: Path) -> None:
    backend("landlock")
    patched(tmp_path, "confine.py", VERSION, "return 5")
    found = selftest(made("landlock", patched(tmp_path, "syscalls.py", "when(SENDTO, null(4))", "allow(SENDTO)")))
    assert found == ["a program can: abstract unix socket through a socket pair"]


@pytest.mark.parametrize("version", [2, *(pytest.param(v, marks=pytest.mark.prove) for v in (1, 3, 5, 6))])
def test_older_landlock_contains_too(tmp_path: Path, version: int) -> None:
    """H-21 on older kernels: what an old Landlock does not watch, the list of calls refuses."""
    backend("landlock")
    assert selftest(made("landlock", patched(tmp_path, "confine.py", VERSION, f"return {version}"))) == []


def test_namespaces_contain_without_landlock_and_landlock_says_what_it_needs(tmp_path: Path) -> None:
    cell = patched(tmp_path, "confine.py", VERSION, "return 0")
    assert "has no Landlock (needs 5.13" in " ".join(selftest(made("landlock", cell)))
    backend("namespaces")
    assert selftest(made("namespaces", cell)) == []


def test_where_nothing_contains_it_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    """H-31."""
    order = {
        "namespaces": lambda packages, interpreter: Namespaces(packages, interpreter, bwrap="/nowhere/bwrap"),
        "landlock": lambda packages, interpreter: Landlock(packages, interpreter, cell=tmp_path / "nowhere" / "cell"),
    }
    with pytest.raises(SandboxUnavailableError) as refused:
        first(order, (), None)
    said = str(refused.value)
    assert refused.value.exit_code == ConfigError.exit_code
    for part in ("namespaces: bubblewrap is not installed (apt install bubblewrap)", "landlock: ", "Fix one of", ALLOW):
        assert part in said


def test_a_bubblewrap_that_may_not_make_namespaces_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)
    assert selftest(Namespaces((), bwrap=str(script))) == ["bwrap: No permissions to create new namespace"]


@pytest.mark.parametrize("killed", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_sandbox_killed_in_its_self_test_says_nothing_about_the_next(
    name: str, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is killed after the honest program: the next one is examined from the beginning. Three is too many."""
    run, examined = SandboxWorker.run, list[SandboxWorker]()

    def deadly(self: SandboxWorker, job: Job) -> object:
        examined.extend([self] if self not in examined else [])
        if len(examined) <= killed and self.jobs == len(examined):
            os.kill(self.pids[-1], signal.SIGKILL)
        return run(self, job)

    there = backend(name)
    monkeypatch.setattr(SandboxWorker, "run", deadly)
    wrong = selftest(there)
    assert len(wrong) == killed - 2 and all(w.startswith(f"{there.name}: ") for w in wrong)
    assert len(examined) == 3 and (wrong or examined[2].jobs > examined[1].jobs)


@pytest.mark.skipif(os.geteuid() != 0 or interpreter() is None, reason="needs root, and a Python in root's own home")
def test_a_python_that_the_unused_user_cannot_read_is_named() -> None:
    (said,) = selftest(Landlock((), sys.executable))
    assert "cannot read" in said and "use a Python that everybody can read" in said


def test_auto_is_the_first_that_withstands() -> None:
    name = next((n for n in ORDER if not selftest(ORDER[n](("numpy",), None))), None)
    if name is None:
        with pytest.raises(SandboxUnavailableError):
            choose("auto")
    else:
        assert choose("auto").name == name


def test_without_a_sandbox_only_by_two_switches_and_never_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """H-00: there is no unconfined control in these tests, and root could not start one."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv(ALLOW, "1")
    with pytest.raises(SandboxUnavailableError, match="refused for root"):
        choose("none")
    monkeypatch.setattr(os, "geteuid", lambda: 2001)
    monkeypatch.delenv(ALLOW)
    with pytest.raises(SandboxUnavailableError, match=ALLOW):
        choose("none")
    monkeypatch.setenv(ALLOW, "1")
    with pytest.warns(UserWarning, match="full rights"):
        assert isinstance(choose("none"), Unconfined)
    with pytest.raises(ConfigError, match="did you mean 'namespaces'"):
        choose("namespace")
    for limits, says in (
        ({"memory": 0}, "memory=0 must be more than 0"),
        ({"memory": 1.5e9}, "memory=1500000000.0 must be more than 0, and whole"),
        ({"processes": -1}, "processes=-1 must be a whole number of 0 or more"),
        ({"wall": float("inf")}, "wall=inf must be more than 0 and at most 1,000,000 seconds"),
        ({"cpu": float("nan")}, "cpu=nan must be more than 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            ProgramLimits(**limits)  # type: ignore[arg-type]
    for workers in (0, -1):
        with pytest.raises(ConfigError, match=f"workers={workers} must be 1 or more"):
            Sandbox(Namespaces(()), workers=workers)


def test_no_sandbox_outlives_a_killed_harness() -> None:
    """H-30."""
    sandbox = backend("namespaces")
    source = (
        "import time\nfrom posttrain.sandbox.backends import *\nfrom posttrain.sandbox.sandbox_worker import *\n"
        "w = SandboxWorker(Namespaces(()))\nprint(*w.pids, flush=True)\n"
        "w.run(Job(b'while True: pass', limits=ProgramLimits(wall=60, cpu=60)))"
    )
    harness = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert harness.stdout is not None and sandbox.name == "namespaces"
    pids = [int(x) for x in harness.stdout.readline().split()]
    time.sleep(0.2)
    harness.kill()
    harness.communicate()
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


DETACHED = """
import os, signal, sys, time
for i in range(12):
    try: pid = os.fork()
    except OSError: continue
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if i == 0: os.execv("/bin/sleep", ["sleep", "{marker}"])
        time.sleep(1000)
print("left", flush=True)
"""


def test_children_are_counted_and_none_survives_even_with_our_pipe_open() -> None:
    """H-08, H-12, H-13: allowed children are bounded in number, end with the program, and nobody waits for their
    output."""
    inner = backend("namespaces")
    marker = str(10**8 + secrets.randbelow(10**8))
    worker = SandboxWorker(inner, ProgramLimits(processes=4))
    start = time.monotonic()
    done = worker.run(Job(DETACHED.format(marker=marker).encode(), limits=ProgramLimits(processes=4, wall=20)))
    assert done.stdout.startswith(b"left\n") and time.monotonic() - start < 10
    assert living(marker) == [] and all(gone(pid) for pid in worker.pids)


def test_a_fork_bomb_is_bounded() -> None:
    """H-08, trap 1: for root too."""
    with Sandbox(backend("namespaces"), workers=1) as pool:
        bomb = (
            "import os, time\nn = 0\nfor _ in range(60):\n try:\n  pid = os.fork()\n  if pid == 0: time.sleep(60)\n  n"
            " += 1\n except OSError: pass\nprint(n)"
        )
        assert pool.run_sync("import os; os.fork()").why == "error"
        done = pool.run_sync(bomb, limits=ProgramLimits(processes=6))
        assert done.why == "ok" and 1 <= int(done.stdout) <= 8
        shell = pool.run_sync(
            "import subprocess; print(subprocess.check_output(['sh', '-c', 'echo hi']))",
            limits=ProgramLimits(processes=4),
        )
        assert shell.stdout == b"b'hi\\n'\n"


def test_the_attacks_fail_with_processes_too() -> None:
    from posttrain.sandbox.selftest import attacks

    worker = SandboxWorker(backend("namespaces"), ProgramLimits(processes=2))
    with bait() as target:
        done = worker.run(Job(attacks(target, processes=True), limits=ProgramLimits(processes=2, wall=30, cpu=20)))
    assert done.why == "ok" and not any(done.said.splitlines()[1:]), done.said


@pytest.mark.parametrize("version", [7, 2])
def test_a_program_with_processes_cannot_end_the_one_who_tells_on_it(tmp_path: Path, version: int) -> None:
    """Or its crash would look like ours, and cost it nothing; whether Landlock (from 6 on) or the list of calls forbids
    it."""
    backend("namespaces")
    limits = ProgramLimits(processes=3, wall=20)
    worker = SandboxWorker(made("namespaces", patched(tmp_path, "confine.py", VERSION, f"return {version}")), limits)
    source = """
import os, signal
for pid in (os.getppid(), -os.getpgid(os.getppid()), 1, -1):
    try: os.kill(pid, signal.SIGKILL); print("signalled", pid)
    except OSError: pass
child = os.fork()
if child == 0: signal.pause()
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
"""
    done = worker.run(Job(source.encode(), limits=limits))
    assert (done.why, done.stdout) == ("ok", b"15\n"), done


def test_closing_refuses_what_waits() -> None:
    pool = Sandbox(backend("namespaces"), workers=1)

    async def main() -> list[object]:
        tasks = [asyncio.create_task(pool.run("import time; time.sleep(0.3)")) for _ in range(5)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    ended = asyncio.run(main())
    assert sum(isinstance(e, SandboxBroken) for e in ended) >= 3


def test_landlock_refuses_processes() -> None:
    with pytest.raises(SandboxUnavailableError, match="only namespaces can"):
        SandboxWorker(backend("landlock"), ProgramLimits(processes=1))


def test_endless_output_does_not_grow_the_host() -> None:
    """H-14."""
    worker = SandboxWorker(backend("namespaces"))
    before = int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(5):
        done = ran(worker, "import os\nwhile True: os.write(1, b'x' * 10**7); os.write(2, b'x' * 10**7)")
        assert done.why == "output" and done.cut
    assert int(Path("/proc/self/statm").read_text().split()[1]) - before < 4096
    worker.close()


def test_limits_reach_the_program() -> None:
    worker = SandboxWorker(backend("namespaces"))
    source = (
        "import resource as r; print(r.getrlimit(r.RLIMIT_AS)[1], r.getrlimit(r.RLIMIT_FSIZE)[1],"
        " r.getrlimit(r.RLIMIT_NOFILE)[1], r.getrlimit(r.RLIMIT_CORE)[1])"
    )
    limits = replace(ProgramLimits(), memory=300 << 20, file_size=1 << 20, open_files=20)
    assert worker.run(Job(source.encode(), limits=limits)).said.split() == [str(300 << 20), str(1 << 20), "20", "0"]
    worker.close()
