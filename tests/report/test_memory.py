"""Peak memory by role: what is measured, and where it is written and shown."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import posttrain
from posttrain.core.ports import Attempt
from posttrain.core.verdict import Verdict
from posttrain.diagnose.run_outcome import read_outcome
from posttrain.environment.single import SingleTurn
from posttrain.record import run_reader
from posttrain.report.run_summary import memory_lines
from posttrain.role.memory_peaks import PeakMemory
from posttrain.role.roles import RoleCosts
from posttrain.system import machine

MIB = 1 << 20


def touch(mebibytes: int) -> int:
    """Use that much memory for a moment."""
    return int(np.ones(mebibytes * MIB, np.uint8)[::4096].sum())


@pytest.fixture
def peak() -> PeakMemory:
    made = PeakMemory()
    if made.what != "resident":
        pytest.skip("this machine does not let a peak be set back")
    return made


def test_a_peak_is_seen_and_set_back(peak: PeakMemory) -> None:
    peak.reset()
    before = peak.read()
    touch(96)
    assert 88 * MIB < peak.read() - before < 128 * MIB
    peak.reset()
    assert peak.read() - before < 48 * MIB


def test_without_a_peak_of_its_own_the_process_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("posttrain.role.memory_peaks.CLEAR", tmp_path / "missing" / "clear_refs")
    made = PeakMemory()
    made.reset()
    assert made.what == "resident, since the process began" and made.read() > 50 * MIB


def test_roles_within_roles(peak: PeakMemory) -> None:
    costs = RoleCosts(peak=peak)
    with costs.of("light"):
        pass
    with costs.of("outer"):
        with costs.of("inner"):
            touch(96)
        with costs.of("after"):
            pass
    light, outer, inner, after = (costs.memory[n] for n in ("light", "outer", "inner", "after"))
    assert outer >= inner > light + 80 * MIB and after < inner - 60 * MIB
    assert costs.take_memory()["outer"] == outer and not costs.memory and costs.most["outer"] == outer


@pytest.mark.prove
def test_every_line_of_the_record_has_the_peaks_of_its_roles(tmp_path: Path) -> None:
    words = ("sft.steps=2", "rl.steps=2", "rl.prompts=2", "rl.siblings=2", "rl.eval_every=1", "env.heldout=2")
    posttrain.run("arithmetic", *words, "evaluation.samples=1", out=tmp_path / "run", quiet=True)
    steps = run_reader.steps(tmp_path / "run")
    roles = [set(s.memory) for s in steps if s.stage == "rl"]
    assert {"rollout", "score", "learn", "sync", "evaluate"} <= roles[0] and {"rollout", "learn"} <= roles[1]
    assert all(m > 50 * MIB for s in steps for m in s.memory.values())
    (title, *lines) = memory_lines(read_outcome(tmp_path / "run"))
    assert title.startswith("peak MiB by role (resident") and len(lines) >= 2 and "learn" in lines[0]


class Ring:
    """It refers to itself, so that only the collector of cycles frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.prove
def test_the_steps_of_a_stage_leave_older_objects_out_and_keep_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, frozen, limits = SingleTurn.verdict, list[int](), list[tuple[int, int]]()

    async def verdict(self: SingleTurn, attempt: Attempt) -> Verdict:
        frozen.append(gc.get_freeze_count())
        limits.extend(machine._LIMITS[-1:])
        return await plain(self, attempt)

    monkeypatch.setattr(SingleTurn, "verdict", verdict)
    words = ("sft.steps=1", "rl.steps=1", "rl.prompts=2", "rl.siblings=2", "env.heldout=2", "evaluation.samples=1")
    posttrain.run("arithmetic", *words, out=tmp_path / "run", quiet=True)
    assert max(frozen) > 1000 and gc.get_freeze_count() == 0
    if platform.libc_ver()[0] == "glibc" and not set(machine.THRESHOLDS) & set(os.environ):
        assert (machine.OFTEN_FREED, machine.NEVER) in limits
    assert not machine._LIMITS


@pytest.mark.prove
def test_cycles_made_during_steps_are_collected_and_older_objects_are_not_looked_at() -> None:
    old = weakref.ref(Ring())
    lasting = Ring()
    with pytest.raises(RuntimeError), machine.frozen_objects():
        assert old() is None and gc.get_freeze_count() > 1000, "what was garbage before is gone"
        new = weakref.ref(Ring())
        assert new() is not None
        gc.collect()
        assert new() is None
        assert not any(x is lasting for x in gc.get_objects())
        raise RuntimeError
    assert gc.get_freeze_count() == 0 and any(x is lasting for x in gc.get_objects())
    last = weakref.ref(lasting)
    del lasting
    gc.collect()
    assert last() is None


MEASURES = """
import ctypes, resource, sys
from contextlib import nullcontext
from pathlib import Path
from posttrain.system.machine import freed_at_once, kept_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
"""
FREES = """
def blocks():  # 40 of 4 MB, and between them smaller ones, that stay
    made = []
    for _ in range(40):
        made.append(libc.malloc(4 << 20))
        ctypes.memset(made[-1], 1, 4 << 20)
        libc.malloc(100 << 10)
    return made

libc.free(libc.malloc(30 << 20))  # from here on glibc keeps blocks of this size
before, inside = resident(), 0.0
with freed_at_once() if sys.argv[1] == "inside" else nullcontext():
    for block in blocks():
        libc.free(block)
    inside = resident() - before
print(inside)
for block in blocks():
    libc.free(block)
kept = resident() - before
with freed_at_once():
    pass
print(kept, resident() - before)
"""


KEEPS = """
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # 10 blocks of 20 MB and one of 40; returns its page faults
    before, made = faults(), [libc.malloc(n << 20) for n in [20] * 10 + [40]]
    for n, block in zip([20] * 10 + [40], made):
        ctypes.memset(block, 1, n << 20)
    for block in made:
        libc.free(block)
    return faults() - before

before = resident()
with kept_memory():
    first, again, kept = step(), step(), resident() - before
    with freed_at_once():
        step()
        freed = resident() - before
    step()
    anew = step()
print(first, again, kept, freed, anew, resident() - before)
"""
ON_GLIBC = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc alone is asked"
)


def words_to_glibc(**more: str) -> dict[str, str]:
    """This process's environment, without what its user told the C library."""
    return {k: v for k, v in os.environ.items() if k not in machine.THRESHOLDS} | more


@ON_GLIBC
def test_memory_of_one_step_is_there_for_the_next() -> None:
    """In page faults, of whatever size, and MB of a real process. The block of 40 MB of 240 is fetched anew."""
    told = subprocess.check_output([sys.executable, "-c", MEASURES + KEEPS], text=True, env=words_to_glibc())
    first, again, kept, freed, anew, after = map(float, told.split())
    assert first > 100 and again < 0.2 * first and anew < 0.2 * first, told
    assert 190 < kept < 240 and freed < 20 and after < 20, told


@ON_GLIBC
def test_the_user_s_own_words_to_the_c_library_hold() -> None:
    env = words_to_glibc(MALLOC_MMAP_THRESHOLD_=str(128 << 10))
    told = subprocess.check_output([sys.executable, "-c", MEASURES + KEEPS], text=True, env=env)
    first, again, kept, *_ = map(float, told.split())
    assert first > 100 and again > 0.9 * first and kept < 20, told


@ON_GLIBC
def test_freed_memory_goes_back_at_once() -> None:
    """In the MB of a real process: large blocks that were freed inside, and all that was kept, at the end."""
    command = [sys.executable, "-c", MEASURES + FREES]
    inside, plain = (
        [float(x) for x in subprocess.check_output([*command, word], text=True).split()] for word in ("inside", "plain")
    )
    assert inside[0] < 20 < 120 < plain[0], (inside, plain)
    for _, kept, after in (inside, plain):
        assert after < 20 < 120 < kept, (inside, plain)


def test_where_there_is_no_such_library_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    with machine.freed_at_once():
        ran = True
    assert ran


def test_files_that_were_read_take_no_memory_of_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 900 kB that are used, 800 are files, which the system forgets when a program needs memory."""
    for name, text in (("memory.max", "1000000"), ("memory.current", "900000"), ("memory.stat", "anon 100000\nfile 1")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CONTROL_GROUPS", ((str(tmp_path), "memory.max", "memory.current", "inactive_file"),))
    assert machine.free_memory() == 100_000
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 800000\n")
    assert machine.free_memory() == 900_000
    (tmp_path / "memory.max").write_text("max\n")
    assert (machine.free_memory() or 10**9) > 900_000


def test_a_threshold_that_is_no_number_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, trimmed = machine.THRESHOLDS
    monkeypatch.setenv(mapped, "128k")
    monkeypatch.setenv(trimmed, "-1")
    assert machine._usual() == (machine.OFTEN_FREED, machine.NEVER)
