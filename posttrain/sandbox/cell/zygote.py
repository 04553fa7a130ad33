"""The process that waits inside a sandbox, forks one confined child a job, and tells how it ended. Python is already
started and the packages are already imported there, so a job costs milliseconds.

It holds no secret and no earlier job's data. Requests and replies are JSON datagrams on one socket, which children
close before they run anything; the program, its input and its outputs are descriptors that come with the request.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from . import cells, confine, program, syscalls
from .attempts import Attempts, heard, taken, watched

KILL = b"kill"
GO, REST = b"go", b"rest"
"""To a session: run (after it, the seconds of processor time that this piece may use), and stand still until the
next."""
REHEARSAL = "import json\ndef f(x): return json.loads('[1]')[0] + x\nf(1)"
"""Run by a child that waits: a page that is touched now costs the job nothing, and a fault costs as much as hundreds of
lines."""
STEP = 0.01
"""Seconds between looks at a session's processor time, at least."""
CLEAN = b"clean"
"""Said after a job's reply, when what it left is gone: a job that leaves much makes nobody's answer late."""
DONE = b"1"
"""Byte that a child writes on a pipe of its own when it is confined, before the program begins and the pipe is closed.
A job that never wrote it failed by our fault, and no program can pretend that."""
PRELOAD = (
    "base64 bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools math"
    " operator re statistics string struct textwrap typing"
)
LAZY = {"numpy": ("numpy.random", "numpy.linalg")}
"""Modules that packages would import at first use, and so in every job again."""


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        rules, attempts = prepare(settings)
    except BaseException as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(
        json.dumps({"ready": True, "landlock": confine.landlock_version(), "inodes": settings["inodes"]}).encode()
    )
    with contextlib.suppress(ConnectionError):
        serve(control, settings, rules, attempts)


def prepare(settings: dict[str, Any]) -> tuple[int | None, Attempts | None]:
    """Import what jobs use, give up every right, and build the rule set; refuse where a promised wall is not there.
    Also the count of attempts to reach a network, where this kernel can tell of them."""
    # This package is imported already; a program that imports `program` or `cells` must not find our files.
    sys.path[:] = [p for p in sys.path if p != settings["home"]]
    if settings["package_path"]:
        sys.path.append(settings["package_path"])
    for name in (*PRELOAD.split(), *(m for p in settings["packages"] for m in (p, *LAZY.get(p, ())))):
        importlib.import_module(name)
    if "numpy.random" in sys.modules:
        # here, once: nothing here draws from it, and in a job it would cost three quarters of a millisecond
        sys.modules["numpy.random"].seed(0)
    # Without `site` these two are missing, and ordinary programs call them.
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))
    os.environ.pop("PYTHONPATH", None)
    scratch, mode = settings["scratch"], settings["mode"]
    # Before `drop`: mounting needs a capability.
    settings["inodes"] = bool(scratch) and confine.bound_files(
        scratch, settings["scratch_bytes"], settings["scratch_files"]
    )
    if mode == "none":
        return None, None
    # The order is fixed: the kernel forgets the parent-death signal when a process changes its user, and
    # accepts a filter (`Attempts`) from an ordinary process only after no_new_privs.
    confine.drop(settings["uid"])
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
    # In namespaces the tree of mounts contains the program already, and Landlock is a second wall. Alone it is
    # the only one.
    if confine.landlock_version() == 0:
        if mode == "landlock":
            raise OSError(f"kernel {os.uname().release} has no Landlock (needs 5.13 or later, and lsm=landlock)")
        rules = None
    else:
        write = [scratch, "/dev/null"] if scratch else []
        rules = confine.ruleset(settings["readable"], write, run=settings["processes"] > 0)
    attempts = None
    with contextlib.suppress(OSError):
        attempts = Attempts(confine.libc)
    settings["told"] = attempts is not None
    # Only to fill its cache, which every child inherits.
    syscalls.template(mode == "landlock", settings["processes"] > 0, settings["told"])
    return rules, attempts


def serve(control: socket.socket, settings: dict[str, Any], rules: int | None, attempts: Attempts | None) -> None:
    """Jobs one after the other until the other end closes. The child for the next one is made while the one before
    runs, unless that one is waiting already: then every core is busy, and what is made ahead and rehearsed costs more
    than it saves."""
    early = settings["processes"] == 0
    spare = hatch(control, settings, rules) if early else None
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 65536, 8)
            if not data:
                return
            if data == REST or data.startswith((KILL, GO)):
                continue  # the job it meant had already ended
            request = json.loads(data)
            # A pipe for `DONE`. The descriptors of a job belong to its child alone: ours are closed below, and
            # only then the next spare child is forked. A writing end that it held would keep the pipes open,
            # and whoever reads them to their end would wait.
            confined, locked = os.pipe()
            start = time.monotonic()
            pid, spare = give(spare, data, [*fds, locked]), None
            # There was no spare, or it had died: fork now. `job` never returns in the child.
            if pid == 0:
                pid = os.fork()
                if pid == 0:
                    job(control, settings, rules, request, [*fds, locked])
            for fd in (*fds, locked):
                os.close(fd)
            spare = hatch(control, settings, rules) if early and not request["followed"] else None
            status, usage, spent = (
                attend(pid, control, attempts) if request["session"] else (*wait(pid, control, attempts), False)
            )
            # No namespace ends what the program started, so its process group is ended.
            if settings["mode"] == "none":
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            took = time.monotonic() - start
            # Every writing end is closed, so this returns at once, with nothing if the child failed before it
            # was confined.
            ran = os.read(confined, 1) == DONE
            os.close(confined)
            used = {"cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024, "network": taken(attempts)}
            reply = {"ran": ran, "status": status, "seconds": took, "spent": spent}
            # The answer goes out before the scratch directory is emptied; CLEAN says when the next job may come.
            control.send(json.dumps(reply | used).encode())
            if settings["scratch"]:
                clean(settings["scratch"])
            control.send(CLEAN)
    finally:
        bury(spare)


def hatch(control: socket.socket, settings: dict[str, Any], rules: int | None) -> tuple[int, socket.socket]:
    """A child with half of its doors locked, and the socket on which it waits for its job."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            # Its copy of our end would keep the socket open, and the end of the zygote would never be seen.
            ours.close()
            ready = begin(settings, rules)
            exec(compile(REHEARSAL, program.NAME, "exec"), {})
            data, fds, _, _ = socket.recv_fds(theirs, 65536, 8)
            if data:
                job(control, settings, rules, json.loads(data), fds, ready)
        finally:
            os._exit(1)
    theirs.close()
    return pid, ours


def give(spare: tuple[int, socket.socket] | None, data: bytes, fds: list[int]) -> int:
    """Send the job to the child that waits; its process id, or 0 where there is none (any more)."""
    if spare is None:
        return 0
    pid, line = spare
    try:
        socket.send_fds(line, [data], fds)
    except OSError:
        bury(spare)
        return 0
    # The child has the job; nothing else is ever sent on this line.
    line.close()
    return pid


def bury(spare: tuple[int, socket.socket] | None) -> None:
    """End a child that still waits."""
    if spare is not None:
        os.kill(spare[0], signal.SIGKILL)
        os.waitpid(spare[0], 0)
        spare[1].close()


def wait(pid: int, control: socket.socket, attempts: Attempts | None) -> tuple[int, Any]:
    """Returns the status of the ended child and its resource usage; the child is killed when the host says so or is
    gone."""
    # A pidfd is readable once the child has ended, so one poll waits for the child, the host and the attempts.
    watch = os.pidfd_open(pid)
    poll = watched(attempts, watch, control.fileno())
    try:
        while True:
            ready = heard(poll, attempts)
            if watch in ready:
                _, status, usage = os.wait4(pid, 0)
                return status, usage
            if control.fileno() not in ready:
                continue
            said = control.recv(64)
            # `said` is KILL, or empty where the other side is gone. After KILL the loop goes on: the pidfd tells
            # when the status can be read.
            os.kill(pid, signal.SIGKILL)
            if not said:
                os.waitpid(pid, 0)
                raise ConnectionResetError("the other end is gone")
    finally:
        os.close(watch)


def attend(pid: int, control: socket.socket, attempts: Attempts | None) -> tuple[int, Any, bool]:
    """Keep a session: it runs between `GO` and `REST` only, and no longer than its processor time. As `wait`, and
    whether that was spent.

    The clock is the kernel's and read here, so a program can neither move it nor ignore its alarm.
    """
    # The second is the id of another process's CPU-time clock as the kernel makes it: (~pid << 3) | CPUCLOCK_SCHED.
    watch, clock = os.pidfd_open(pid), ~pid << 3 | 2
    poll = watched(attempts, watch, control.fileno())
    cores, begun, end, spent = os.cpu_count() or 1, 0.0, None, False
    try:
        while True:
            # With threads on all cores the rest is used up `cores` times as fast, so it is looked at no later
            # than that.
            pause = None if end is None else max(STEP, (end - seconds(clock)) / cores)
            ready = heard(poll, attempts, pause)
            if watch in ready:
                _, status, usage = os.wait4(pid, 0)
                return status, usage, spent
            asked = control.fileno() in ready
            said = control.recv(64) if asked else b""
            if said.startswith(GO):
                begun = seconds(clock)
                end = begun + float(said[len(GO) :])
                os.kill(pid, signal.SIGCONT)
            elif said == REST:
                # SIGSTOP stops all its threads and cannot be ignored, so nothing runs between two pieces.
                os.kill(pid, signal.SIGSTOP)
                control.send(json.dumps({"cpu": seconds(clock) - begun, "network": taken(attempts)}).encode())
                end = None
            elif asked or (end is not None and seconds(clock) >= end):
                # Killed because its time was over, unless the host asked for it.
                spent, end = not asked, None
                os.kill(pid, signal.SIGKILL)
                if asked and not said:
                    os.waitpid(pid, 0)
                    raise ConnectionResetError("the other end is gone")
    finally:
        os.close(watch)


def seconds(clock: int) -> float:
    """Returns the seconds of processor time that a process has used; 0 where it has just ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def begin(settings: dict[str, Any], rules: int | None) -> Any:
    """The child's first half: die with the zygote, stand in a group of its own, lock what can be locked. An error is
    kept for the job."""
    try:
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
        # A signal to its own group (kill 0) then reaches the job alone, and not the zygote.
        os.setpgid(0, 0)
        if settings["mode"] == "none":
            return None
        return confine.half(
            rules, host_files=settings["mode"] == "landlock", processes=settings["processes"] > 0, told=settings["told"]
        )
    except OSError as error:
        return error


def job(
    control: socket.socket,
    settings: dict[str, Any],
    rules: int | None,
    request: dict[str, Any],
    fds: list[int],
    ready: Any = None,
) -> None:
    """The child: take the descriptors, lock the doors, run. Never returns. `ready`: what `begin` returned, if it has
    already begun."""
    status = 1
    try:
        half = ready if ready is not None else begin(settings, rules)
        # Source and call are read before the program exists and their files are closed with the rest: no job
        # can reach them.
        source, stdin, stdout, stderr, result, call, locked = fds
        code, asked = read(source), read(call)
        control.detach()
        given = [stdin, stdout, stderr, result, locked]
        # First all to numbers from 100 on: dup2 straight to 0 to 4 could overwrite one that has not been moved
        # yet. The program then has 0, 1, 2 and the result (3); 4 is closed before it begins.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in given]
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.closerange(len(high), 65536)
        os.chdir(settings["scratch"] or "/")
        session = request["session"]
        # Limits before the filter, which lets no call pass that sets one.
        confine.limit(request["limits"], tasks=settings["tasks"], cpu=not session)
        # Raised here and not earlier: only now descriptor 2 is the stream that the host reads the reason from.
        if isinstance(half, OSError):
            raise half
        if half is not None:
            confine.shut(half)
        os.write(4, DONE)
        os.close(4)
        # The program runs in this process and can walk the frames below its own. Nothing of the host is left in
        # their names.
        del request, settings, control, fds, half, ready
        status = cells.converse(3) if session else program.run(code, asked, 3)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        # No exit function and no buffer of the zygote runs in its child.
        os._exit(status)


def read(fd: int) -> bytes:
    """All of a sealed memory file, from its beginning."""
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def clean(path: str) -> None:
    """Nothing of one job is there for the next, whatever it built: directories without rights, or nested without end.

    Each directory's own directories are moved up before it is removed, so nothing here recurses or runs out of
    descriptors.
    """
    moved = 0
    while folders := _emptied(path):
        for folder in folders:
            os.chmod(folder, 0o700)
            for inner in _emptied(folder):
                os.chmod(inner, 0o700)
                while os.path.lexists(f"{path}/{moved}"):
                    moved += 1
                os.rename(inner, f"{path}/{moved}")
            os.rmdir(folder)


def _emptied(path: str) -> list[str]:
    """Remove a directory's files; the directories in it."""
    folders: list[str] = []
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
    return folders


if __name__ == "__main__":
    main()
