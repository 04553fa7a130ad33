"""A process gives up its rights for good: privileges, memory and time, files (Landlock), system calls (seccomp).

Everything here is a raw system call through ctypes, so that no package and no helper program is needed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from typing import Any

from . import syscalls

libc = ctypes.CDLL(None, use_errno=True)

# Options of prctl; numbers of the Landlock calls; flags of mount.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION, SECCOMP_MODE_FILTER = 1, 2
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32

# Rights of Landlock, as bits.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11
"""Making devices, sockets and pipes with names: never allowed."""
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
# The rights that a rule for a file may have.
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights that each version of Landlock has; 16 from version 5 on."""


def checked(result: int, what: str) -> int:
    """The result of a call. OSError with the reason if it is -1."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int, what: str, pointer: Any = 0) -> None:
    """One prctl, or OSError."""
    address = ctypes.c_void_p(pointer) if pointer else ctypes.c_ulong(0)
    checked(libc.prctl(option, ctypes.c_ulong(value), address, 0, 0), what)


def landlock_version() -> int:
    """Landlock's version in this kernel; 0 where there is none."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(CREATE_RULESET_VERSION)))


def ruleset(read: list[str], write: list[str], *, run: bool) -> int:
    """A Landlock rule set as a descriptor: `read` trees may be read (and executed with `run`), `write` trees changed
    too.

    TCP is shut from version 4, abstract sockets and signals to other processes from version 6.
    """
    # A right that the rule set handles is refused everywhere except under a path with a rule for it. A right that it
    # does not handle stays allowed. So `all_rights` has each that this kernel knows. More rights would be an error.
    version = landlock_version()
    all_rights = (1 << RIGHTS.get(version, 16)) - 1
    # struct landlock_ruleset_attr: rights of files; bind and connect of TCP; scopes (abstract sockets, signals).
    attributes = struct.pack("QQQ", all_rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = checked(
        libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint(0)), "landlock_create_ruleset"
    )
    reading = READ_FILE | READ_DIR | (EXECUTE if run else 0)
    for paths, access in ((read, reading), (write, all_rights & ~SPECIAL & ~(0 if run else EXECUTE))):
        for path in paths:
            try:
                tree = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # The list of system directories is for several distributions, and none of them has all.
            except FileNotFoundError:
                continue
            except PermissionError:
                raise PermissionError(
                    f"user {os.getuid()} cannot read {path}, which Python needs; use a Python that everybody can read"
                ) from None
            # The kernel refuses a rule that gives a file the rights of a directory. The structure is packed: no
            # padding. The 1 below is LANDLOCK_RULE_PATH_BENEATH.
            rights = access if os.path.isdir(path) else access & OF_A_FILE
            rule = struct.pack("=Qi", rights & all_rights, tree)
            checked(libc.syscall(ADD_RULE, fd, ctypes.c_int(1), rule, ctypes.c_uint(0)), f"landlock_add_rule {path}")
            os.close(tree)
    return fd


def drop(uid: int | None) -> None:
    """Become `uid` with no group and no capability; new privileges can never be gained."""
    # The groups before the user, because after setresuid the process may not change them.
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    # No process of the same user may trace this one or read its memory.
    prctl(PR_SET_DUMPABLE, 0, "dumpable")


def bound_files(path: str, size: int, files: int) -> bool:
    """Bounds the size and the number of files of the scratch file system. Returns whether that was allowed: only root
    may, and only before it drops its rights."""
    options = f"size={size},nr_inodes={files}".encode()
    return (
        libc.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(MS_REMOUNT | MS_NOSUID | MS_NODEV), options) == 0
    )


def limit(limits: dict[str, Any], *, tasks: int | None, cpu: bool = True) -> None:
    """Sets the rlimits of one job. `tasks` bounds threads and processes, if the uid is the sandbox's own.

    `cpu=False`: no limit on processor time, for a session, which needs one for each piece and not for its whole life.
    """
    # Whole seconds, rounded up. At the soft limit the kernel sends SIGXCPU, which a program can ignore; a second later
    # SIGKILL.
    seconds = max(1, int(limits["cpu"] + 0.999))
    for what, soft, hard in (
        (resource.RLIMIT_AS, limits["memory"], limits["memory"]),
        *([(resource.RLIMIT_CPU, seconds, seconds + 1)] if cpu else []),
        (resource.RLIMIT_FSIZE, limits["file_size"], limits["file_size"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_STACK, limits["stack"], limits["stack"]),
        # These three are forbidden: a core file, memory that cannot be swapped out, queues in the kernel's memory.
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))
    if tasks is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))


def half(rules: int | None, *, host_files: bool, processes: bool, told: bool) -> tuple[Any, Any]:
    """Sets Landlock, and prepares the filter for `shut`, before the job is known. `told`: see `syscalls.program`."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    prctl(PR_SET_DUMPABLE, 0, "dumpable")
    # Landlock only concerns files that are opened later, so it can be set before the job comes. The filter of calls
    # refuses the calls that receive the job and set its limits.
    if rules is not None:
        checked(libc.syscall(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)), "landlock_restrict_self")
        os.close(rules)
    if platform.machine() != "x86_64":
        raise OSError(f"the list of system calls is written for x86_64, not {platform.machine()}")
    keeper = os.getppid()
    code = syscalls.program(
        os.getpid(), keeper, os.getpgid(keeper), host_files=host_files, processes=processes, told=told
    )
    text = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and their address. So both objects have to exist until `shut`.
    return ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text))), text


def shut(filter: tuple[Any, Any]) -> None:
    """Sets the seccomp filter. After this the process can make only the calls that the filter allows."""
    header, _ = filter
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, "seccomp", ctypes.addressof(header))
