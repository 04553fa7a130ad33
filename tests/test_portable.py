"""What runs on any Linux and on macOS, as far as a Linux can check it: calls that only Linux has stand where they are
guarded, and the first recipe runs in a process from which they were removed, without a compiler and without bubblewrap.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "posttrain").rglob("*.py"))

LINUX = {
    "os": (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "getrandom", "splice"),
        *("copy_file_range", "posix_fadvise", "posix_fallocate", "pipe2", "setns", "unshare", "setresuid", "setresgid"),
        *("getxattr", "setxattr", "O_PATH", "O_TMPFILE", "O_DIRECT", "O_NOATIME", "P_PIDFD", "sync_file_range"),
    ),
    "signal": ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    "time": ("pthread_getcpuclockid", "CLOCK_BOOTTIME"),
    "resource": ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING", "RLIMIT_RTPRIO"),
    "socket": ("SOCK_CLOEXEC", "SOCK_SEQPACKET", "SO_PEERCRED", "TCP_USER_TIMEOUT"),
    "select": ("epoll",),
    "fcntl": ("F_ADD_SEALS", "F_SETPIPE_SZ", "F_OFD_SETLK", "F_OFD_SETLKW"),
}
"""By module: names that macOS does not have."""
PLACES = re.compile(r"^/(proc|sys|dev/shm)(/|$)")

GUARDED = {
    "posttrain/sandbox/": "for Linux; sandbox/choose_backend.py refuses elsewhere before anything of it runs",
    "posttrain/system/child_lifetime.py": "calls prctl on Linux alone",
    "posttrain/system/machine.py": "asks hasattr first, and reads /proc and /sys where they are",
    "posttrain/environment/tools/fair_queue.py": "asks hasattr first",
    "posttrain/engine/vllm/start_vllm.py": "takes /dev/shm where there is one",
    "posttrain/role/memory_peaks.py": "reads /proc where it may, and asks getrusage elsewhere",
    "posttrain/verifier/workers/guardian.py": "calls prctl on Linux, and watches its parent elsewhere",
    "posttrain/build/spawn_engines.py": "asks hasattr first, and core.placement refuses cores where none can be pinned",
    "posttrain/engine/parallel/ranks/rank_processes.py": "reads /proc where it is; else no state is told",
    "posttrain/engine/transfer/shared_memory.py": "lists the blocks where the system can, and names the folder",
    "posttrain/engine/pool/engine_process.py": "pins where cores are asked for; core.placement refuses them elsewhere",
    "posttrain/engine/pool/worker_side.py": "reads /proc where it is; else the memory is not told",
    "posttrain/engine/vllm/launch.py": "calls prctl on Linux alone",
}


def only_linux(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each name, path or call in a file that macOS does not have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in LINUX.get(node.value.id, ()):
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in LINUX:
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names if a.name in LINUX[node.module])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACES.match(node.value):
            yield node.lineno, node.value
        if isinstance(node, ast.Attribute) and node.attr == "prctl":
            yield node.lineno, "prctl"


def found(path: Path) -> list[str]:
    name = str(path.relative_to(ROOT))
    return [f"{name}:{line} {what}" for line, what in only_linux(ast.parse(path.read_text()))]


def test_what_only_linux_has_is_guarded() -> None:
    """And every guarded place still has such a call."""
    calls = [call for path in FILES for call in found(path)]
    assert not (open_ := [c for c in calls if not c.startswith(tuple(GUARDED))]), f"say in GUARDED why: {open_}"
    assert not (gone := [name for name in GUARDED if not any(c.startswith(name) for c in calls)]), gone


def test_the_search_finds_each_form() -> None:
    code = "os.sched_getaffinity(0)\nfrom signal import sigtimedwait\nopen('/proc/self/maps')\nlibc.prctl(1)\n"
    assert sorted(line for line, _ in only_linux(ast.parse(code))) == [1, 2, 3, 4]


def test_no_two_files_differ_by_case_alone() -> None:
    """On a file system that does not tell them apart one would overwrite the other."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = [n for n in listed.stdout.split("\0") if n] or [str(p.relative_to(ROOT)) for p in FILES]
    assert len({n.casefold() for n in names}) == len(names)


# --- a process without them -------------------------------------------------------------------------------------------

ELSEWHERE = f"""
import os, signal, time, resource, socket, select, fcntl, sys
import asyncio, subprocess, torch, numpy, multiprocessing, tempfile, rich.console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM
for module, names in {LINUX!r}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
sys.platform = "darwin"
from posttrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


def elsewhere(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line as on a system that is no Linux, with an empty PATH: no compiler, no bubblewrap."""
    empty = folder / "nothing"
    empty.mkdir(exist_ok=True)
    environ = {
        **{k: v for k, v in os.environ.items() if k != "CC"},
        "PATH": str(empty),
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *words], cwd=folder, env=environ, capture_output=True, text=True
    )


TOY = ("env.heldout=4", "evaluation.samples=1", *(f"{s}.steps=2" for s in ("pretrain", "sft", "cot", "dpo", "rl")))
SMALL = (
    *(f"{s}.batch=4" for s in ("pretrain", "sft", "cot", "dpo")),
    "rl.prompts=2",
    "rl.siblings=2",
    "sft_continued=none",
)


@pytest.mark.prove
def test_the_first_recipe_runs_elsewhere(tmp_path: Path) -> None:
    done = elsewhere(tmp_path, "run", "ladder", *TOY, *SMALL, "threads=0", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next:" in done.stdout and "no C compiler" in done.stdout + done.stderr
    shown = elsewhere(tmp_path, "show", "run")
    assert shown.returncode == 0 and "episode" in shown.stdout, shown.stderr


@pytest.mark.prove
def test_workers_of_a_users_reward_run_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(task, text):\n    return float(task.answer == text)\n")
    words = ("env.rewards=mine.py:reward", "env.heldout=4", "evaluation.samples=1", "rl.steps=1", "rl.prompts=2")
    done = elsewhere(tmp_path, "run", "grpo", *words, "rl.siblings=2", "rl.sampling.max_tokens=4", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prove
def test_a_sandbox_is_refused_elsewhere_with_what_still_works(tmp_path: Path) -> None:
    done = elsewhere(tmp_path, "run", "programs", "--out", "run")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "Only Linux has these" in done.stderr and "sandbox=https://HOST" in done.stderr
