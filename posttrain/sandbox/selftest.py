"""The self-test: a backend is used only after it has withstood the attacks on this machine. It takes under a second.

It runs real programs in a real sandbox. An attack that succeeds, or a normal program that fails, is a reason to refuse.
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
"""Sandboxes that may be lost while they are examined, before that is a reason to refuse."""


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
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-bait-"))
        # File modes must not be what refuses an attack: started by root, programs run as another user, and an
        # owner's mode would hide a sandbox that leaks.
        os.chmod(folder, 0o777)
        canary = os.path.join(folder, "canary")
        with open(canary, "w") as file:
            file.write("canary")
        os.chmod(canary, 0o666)
        tcp = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = held.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(name)
        unix.listen()
        held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(name + "-datagram")
        before = os.environ.get(CANARY)
        os.environ[CANARY] = secrets.token_hex(8)
        try:
            # /proc shows the environment that a process was started with, so ours lacks the canary.
            waits = [sys.executable, "-ISc", "import sys; sys.stdin.read()"]
            started = held.enter_context(subprocess.Popen(waits, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))
            held.callback(started.kill)
            yield AttackTargets(canary, tcp.getsockname()[1], name, os.getpid(), started.pid)
        finally:
            os.environ.pop(CANARY, None)
            if before is not None:
                os.environ[CANARY] = before


def attacks(target: AttackTargets, processes: bool = False) -> bytes:
    """The program that tries every attack and prints those that worked, one per line."""
    more = "" if processes else probes.NO_PROCESSES
    return probes.ATTACKS.format(**asdict(target), processes=more).encode()


def selftest(backend: Backend) -> list[str]:
    """The reasons to refuse a backend on this machine; empty if it passed. A sandbox that is killed while it is
    examined, for example for want of memory, says nothing about the others: a new one is examined from the beginning,
    `TRIES` in all."""
    lost = ""
    for _ in range(TRIES):
        try:
            # The bait first: a sandbox can inherit only what is in our environment when it starts.
            with bait() as target, contextlib.closing(begin(backend)) as worker:
                return _examine(worker, target)
        except SandboxUnavailableError as error:
            return [str(error)]
        except SandboxBroken as error:
            lost = str(error)
    return [lost]


def _examine(worker: SandboxWorker, target: AttackTargets) -> list[str]:
    quick = ProgramLimits(wall=20.0, cpu=10.0)
    # First that an honest program runs at all: a sandbox in which nothing works would withstand every attack.
    wrong: list[str] = []
    ran = worker.run(Job(probes.HONEST.encode(), b"in", limits=quick))
    if ran.why != "ok" or ran.stdout != probes.HONEST_SAYS:
        wrong.append(f"an honest program does not run: {_end(ran)}")
    ran = worker.run(Job(attacks(target), limits=quick))
    said = ran.said.splitlines()
    # The program says how many attacks it reached. Fewer than the text holds means that it ended early, and
    # what was not tried is not refused.
    if ran.why != "ok" or said[:1] != [f"tried {attacks(target).count(ATTACK)}"]:
        wrong.append(f"the attacks could not be tried: {_end(ran)}")
    wrong += [f"a program can: {name}" for name in said[1:] if name]
    # Attacks that end their own process cannot stand beside the others, so each is a program.
    for name, source, limits, expected in (
        ("call by the numbers of i386", probes.OTHER_ARCHITECTURE, quick, "crashed"),
        ("call by the numbers of x32", probes.X32, quick, "crashed"),
        ("allocate 1 GiB", probes.HUNGRY, quick, "memory"),
        ("say more than is allowed", probes.ENDLESS, quick, "output"),
        ("run longer than is allowed", probes.LOOP, ProgramLimits(wall=0.3), "timeout"),
    ):
        ran = worker.run(Job(source.encode(), limits=limits))
        if ran.why != expected:
            wrong.append(f"a program can: {name} ({_end(ran)})")
    if not os.path.exists(target.canary):
        wrong.append("a program can: delete a file of the host")
    return wrong


def _end(ran: Ran) -> str:
    return f"{ran.why}, status {ran.exit}" + (f", {ran.complaint}" if ran.stderr else "")
