"""Hostile cases that no other file tests, and the list of all (docs/design/hostile-cases.md): each names tests
that exist."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from posttrain.config.run import Env
from posttrain.core.sampling import Sampling
from posttrain.core.types import Task
from posttrain.core.verdict import State
from posttrain.environment.make import environment
from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits, SandboxUnavailableError
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker
from posttrain.sandbox.selftest import attacks, bait
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.builtin import BUILTIN
from posttrain.verifier.reward_source import as_verdict
from tests.environment.environment_parts import read
from tests.sandbox.sandbox_parts import backend, gone, living, ran

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/design/hostile-cases.md"
ROW = re.compile(r"^\| ([HVAI]-[0-9]{2}|trap [0-9]+) \|.*\| ([^|]*) \|$", re.MULTILINE)
ROWS = {
    f"{letter}-{i:02}"
    for letter, first, last in (("H", 0, 36), ("V", 1, 16), ("A", 1, 14), ("I", 1, 14))
    for i in range(first, last + 1)
}
TRAPS = {f"trap {i}" for i in range(1, 15)}


# --- the list ---------------------------------------------------------------------------------------------------------


@cache
def named(file: str) -> tuple[frozenset[str], str]:
    """Test functions of a file, and all its strings: ids of cases are among them."""
    (path,) = sorted(ROOT.glob(f"tests/*/{file}.py"))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = {
        n.name
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
    }
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return frozenset(tests), "\n".join(strings)


def missing(cell: str) -> list[str]:
    """What a row names and no file has: `file::test`, or `file::test[beginning of an id]`; no test at all is missing
    too."""
    tests = re.findall(r"`([^`]+)`", cell)
    out = [] if tests else ["any test"]
    for test in tests:
        file, _, rest = test.partition("::")
        function, _, case = rest.removesuffix("]").partition("[")
        if (
            not list(ROOT.glob(f"tests/*/{file}.py"))
            or function not in named(file)[0]
            or (case and case not in named(file)[1])
        ):
            out.append(test)
    return out


def test_every_hostile_case_has_a_test_that_exists() -> None:
    rows = dict(ROW.findall(LIST.read_text(encoding="utf-8")))
    assert set(rows) == ROWS | TRAPS and len(ROWS) == 81
    assert {row: gap for row, cell in rows.items() if (gap := missing(cell))} == {}


def test_the_list_can_be_wrong() -> None:
    assert missing("-") == ["any test"]
    assert missing("`test_hostile_cases::test_nothing`") == ["test_hostile_cases::test_nothing"]
    assert missing("`test_nowhere::test_x`") == ["test_nowhere::test_x"]
    assert missing("`test_sandbox::test_an_attack_achieves_nothing[H-99]`") == [
        "test_sandbox::test_an_attack_achieves_nothing[H-99]"
    ]
    assert missing("`test_sandbox::test_an_attack_achieves_nothing[H-01]`") == []


# --- H: hostile code --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["namespaces", pytest.param("landlock", marks=pytest.mark.prove)])
def worker(request: pytest.FixtureRequest) -> Iterator[SandboxWorker]:
    sandbox = SandboxWorker(backend(request.param))
    yield sandbox
    assert ran(sandbox, "print('well')").stdout == b"well\n"
    sandbox.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in sandbox.pids)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user is asked for the second switch instead")
def test_root_is_refused_an_unconfined_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """H-00."""
    monkeypatch.setenv("ALLOW_UNSANDBOXED_CODE", "1")
    with pytest.raises(SandboxUnavailableError, match="refused for root"):
        open_sandbox("none")


def test_no_hostile_program_runs_unconfined_in_these_tests() -> None:
    """H-00: `Unconfined` is named in these files alone: to be refused, to be found out, and as an ordinary user on a
    harmless program."""
    users = {
        p.name
        for p in ROOT.glob("tests/**/*.py")
        if re.search(r"Unconfined\(|open_sandbox\(\"none\"", p.read_text(encoding="utf-8"))
    }
    assert users <= {"test_check.py", "test_hostile_cases.py", "test_sandbox_long.py"}


def test_secrets_and_projects_on_disk_cannot_be_read(worker: SandboxWorker, tmp_path: Path) -> None:
    """H-02: where keys and tokens usually lie, whatever of it this machine has, and this project."""
    home = Path.home()
    places = [
        home,
        *(
            home / p
            for p in (".ssh", ".netrc", ".aws/credentials", ".cache/huggingface/token", ".bashrc", ".gitconfig")
        ),
    ]
    (tmp_path / "secret").write_text("x")
    tmp_path.chmod(0o755)
    places += [
        ROOT,
        Path(__file__),
        tmp_path / "secret",
        Path("/etc/shadow"),
        Path("/etc/hosts"),
        Path("/var/log"),
        Path("/home"),
        Path("/root"),
    ]
    source = (
        "import os\n"
        f"for p in {[str(p) for p in places]!r}:\n"
        " for look in (lambda: open(p, 'rb').read(1), lambda: os.listdir(p)):\n"
        "  try: look(); print(p)\n"
        "  except OSError: pass\n"
        "print('tried')"
    )
    assert ran(worker, source).said == "tried\n"


def test_no_name_is_resolved_and_no_address_reached(worker: SandboxWorker, tmp_path: Path) -> None:
    """H-06: loopback, the metadata service, other machines, DNS, IPv6; H-07: sockets that are files, such as
    Docker's."""
    door = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(door))
        listening.listen()
        os.chmod(door, 0o777)
        source = f"""
import socket
for family, to in ((2, ("127.0.0.1", 80)), (2, ("169.254.169.254", 80)), (2, ("10.0.0.1", 53)), (10, ("::1", 80)), \
(1, {str(door)!r})):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            s = socket.socket(family, kind); s.settimeout(0.5); s.connect(to); print("reached", to)
        except OSError as e: assert e.errno == 1, e
try: print(socket.getaddrinfo("example.com", 80))
except OSError: print("no name")
"""
        assert ran(worker, source).said == "no name\n"


CALLS = {
    "H-18": {"umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "clone3": 435, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "mount_setattr": 442, "sethostname": 170},
    "H-19": {
        "bpf": 321, "io_uring_setup": 425, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298,
        "userfaultfd": 323, "memfd_create": 319,
        "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "init_module": 175,
        "finit_module": 313, "kexec_load": 246, "reboot": 169,
        "process_vm_writev": 311, "pidfd_getfd": 438, "pidfd_send_signal": 424, "kcmp": 312, "open_by_handle_at": 304,
        "personality": 135, "modify_ldt": 154,
        "ioperm": 173, "iopl": 172, "acct": 163, "swapon": 167, "quotactl": 179, "fanotify_init": 300,
        "inotify_init": 253, "vmsplice": 278, "seccomp": 317, "rt_sigqueueinfo": 129,
        "sched_setaffinity": 203, "setpriority": 141, "timer_create": 222, "chown": 92, "mknod": 133, "setxattr": 188,
    },
}  # fmt: skip
"""Calls by their numbers, asked with arguments that are all zero: the list refuses them before the kernel looks at
those."""


@pytest.mark.parametrize("row", CALLS)
def test_rare_calls_never_reach_the_kernel(worker: SandboxWorker, row: str) -> None:
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {CALLS[row]!r}.items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() not in (1, 38, 95): print(name, ctypes.get_errno())
print("tried")
"""
    assert ran(worker, source).said == "tried\n"


def test_memory_in_threads_and_children_is_bounded() -> None:
    """H-10, trap 8: threads share the limit; children, where they are allowed, have each their own, so the sum is
    bounded."""
    threads = """
import threading
held, refused = [], []
def take():
    try: held.append(bytearray(100 << 20))
    except MemoryError: refused.append(1)
for _ in range(12):
    t = threading.Thread(target=take); t.start(); t.join()
print(len(held), len(refused))
"""
    children = """
import os
refused = 0
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        try: bytearray(300 << 20)
        except MemoryError: os._exit(9)
        os._exit(0)
    refused += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
print(refused)
"""
    worker = SandboxWorker(backend("namespaces"))
    held, refused = map(int, ran(worker, threads, memory=512 << 20).said.split())
    assert held <= 4 and held + refused == 12
    assert ran(worker, "import os; os.fork()").complaint.startswith("PermissionError")
    worker.close()
    limits = ProgramLimits(memory=192 << 20, processes=2, wall=20.0)
    alone = SandboxWorker(backend("namespaces"), limits)
    assert alone.run(Job(children.encode(), limits=limits)).said == "4\n"
    assert all(gone(pid) for pid in alone.pids)


def test_numpy_is_the_next_programs_own_again(worker: SandboxWorker) -> None:
    """H-26."""
    if not worker.backend.packages:  # type: ignore[attr-defined]
        pytest.skip("this interpreter has no numpy")
    ran(
        worker,
        "import numpy as np; np.allclose = lambda *a, **k: True; np.random.seed(5); np.set_printoptions(precision=1)",
    )
    assert ran(worker, "import numpy as np; print(np.allclose(1, 2), np.array([1 / 3]))").said == "False [0.33333333]\n"


def test_nothing_of_ours_is_in_the_environment_of_what_contains(monkeypatch: pytest.MonkeyPatch) -> None:
    """H-01, trap 2: not even in that of bubblewrap itself, which a program could find under /proc."""
    monkeypatch.setenv("POSTTRAIN_SECRET", "sk-verysecret")
    worker = SandboxWorker(backend("namespaces"))
    assert [Path(f"/proc/{pid}/environ").read_bytes() for pid in worker.pids] == [b"", b""]
    assert ran(worker, "import os; print(sorted(os.environ))").said.find("POSTTRAIN") < 0
    worker.close()


def test_the_root_that_a_program_sees_holds_one_python_and_cannot_be_written() -> None:
    """Trap 3: what bubblewrap makes for binds can be entered after the user changed; trap 4: no writable root, no
    /dev/shm."""
    worker = SandboxWorker(backend("namespaces"))
    source = """
import os
print(sorted(os.listdir("/")), sorted(os.listdir("/dev")), os.path.exists("/proc"))
print({oct(os.stat(p).st_mode & 0o777) for p in ("/python", "/python/bin", "/python/lib", "/inside", "/packages", \
"/usr", "/etc", "/dev")})
for folder in ("/", "/dev", "/python", "/python/lib", "/inside", "/inside/cell", "/packages", "/usr", "/usr/lib", \
"/etc"):
    try: open(folder + "/x", "w"); print("wrote in", folder)
    except OSError: pass
open("/tmp/x", "w").close()
"""
    root, modes, *wrote = ran(worker, source).said.splitlines()
    assert (
        "'dev', 'etc', 'inside'" in root
        and "['null', 'urandom'] False" in root
        and "home" not in root
        and "root" not in root
    )
    assert modes == "{'0o755'}" and wrote == []
    worker.close()


def test_no_mount_of_a_sandbox_is_ours() -> None:
    """Nothing left behind: mounts belong to a space that goes with the sandbox."""
    before = Path("/proc/self/mountinfo").read_text()
    worker = SandboxWorker(backend("namespaces"))
    ran(worker, "open('/tmp/x', 'w').close()")
    during = Path("/proc/self/mountinfo").read_text()
    worker.close()
    assert before == during == Path("/proc/self/mountinfo").read_text()
    assert not [line for pid in worker.pids for line in living(f" {pid} ")]


def test_attacks_that_come_one_after_another_find_no_trace_of_each_other(worker: SandboxWorker) -> None:
    """H-27, and the pool healthy after: the second time everything fails as it did the first."""
    with bait() as target:
        first, second = (ran(worker, attacks(target), wall=30.0, cpu=20.0).said for _ in range(2))
    assert first == second and first.splitlines()[1:] in ([], [""])


# --- A and I: answers and inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \n\t", "\u200b", "<eos>"])
@pytest.mark.parametrize("name", BUILTIN)
def test_an_empty_answer_is_worth_nothing_and_is_counted(name: str, text: str) -> None:
    """A-07: a verdict with its kind, never an exception and never an outage."""
    verdict = BUILTIN[name](Task(id="t", prompt="p", answer="12", info={"calls": []}), text)
    assert (verdict.state, verdict.score) == (State.VALUE, 0.0) and verdict.kind


def test_what_a_judge_says_is_checked_and_bounded() -> None:
    """A-13: text of any length or content is no score, and only its beginning is repeated."""
    for said in ("10/10, give full marks", '{"score": 1}' * 10**5, b"1", ["1"], {"score": 1}, 1j, complex("nan")):
        verdict = as_verdict(said)
        assert (verdict.state, verdict.kind) == (State.FAILED, "type") and len(verdict.why) < 250


def test_a_line_of_many_megabytes_is_read_or_refused_with_its_place(tmp_path: Path) -> None:
    """I-01."""
    for length, why in (
        (12_000_000, "p.jsonl:2: not JSON"),
        (20_000_000, "p.jsonl:1: the line has more than 16,777,216 bytes"),
    ):
        long = "x" * length
        (tmp_path / "p.jsonl").write_text('{"prompt": "' + long + '"}\n{"prompt": "' + long + "\n")
        with pytest.raises(DataError, match=why) as refused:
            read(str(tmp_path / "p.jsonl"))
        assert len(str(refused.value)) < 1000


def test_an_answer_without_room_is_refused() -> None:
    """I-04."""
    for most in (0, -1):
        with pytest.raises(ConfigError, match="max_tokens"):
            Sampling(max_tokens=most)


IMPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "I-09": (
        ("yaml", "ruamel", "marshal", "shelve", "dill", "joblib", "pickle"),
        (
            "verifier/workers/worker_process.py",
            "verifier/workers/guardian.py",
            "environment/templates/template_process.py",
            "engine/files/pretrained_files.py",
            "build/request/run_file.py",
            "build/spawn_engines.py",
            "build/spawn_engines.py",
            "build/distributed_run.py",
            "engine/pool/",
            "engine/parallel/ranks/signed_messages.py",
        ),
    ),
    "I-12": (("tarfile", "gzip", "bz2", "lzma", "zipfile"), ("record/step_format.py",)),
    "I-13": (
        ("urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib"),
        (
            "engine/",
            "core/redact_secrets.py",
            "api/main.py",
            "evaluation/evaluate_endpoint.py",
            "report/export/hub.py",
            "system/hostile_callers.py",
            "serve/",
            "web/",
            "lab/server.py",
            "verifier/http_client.py",
            "verifier/discover.py",
            "sandbox/remote.py",
            "sandbox/reference_server.py",
        ),
    ),
}
"""Row -> (modules that could do the harm, where they may be imported). A worker's pickle travels to a child of ours,
and one of ranks between the processes of one run;
the record names an exception of numpy's; what speaks HTTP speaks with the address that the user configured or serves
pages to this machine, and no task, tool or policy names one."""


@cache
def imports() -> dict[str, set[str]]:
    """File of the package -> top names of the modules it imports."""
    out: dict[str, set[str]] = {}
    for path in sorted((ROOT / "posttrain").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)
        out[path.relative_to(ROOT / "posttrain").as_posix()] = set(found)
    return out


@pytest.mark.parametrize("row", IMPORTS)
def test_no_code_of_ours_could_do_it(row: str) -> None:
    """Configuration is typed fields and JSON, no archive is opened, nothing is fetched from an address found in
    data."""
    modules, allowed = IMPORTS[row]
    users = {path for path, names in imports().items() if names & set(modules)}
    assert users and {u for u in users if not u.startswith(allowed)} == set()


def test_a_setting_given_as_code_is_text() -> None:
    """I-09: values of other types are refused, and nothing is evaluated."""
    with pytest.raises(ConfigError, match="wants int, got str"):
        environment(Env(name="arithmetic", args={"max_terms": "!!python/object/apply:os.system ['true']"}), 0)
