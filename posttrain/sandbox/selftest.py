"""The self-test of a backend. A backend is used only if all attacks on this machine fail. It takes under a second.

It runs real programs in a real sandbox. A successful attack is a reason to refuse the backend, and so is a normal
program that fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from posttrain.sandbox import probes
from posttrain.sandbox.backends import Backend
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran, SandboxBroken, SandboxUnavailableError
from posttrain.sandbox.sandbox_worker import Job, SandboxWorker, begin

CANARY = "POSTTRAIN_CANARY"
ATTACK = b"@attack("
TRIES = 3
"""Number of sandboxes that are examined, if they are lost meanwhile, before the backend is refused."""


@dataclass(frozen=True)
class AttackTargets:
    """Targets of the attacks: a readable file, a listening TCP port, abstract sockets, this process, and one that was
    started with the canary in its environment."""

    canary: str
    port: int
    abstract: str
    parent: int
    started: int


@contextlib.contextmanager
def bait() -> Iterator[AttackTargets]:
    """Create the targets, and remove them after the block. Only loopback and a temporary folder are used."""
    name = f"\0posttrain-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-bait-"))
        # The modes of the files allow everything, so that only the sandbox can refuse an attack. If root started it,
        # programs run as another user, and stricter modes would hide a leak.
        os.chmod(folder, 0o777)
        canary = os.path.join(folder, "canary")
        with open(canary, "w") as file:
            file.write("canary")
        os.chmod(canary, 0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(name)
        unix.listen()
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(name + "-datagram")
        before = os.environ.get(CANARY)
        os.environ[CANARY] = secrets.token_hex(8)
        try:
            # /proc shows the environment with which a process was started, and this process was started without the
            # canary. So another process is started with it. Its environment is there when it has said something.
            command = [sys.executable, "-ISc", "import sys; print(flush=True); sys.stdin.read()"]
            pipe, silent = subprocess.PIPE, subprocess.DEVNULL
            started = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=silent))
            stack.callback(started.kill)
            assert started.stdout is not None
            started.stdout.readline()
            yield AttackTargets(canary, tcp.getsockname()[1], name, os.getpid(), started.pid)
        finally:
            os.environ.pop(CANARY, None)
            if before is not None:
                os.environ[CANARY] = before


def attacks(target: AttackTargets, processes: bool = False) -> bytes:
    """The program that tries every attack and prints those that worked, one per line."""
    forbidden = "" if processes else probes.NO_PROCESSES
    return probes.ATTACKS.format(**asdict(target), processes=forbidden).encode()


def selftest(backend: Backend) -> list[str]:
    """The reasons to refuse a backend on this machine; empty if it passed.

    If a sandbox is killed while it is examined, for example by the kernel without free memory, a new one is examined
    from the beginning, `TRIES` in all.
    """
    lost = ""
    for _ in range(TRIES):
        try:
            # The bait comes first, because a sandbox can inherit only what is in our environment when it starts.
            with bait() as target, contextlib.closing(begin(backend)) as worker:
                return _examine(worker, target)
        except SandboxUnavailableError as error:
            return [str(error)]
        except SandboxBroken as error:
            lost = str(error)
    return [lost]


def _examine(worker: SandboxWorker, target: AttackTargets) -> list[str]:
    """Runs the honest program and all attacks. Returns what is wrong."""
    generous = ProgramLimits(wall=20.0, cpu=10.0)
    # The first check is that an honest program runs. In a sandbox in which nothing works every attack would fail too.
    wrong: list[str] = []
    ran = worker.run(Job(probes.HONEST.encode(), b"in", limits=generous))
    if ran.why != "ok" or ran.stdout != probes.HONEST_SAYS:
        wrong.append(f"an honest program does not run: {_end(ran)}")
    ran = worker.run(Job(attacks(target), limits=generous))
    lines = ran.said.splitlines()
    # The program prints how many attacks it tried. If there are fewer than in its text, it ended early, and the others
    # were not tried.
    if ran.why != "ok" or lines[:1] != [f"tried {attacks(target).count(ATTACK)}"]:
        wrong.append(f"the attacks could not be tried: {_end(ran)}")
    wrong += [f"a program can: {name}" for name in lines[1:] if name]
    # Attacks that end their own process are programs of their own.
    for name, source, limits, expected in (
        ("call by the numbers of i386", probes.OTHER_ARCHITECTURE, generous, "crashed"),
        ("call by the numbers of x32", probes.X32, generous, "crashed"),
        ("allocate 1 GiB", probes.HUNGRY, generous, "memory"),
        ("say more than is allowed", probes.ENDLESS, generous, "output"),
        ("run longer than is allowed", probes.LOOP, ProgramLimits(wall=0.3), "timeout"),
    ):
        ran = worker.run(Job(source.encode(), limits=limits))
        if ran.why != expected:
            wrong.append(f"a program can: {name} ({_end(ran)})")
    if not os.path.exists(target.canary):
        wrong.append("a program can: delete a file of the host")
    return wrong


def _end(ran: Ran) -> str:
    """How a program ended, for a message."""
    return f"{ran.why}, status {ran.exit}" + (f", {ran.complaint}" if ran.stderr else "")
