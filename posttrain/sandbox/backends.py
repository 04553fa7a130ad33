"""Backends: ways to start the zygote, the process that runs programs. The best one comes first.

`Namespaces` uses bubblewrap, `Landlock` needs no namespaces, and `Unconfined` confines nothing and is used only by
name. A backend defines how its zygote is started and what its jobs may do. `sandbox_worker` starts the zygote, and
`selftest` decides whether the backend is safe to use.

Also the files of the interpreter that programs run on: a sandbox makes only these readable.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.sandbox.sandbox_types import MIB, ProgramLimits, SandboxUnavailableError
from posttrain.system.errors import ConfigError

ASK = """
import json, sys, sysconfig
v = sysconfig.get_config_vars()
lib = v["INSTSONAME"] if v.get("Py_ENABLE_SHARED") else ""
paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), lib and v["LIBDIR"] + "/" + lib]
print(json.dumps([list(sys.version_info[:2]), *paths]))
"""
"""A program by which an interpreter says its version and its paths, in the order of `Interpreter`."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter's paths on this machine."""

    executable: str
    version: tuple[int, int]
    library: str
    """The standard library's directory."""
    platform_library: str
    shared: str
    """libpython, or '' where it is part of the executable."""


@functools.cache
def python(path: str | None = None) -> Interpreter:
    """The paths of an interpreter (None: this process's own, without its virtual environment)."""
    # The `python` of a virtual environment is a link to the interpreter behind it, and only that one has the standard
    # library beside it. -I and -S: no variable of the user and no `site` may change the paths that are reported.
    executable = os.path.realpath(path or sys.executable)
    done = subprocess.run([executable, "-I", "-S", "-c", ASK], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ConfigError(f"sandbox: {executable} is no Python that starts: {done.stderr.strip()[-200:]}")
    version, library, platform_library, shared = json.loads(done.stdout)
    if tuple(version) < (3, 11):
        raise ConfigError(f"sandbox: {executable} is Python {version[0]}.{version[1]}; programs need 3.11 or later")
    return Interpreter(executable, (version[0], version[1]), library, platform_library, shared)


def package(name: str) -> tuple[str, ...]:
    """The directories of an installed package, its bundled libraries included."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"sandbox: package {name!r} is not installed beside posttrain: pip install {name}")
    # A wheel such as numpy's keeps the shared libraries that it brings in a second directory, NAME.libs.
    home, *_ = spec.submodule_search_locations
    return tuple(p for p in (home, f"{home}.libs") if os.path.isdir(p))


CELL = Path(__file__).parent / "cell"
"""The folder of the code that runs inside a sandbox."""
SCRATCH_BYTES, SCRATCH_FILES = 32 * MIB, 4096
"""Most bytes and files that a program may write under /tmp."""
ALLOW = "ALLOW_UNSANDBOXED_CODE"
"""The environment variable that `Unconfined` needs."""
# Variables with the value 1, and variables with other values.
_ONE = "PYTHONUTF8 PYTHONDONTWRITEBYTECODE MALLOC_ARENA_MAX OPENBLAS_NUM_THREADS OMP_NUM_THREADS MKL_NUM_THREADS"
_OTHER = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
ENVIRONMENT = {**_OTHER, **dict.fromkeys(_ONE.split(), "1")}
"""The zygote's whole environment; nothing of ours is inherited. It has one malloc arena, because every thread's arena
would take 64 MiB of the address-space limit."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Directories of shared libraries, and of the time zones."""
FLAGS = ("-s", "-S", "-P", "-B", "-m", "cell.zygote")
"""Arguments of Python for the zygote. It has no user's or site packages, and writes no bytecode."""


@dataclass(frozen=True)
class Start:
    """The data to start one zygote: its command, environment and settings."""

    command: tuple[str, ...]
    environment: dict[str, str]
    settings: dict[str, Any]
    reports: bool = False
    """Whether `--info-fd` can be appended, which reports the process id of the namespace's first process."""


class Backend(Protocol):
    """A way to contain a program."""

    @property
    def name(self) -> str: ...

    @property
    def processes(self) -> bool:
        """True where programs can be allowed child processes."""
        ...

    def start(self, control: int, limits: ProgramLimits) -> Start:
        """The data to start a zygote at descriptor `control`. SandboxUnavailableError where a part is missing."""
        ...


def settings(mode: str, control: int, uid: int | None, packages: tuple[str, ...], processes: int) -> dict[str, Any]:
    """The settings that every zygote gets."""
    common = {"mode": mode, "control": control, "uid": uid, "packages": list(packages), "processes": processes}
    scratch = {"scratch": "", "scratch_bytes": SCRATCH_BYTES, "scratch_files": SCRATCH_FILES}
    return {**common, **scratch, "tasks": None, "readable": []}


def unused_uid() -> int | None:
    """For root: a random user id, far above those of accounts and different for each zygote, so that each has its own
    limits by user. Else None: only root can become another user."""
    return 0x60000000 + secrets.randbelow(0x0FFFFFFF) if os.geteuid() == 0 else None


@dataclass(frozen=True)
class Namespaces:
    """bubblewrap: own user, process, network, mount, IPC and host-name namespaces, and one Python, read-only.

    For root no user namespace is made, because a limit on processes does not apply to root inside one. Instead the
    zygote changes to an unused user after the mounts.
    """

    packages: tuple[str, ...] = ("numpy",)
    interpreter: str | None = None
    bwrap: str = "bwrap"
    cell: Path = CELL
    name: str = "namespaces"
    processes: bool = True

    def start(self, control: int, limits: ProgramLimits) -> Start:
        bwrap = shutil.which(self.bwrap)
        if bwrap is None:
            raise SandboxUnavailableError("bubblewrap is not installed (apt install bubblewrap)")
        # bwrap reads its options from left to right, and a later mount covers an earlier one. So the order is:
        # namespaces, the tree, packages inside it. The root is made read-only last, when every mount point exists.
        uid = unused_uid()
        command = [bwrap, *spaces(uid is None), *tree(python(self.interpreter), self.cell, limits.processes > 0)]
        for name in self.packages:
            for path in package(name):
                command += ["--ro-bind", path, f"/packages/{os.path.basename(path)}"]
        command += ["--remount-ro", "/", "--chdir", "/tmp"]
        env = {**ENVIRONMENT, "PYTHONPATH": "/inside", "LD_LIBRARY_PATH": "/python/lib"}
        for name, value in env.items():
            command += ["--setenv", name, value]
        zygote_settings = settings("namespaces", control, uid, self.packages, limits.processes)
        zygote_settings |= {"home": "/inside", "package_path": "/packages", "scratch": "/tmp", "readable": ["/"]}
        # The bound counts all tasks of the sandbox's user: the program's children, the program itself, the zygote and,
        # for an ordinary user, the namespace's first process. Without children it only bounds threads.
        zygote_settings["tasks"] = limits.processes + 3 if limits.processes else 64
        # bwrap itself gets an empty environment. --clearenv is only for the processes that it starts, and the
        # environment of bwrap could be read in /proc.
        return Start((*command, "--", "/python/bin/python3", *FLAGS), {}, zygote_settings, reports=True)


def spaces(unprivileged: bool) -> list[str]:
    """Options that isolate the zygote: every namespace, and only the capabilities root needs to change its user."""
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # With --new-session there is no controlling terminal, through which a program could type into the user's shell.
    options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if unprivileged:
        return [*options, "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    # SETUID and SETGID are for `confine.drop`; SYS_ADMIN is for `confine.bound_files`, which mounts /tmp again.
    # The zygote loses all three before the first job.
    return [*options, *(x for cap in ("SETUID", "SETGID", "SYS_ADMIN") for x in ("--cap-add", f"CAP_{cap}"))]


def tree(interpreter: Interpreter, cell: Path, tools: bool) -> list[str]:
    """Options that build the root directory: the interpreter under /python, libraries, null and urandom, a /tmp of
    fixed size, no /proc.

    `tools` adds the system's programs, for jobs that may start processes.
    """
    options: list[str] = []
    version = f"python{interpreter.version[0]}.{interpreter.version[1]}"
    # The modes are given, because directories that bwrap makes by itself are closed to other users, and for root the
    # zygote becomes another user.
    for path in ("/python", "/python/bin", "/python/lib", "/inside", "/packages", "/dev", "/usr", "/usr/share", "/etc"):
        options += ["--perms", "0755", "--dir", path]
    for path in SYSTEM:
        # On most distributions /lib and /lib64 are links into /usr. The links are made again, so that no tree is
        # mounted twice.
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    if tools:
        options += ["--ro-bind-try", "/usr/bin", "/usr/bin", "--symlink", "usr/bin", "/bin"]
    options += ["--ro-bind", interpreter.executable, "/python/bin/python3"]
    options += ["--ro-bind", interpreter.library, f"/python/lib/{version}"]
    if os.path.realpath(interpreter.platform_library) != os.path.realpath(interpreter.library):
        platform = Path(interpreter.platform_library)
        options += ["--ro-bind", str(platform), f"/python/{platform.parent.name}/{version}"]
    if interpreter.shared:
        options += ["--ro-bind", interpreter.shared, f"/python/lib/{os.path.basename(interpreter.shared)}"]
    # An empty file system covers the folder of installed packages: only those that were asked for may be visible.
    for packages in ("site-packages", "dist-packages"):
        if (Path(interpreter.library) / packages).is_dir():
            hidden = f"/python/lib/{version}/{packages}"
            options += ["--tmpfs", hidden, "--remount-ro", hidden]
    options += ["--ro-bind", str(cell), "/inside/cell"]
    for device in ("/dev/null", "/dev/urandom"):
        options += ["--dev-bind", device, device]
    # The size bounds the bytes that a program may write. They are in memory, which `ProgramLimits.memory` leaves out.
    return [*options, "--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp"]


@dataclass(frozen=True)
class Landlock:
    """Landlock and seccomp without namespaces, for machines that forbid namespaces (most containers).

    A program can change no file, start no process and open no socket. It can read only Python's files. `stat` still
    works on every path, because Landlock does not cover it.
    """

    packages: tuple[str, ...] = ("numpy",)
    interpreter: str | None = None
    cell: Path = CELL
    name: str = "landlock"
    processes: bool = False

    def start(self, control: int, limits: ProgramLimits) -> Start:
        if limits.processes:
            raise SandboxUnavailableError("landlock cannot contain programs with processes; only namespaces can")
        # No scratch directory, because without namespaces /tmp belongs to the machine. No bound on tasks, because for
        # an ordinary user it would count all other processes of that user.
        zygote_settings = settings("landlock", control, unused_uid(), self.packages, 0)
        command, where, readable = in_place(self.packages, self.interpreter, self.cell)
        zygote_settings |= {**where, "readable": readable}
        return Start(command, {**ENVIRONMENT, "PYTHONPATH": zygote_settings["home"]}, zygote_settings)


def in_place(
    packages: tuple[str, ...], interpreter: str | None, cell: Path
) -> tuple[tuple[str, ...], dict[str, str], list[str]]:
    """For a zygote in the machine's own file system: its command, where its files are, and the paths it must read."""
    paths = python(interpreter)
    folders = [p for name in packages for p in package(name)]
    where = {"home": str(cell.parent), "package_path": os.path.dirname(folders[0]) if folders else ""}
    readable = [paths.library, paths.platform_library, *SYSTEM, *folders, "/dev/null", "/dev/urandom"]
    readable += [paths.shared] if paths.shared else []
    return (paths.executable, *FLAGS), where, readable


@dataclass(frozen=True)
class Unconfined:
    """No sandbox, only limits on time and memory. The program has all rights of the user.

    It needs both the name `none` and the environment variable, and is refused for root.
    """

    packages: tuple[str, ...] = ("numpy",)
    interpreter: str | None = None
    name: str = "none"
    processes: bool = False

    def start(self, control: int, limits: ProgramLimits) -> Start:
        if os.geteuid() == 0:
            raise SandboxUnavailableError(
                "sandbox='none' is refused for root: model-written code would own this machine"
            )
        if os.environ.get(ALLOW) != "1":
            raise SandboxUnavailableError(
                f"sandbox='none' runs model-written code with your user's full rights; it needs {ALLOW}=1 as well"
            )
        if limits.processes:
            raise SandboxUnavailableError("sandbox='none' cannot end a program's children; processes need namespaces")
        command, where, _ = in_place(self.packages, self.interpreter, CELL)
        zygote_settings = settings("none", control, None, self.packages, 0) | where
        return Start(command, {**ENVIRONMENT, "PYTHONPATH": zygote_settings["home"]}, zygote_settings)
