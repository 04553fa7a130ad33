"""A process that was begun by `system.child_lifetime` ends with the one that began it, however that ends and whatever
it does itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.system.child_lifetime import begun, die_with

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it"),
]

LEARNER = """
import os, signal, sys, time
from posttrain.system.child_lifetime import begun
held = begun({child!r}, stdout=sys.stdout)
time.sleep(600)
"""
STOPPED = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
"""Stops itself: it reads no connection any more, and handles no signal."""
HANGS = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN);"
    " print(os.getpid(), flush=True); 10 ** 10 ** 9"
)
"""Computes one operation that takes for ever, and ignores what can be ignored."""


def state(pid: int) -> str:
    """The letter of its state; '' where it is gone. One that has ended and that nobody waits for is gone too."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in "ZX" else found


def until(pid: int, states: str, seconds: float = 20.0) -> str:
    """The state of a process as soon as it is one of these, or after the time."""
    last = time.monotonic() + seconds
    while state(pid) not in states.split(" ") and time.monotonic() < last:
        time.sleep(0.02)
    return state(pid)


@pytest.mark.parametrize(("child", "is_in"), [(STOPPED, "T"), (HANGS, "R")], ids=["stopped", "hangs"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_stopped_or_hangs_ends_with_a_parent_that_is_killed(
    child: str, is_in: str, how: signal.Signals
) -> None:
    learner = subprocess.Popen([sys.executable, "-c", LEARNER.format(child=child)], stdout=subprocess.PIPE)
    assert learner.stdout is not None
    pid = int(learner.stdout.readline())
    try:
        assert until(pid, is_in) == is_in
        learner.send_signal(how)
        learner.wait(20)
        assert until(pid, "") == "", f"process {pid} outlives the one that began it"
    finally:
        learner.stdout.close()
        if state(pid):
            os.kill(pid, signal.SIGKILL)


def test_it_outlives_the_thread_in_which_it_was_asked_for() -> None:
    """The kernel takes the thread that starts a process for its parent. A run may be begun in a thread that ends."""
    held = list[subprocess.Popen[bytes]]()
    child = "import sys, time; print('here', flush=True); time.sleep(600)"

    def begins() -> None:
        held.append(begun(child, stdout=subprocess.PIPE))
        assert held[0].stdout is not None and held[0].stdout.readline() == b"here\n"

    thread = threading.Thread(target=begins)
    thread.start()
    thread.join()
    process = held[0]
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_one_whose_parent_is_gone_already_ends_at_once() -> None:
    """The kernel was asked too late: nobody is left whose end it could tell."""
    code = "from posttrain.system.child_lifetime import die_with; import os; die_with(os.getppid() + 1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")
    code = "from posttrain.system.child_lifetime import die_with; import os; die_with(os.getppid()); print('lives')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stdout == b"lives\n"


ELSEWHERE = (
    "import os, sys, time; sys.platform = 'darwin'; from posttrain.system.child_lifetime import die_with;"
    " die_with(os.getppid()); print(os.getpid(), flush=True); time.sleep(600)"
)
"""Where the kernel is not asked."""
STARTS = "import subprocess, sys, time; held = subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"


def test_where_the_kernel_does_not_tell_a_process_looks_itself() -> None:
    """And says whom it missed."""
    command = [sys.executable, "-c", STARTS.format(child=ELSEWHERE)]
    learner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert learner.stdout is not None and learner.stderr is not None
    pid = int(learner.stdout.readline())
    try:
        time.sleep(1.2)
        assert state(pid), "it lives as long as its parent does"
        learner.kill()
        assert until(pid, "", 10.0) == "", f"process {pid} outlives the one that began it"
        assert f"the process that started process {pid} (it was process {learner.pid}) is gone" in learner.stderr.read()
    finally:
        if state(pid):
            os.kill(pid, signal.SIGKILL)
        learner.communicate()


def test_a_program_that_cannot_be_started_says_so() -> None:
    with pytest.raises(FileNotFoundError):
        begun("pass", cwd="/there/is/no/such/folder")
    assert begun("pass").wait(60) == 0, "and the next one starts"
    assert die_with.__module__ == "posttrain.system.child_lifetime"
