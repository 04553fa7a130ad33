"""The zygote: the process that waits inside a sandbox, forks a confined child for each job, and reports how it ended.

In the zygote Python is already started and the packages are imported, so a job takes milliseconds. It has no secret and
no data of earlier jobs. Requests and replies are JSON datagrams on one socket, which children close before they run
anything. The program, its input and its outputs are descriptors that come with the request.
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
"""The message that ends the running job."""
GO, REST = b"go", b"rest"
"""Messages to a session. `go` and a number: run a piece, which may use this number of seconds of processor time.
`rest`: stop until the next piece."""
REHEARSAL = "import json\ndef f(x): return json.loads('[1]')[0] + x\nf(1)"
"""A program that a waiting child runs before its job comes. It touches pages of memory, so that the job has fewer page
faults, each of which takes as long as hundreds of lines."""
STEP = 0.01
"""Least seconds between two checks of a session's processor time."""
CORES = os.cpu_count() or 1
"""How many times as fast as the clock a session's processor time can run."""
CLEAN = b"clean"
"""The message that the files of a job are removed, after the job's reply, which many files shall not delay."""
DONE = b"1"
"""The byte that a child writes to a pipe once it is confined. Then the pipe is closed, and the program begins. If the
byte is missing, the sandbox failed and not the program, and no program can fake that."""
# Modules that are imported before the first job.
PRELOAD = (
    "base64 bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools math"
    " operator re statistics string struct textwrap typing"
)
LAZY = {"numpy": ("numpy.random", "numpy.linalg")}
"""Modules that packages would import at first use, and so in every job again."""


def main() -> None:
    """Prepares the sandbox, says over the control socket that it is ready, and serves jobs."""
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
    """Imports what jobs use, gives up all rights, and builds the rule set of Landlock.

    Returns (the rule set or None, the counter of attempts to reach a network or None). OSError if a barrier that the
    mode promises is missing.
    """
    # This package is already imported. Its folder is removed from the path, so that a program that imports `program` or
    # `cells` does not find our files.
    sys.path[:] = [p for p in sys.path if p != settings["home"]]
    if settings["package_path"]:
        sys.path.append(settings["package_path"])
    for name in (*PRELOAD.split(), *(m for p in settings["packages"] for m in (p, *LAZY.get(p, ())))):
        importlib.import_module(name)
    if "numpy.random" in sys.modules:
        # Once here, where nothing draws from it. In a job it would take three quarters of a millisecond.
        sys.modules["numpy.random"].seed(0)
    # Without the module `site` these two functions are missing, and ordinary programs call them.
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))
    os.environ.pop("PYTHONPATH", None)
    scratch, mode = settings["scratch"], settings["mode"]
    # This comes before `drop`, because mounting needs a capability.
    settings["inodes"] = bool(scratch) and confine.bound_files(
        scratch, settings["scratch_bytes"], settings["scratch_files"]
    )
    if mode == "none":
        return None, None
    # The order is fixed: the kernel forgets the parent-death signal when a process changes its user, and
    # accepts a filter (`Attempts`) from an ordinary process only after no_new_privs.
    confine.drop(settings["uid"])
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
    # With namespaces the mounts already confine the program, and Landlock is a second barrier, else the only one.
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
    # This call fills the cache of `template`, which every child inherits.
    syscalls.template(mode == "landlock", settings["processes"] > 0, settings["told"])
    return rules, attempts


def serve(control: socket.socket, settings: dict[str, Any], rules: int | None, attempts: Attempts | None) -> None:
    """Runs jobs one after the other until the other end closes the socket.

    While a job runs, the child for the next job is made, unless the next job waits already. Then all cores are busy,
    and making a child ahead costs more than it saves.
    """
    # A sandbox for programs with processes runs one job and ends, so it needs no child for a next one.
    makes_spares = settings["processes"] == 0
    spare = hatch(control, settings, rules) if makes_spares else None
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 65536, 8)
            if not data:
                return
            if data == REST or data.startswith((KILL, GO)):
                continue  # the message came after its job had ended
            request = json.loads(data)
            # `confined` and `locked` are the pipe for `DONE`. A job's descriptors are closed here before the next spare
            # child is forked. Otherwise it would hold the pipes open, and their reader would wait for an end.
            confined, locked = os.pipe()
            start = time.monotonic()
            pid, spare = give(spare, data, [*fds, locked]), None
            # There was no spare child, or it had died, so one is forked now. `job` never returns in the child.
            if pid == 0:
                pid = os.fork()
                if pid == 0:
                    job(control, settings, rules, request, [*fds, locked])
            for fd in (*fds, locked):
                os.close(fd)
            spare = hatch(control, settings, rules) if makes_spares and not request["followed"] else None
            status, usage, spent = attend(pid, control, attempts)
            # Without a namespace, processes that the program started may still run, so its process group is killed.
            if settings["mode"] == "none":
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            took = time.monotonic() - start
            # All writing ends are closed, so this returns at once: nothing if the child failed before it was confined.
            ran = os.read(confined, 1) == DONE
            os.close(confined)
            costs = {"cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024, "network": taken(attempts)}
            reply = {"ran": ran, "status": status, "seconds": took, "spent": spent}
            # The reply is sent before the scratch directory is emptied. `CLEAN` says that the next job may come.
            control.send(json.dumps(reply | costs).encode())
            if settings["scratch"]:
                clean(settings["scratch"])
            control.send(CLEAN)
    finally:
        bury(spare)


def hatch(control: socket.socket, settings: dict[str, Any], rules: int | None) -> tuple[int, socket.socket]:
    """(process id of a new child that has begun to confine itself, the socket on which it waits for its job)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            # The child's copy of our end would keep the socket open, and hide the end of the zygote from it.
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
    """Send the job to the waiting child. Returns its process id, or 0 if there is no such child, or it has died."""
    if spare is None:
        return 0
    pid, line = spare
    try:
        socket.send_fds(line, [data], fds)
    except OSError:
        bury(spare)
        return 0
    # The child has the job. Nothing else is sent on this socket.
    line.close()
    return pid


def bury(spare: tuple[int, socket.socket] | None) -> None:
    """End a child that still waits."""
    if spare is not None:
        os.kill(spare[0], signal.SIGKILL)
        os.waitpid(spare[0], 0)
        spare[1].close()


def attend(pid: int, control: socket.socket, attempts: Attempts | None) -> tuple[int, Any, bool]:
    """Waits for a child, which is killed if the host asks for it or is gone. A session runs only between `GO` and
    `REST`, and not longer than its processor time.

    Returns (status, resource usage, whether the processor time was used up). The time is the kernel's and is read here,
    so a program can neither change it nor ignore the limit.
    """
    # A pidfd can be read once the child has ended, so one poll waits for the child, the host and the attempts.
    # `clock` is the id of another process's CPU-time clock, as the kernel defines it: (~pid << 3) | CPUCLOCK_SCHED.
    pidfd, clock = os.pidfd_open(pid), ~pid << 3 | 2
    poll = watched(attempts, pidfd, control.fileno())
    begun, end, spent = 0.0, None, False
    try:
        while True:
            # With threads on all cores the processor time runs that many times as fast, so the next check is earlier.
            pause = None if end is None else max(STEP, (end - seconds(clock)) / CORES)
            ready = heard(poll, attempts, pause)
            if pidfd in ready:
                _, status, usage = os.wait4(pid, 0)
                return status, usage, spent
            host_spoke = control.fileno() in ready
            message = control.recv(64) if host_spoke else b""
            if message.startswith(GO):
                begun = seconds(clock)
                end = begun + float(message[len(GO) :])
                os.kill(pid, signal.SIGCONT)
            elif message == REST:
                # SIGSTOP stops all threads and cannot be ignored, so nothing runs between two pieces.
                os.kill(pid, signal.SIGSTOP)
                control.send(json.dumps({"cpu": seconds(clock) - begun, "network": taken(attempts)}).encode())
                end = None
            elif host_spoke or (end is not None and seconds(clock) >= end):
                # It is killed because the host asked for it, or else because the session's time is used up. The loop
                # goes on, until the pidfd shows that the status can be read.
                spent, end = not host_spoke, None
                os.kill(pid, signal.SIGKILL)
                if host_spoke and not message:
                    os.waitpid(pid, 0)
                    raise ConnectionResetError("the other end is gone")
    finally:
        os.close(pidfd)


def seconds(clock: int) -> float:
    """Returns the seconds of processor time that a process has used; 0 where it has just ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def begin(settings: dict[str, Any], rules: int | None) -> Any:
    """Confines a child as far as that is possible without its job: it dies with the zygote, and has its own process
    group. Returns the filter for `confine.shut`; None with mode `none`; or an error, which `job` raises."""
    try:
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
        # In its own group, a signal to the group (kill 0) reaches only the job and not the zygote.
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
    """The child: takes the descriptors, confines itself, and runs the job. Never returns.

    `ready`: what `begin` returned, if it was called already. With mode `none` that is None too, and `begin` is called
    again, which changes nothing.
    """
    status = 1
    try:
        filter_or_error = ready if ready is not None else begin(settings, rules)
        # The source and the call are read before the program exists, and their files are closed below, so that no
        # program can use them.
        source, stdin, stdout, stderr, result, call, locked = fds
        code, call_text = read(source), read(call)
        control.detach()
        # First copied to numbers from 100 on: dup2 to 0..4 could overwrite one that is still needed. The program then
        # has 0, 1, 2 and the result (3). Descriptor 4 is closed before the program begins.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (stdin, stdout, stderr, result, locked)]
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.closerange(len(high), 65536)
        os.chdir(settings["scratch"] or "/")
        session = request["session"]
        # Limits are set before the filter, because the filter refuses the calls that set limits.
        confine.limit(request["limits"], tasks=settings["tasks"], cpu=not session)
        # An error of `begin` is raised only now, when descriptor 2 is the stream from which the host reads the reason.
        if isinstance(filter_or_error, OSError):
            raise filter_or_error
        if filter_or_error is not None:
            confine.shut(filter_or_error)
        os.write(4, DONE)
        os.close(4)
        # The program runs in this process and can read the variables of the frames below its own. So they are deleted
        # here.
        del request, settings, control, fds, filter_or_error, ready
        status = cells.converse(3) if session else program.run(code, call_text, 3)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        # With os._exit no exit function of the zygote runs in its child, and no buffer of the zygote is written.
        os._exit(status)


def read(fd: int) -> bytes:
    """All of a sealed memory file, from its beginning."""
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def clean(path: str) -> None:
    """Empties the scratch directory, so that a job finds nothing of the job before.

    A program may have made directories without rights, or nested them very deeply. So the directories inside a
    directory are moved up before it is removed. This needs no recursion and few descriptors.
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
    """Remove the files of a directory. Returns the directories in it."""
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
