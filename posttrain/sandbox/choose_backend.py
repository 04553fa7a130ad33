"""Chooses a sandbox: the named one, or the first that passes its self-test here; never silently a weaker one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from posttrain.sandbox.backends import ALLOW, Backend, Landlock, Namespaces, Unconfined
from posttrain.sandbox.remote import TOKEN, RemoteExecutor
from posttrain.sandbox.sandbox_pool import SESSIONS, Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits, SandboxUnavailableError
from posttrain.sandbox.selftest import selftest
from posttrain.system.errors import ConfigError, nearest
from posttrain.system.machine import is_linux

NAMES = ("auto", "namespaces", "landlock", "none")
"""Valid names of a sandbox, beside the address of an executor."""
REMOTE_WORKERS = 8
"""Default number of connections to an executor."""
HELP = f"""Fix one of: apt install bubblewrap (scripts/system-packages.sh) and allow user namespaces | a kernel of \
5.13 or later with Landlock |
sandbox=https://HOST (an executor elsewhere; python -m posttrain.sandbox.reference_server is one)
To run UNSANDBOXED anyway (model-written code gets your user's full rights; refused for root): sandbox='none' and \
{ALLOW}=1"""

ELSEWHERE = """untrusted code runs in namespaces or under Landlock. Only Linux has these, and this machine is no \
Linux, so it is not run here. Whatever runs no such code works: every recipe but programs, every reward but code, \
every tool but python.
Fix: sandbox=https://HOST, an executor on a Linux machine (python -m posttrain.sandbox.reference_server is one)"""

Make = Callable[[tuple[str, ...], str | None], Backend]
ORDER: dict[str, Make] = {"namespaces": Namespaces, "landlock": Landlock}
"""Backends that `auto` tries, best first."""


def open_sandbox(
    name: str = "auto",
    *,
    workers: int | None = None,
    limits: ProgramLimits | None = None,
    packages: tuple[str, ...] = ("numpy",),
    interpreter: str | None = None,
    sessions: int = SESSIONS,
    token: str = TOKEN,
) -> Sandbox:
    """A pool of sandboxes that programs cannot leave.

    Args:
        name: one of `NAMES`, or the address of an executor. Each has to pass the self-test.
        workers: sandboxes at once; None: one per core, or 8 connections to an executor.
        packages: installed packages that programs may import; they are loaded once, not for each job.
        interpreter: the Python that programs run on; None: this process's own.
        sessions: sessions (`Sandbox.session`) at once; more wait. Each takes about 15 MiB, with numpy 30.
        token: environment variable that holds an executor's token.

    Raises:
        SandboxUnavailableError: no sandbox works. The message has the reason for each and what to change.
    """
    backend = choose(name, packages, interpreter, token)
    worker_count = REMOTE_WORKERS if workers is None and isinstance(backend, RemoteExecutor) else workers
    return Sandbox(backend, workers=worker_count, limits=limits, sessions=sessions)


def choose(
    name: str = "auto", packages: tuple[str, ...] = ("numpy",), interpreter: str | None = None, token: str = TOKEN
) -> Backend:
    """The backend that `open_sandbox` would use."""
    # An executor is used only where it is named: `auto` never sends programs to another machine.
    if "://" in name:
        return first({"remote": lambda packages, interpreter: RemoteExecutor(name, token)}, packages, interpreter)
    if name not in NAMES:
        raise ConfigError(f"sandbox={name!r} is neither the address of an executor nor a name: {nearest(name, NAMES)}")
    # This holds for `none` too, because its zygote needs pidfds and memory files, which only Linux has.
    if not is_linux():
        raise SandboxUnavailableError(ELSEWHERE)
    if name == "none":
        return _unconfined(packages, interpreter)
    # A named backend has to pass the same self-test, and no other one is tried in its place.
    return first({name: ORDER[name]} if name != "auto" else ORDER, packages, interpreter)


def first(order: dict[str, Make], packages: tuple[str, ...], interpreter: str | None) -> Backend:
    """The first backend that passes its self-test. SandboxUnavailableError, with all reasons, if none passes."""
    reasons: list[str] = []
    for name, make in order.items():
        backend = make(packages, interpreter)
        wrong = examined(backend)
        if not wrong:
            return backend
        reasons.append(f"  {name}: " + "; ".join(wrong))
    raise SandboxUnavailableError(
        "\n".join(["cannot run untrusted code safely on this machine, so it is not run.", *reasons, HELP])
    )


@functools.cache
def examined(backend: Backend) -> tuple[str, ...]:
    """The self-test's findings, computed once per process."""
    return tuple(selftest(backend))


def _unconfined(packages: tuple[str, ...], interpreter: str | None) -> Backend:
    """The backend without confinement, with a warning."""
    backend = Unconfined(packages, interpreter)
    backend.start(-1, ProgramLimits())  # raises where it is not allowed
    warnings.warn("sandbox=none: model-written code runs with your user's full rights on this machine", stacklevel=3)
    return backend
