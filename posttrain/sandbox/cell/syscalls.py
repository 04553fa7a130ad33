"""The system calls a confined program may make, by number (x86_64), and the filter that lets nothing else through.

The lists name what is allowed and not what is forbidden, so a call that a newer kernel adds is refused until it is
listed. Arguments are compared as 64 bits. Numbers of another architecture (`int 0x80`, x32) kill the program.
"""

from __future__ import annotations

import functools
import struct

AUDIT_ARCH_X86_64 = 0xC000003E
# Verdicts of a filter: SECCOMP_RET_ALLOW, _ERRNO (with the error in the low bits), _KILL_PROCESS, _USER_NOTIF, _TRACE.
ALLOW, ERRNO, KILL, TELL, TRACE = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000, 0x7FF00000
# Errors that a refused call returns.
EPERM, ENOSYS, ENOTSUP = 1, 38, 95

# Instructions of classic BPF: load a word of struct seccomp_data; jump if it is equal, if a bit is set, if it is not
# below; return a verdict. In the structure the number of the call is at byte 0, the architecture at 4, and the
# arguments of 8 bytes each from 16 on, with the low half first.
LOAD, EQUAL, SET, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06

# Numbers of system calls whose arguments are checked.
CLONE, KILL_CALL, FCNTL, IOCTL, PRCTL = 56, 62, 72, 16, 157
TGKILL, PRLIMIT, SENDTO, SOCKETPAIR, CLONE3 = 234, 302, 44, 53, 435
OPEN, OPENAT = 2, 257
# The call `socket`, and the families of addresses of this machine.
SOCKET, UNIX, NETLINK = 41, 1, 16


def numbers(listed: str) -> tuple[int, ...]:
    """The numbers in a text of names, each with its number."""
    return tuple(map(int, listed.split()[1::2]))


PLAIN = numbers("""
read 0 write 1 close 3 fstat 5 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 futex 202 newfstatat 262 stat 4
lstat 6 rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 pread64 17 pwrite64 18 readv 19 writev 20 access 21 pipe 22
select 23 sched_yield 24 mremap 25 msync 26 mincore 27 madvise 28 dup 32 dup2 33 pause 34 nanosleep 35 getitimer 36
alarm 37 setitimer 38 getpid 39 sendfile 40 recvfrom 45 shutdown 48 getsockname 51 getpeername 52 getsockopt 55
exit 60 wait4 61 uname 63 fsync 74 fdatasync 75 ftruncate 77 getdents 78 getcwd 79 chdir 80 fchdir 81 readlink 89
umask 95 gettimeofday 96 getrlimit 97 getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108
getppid 110 getpgrp 111 getgroups 115 getresuid 118 getresgid 120 getpgid 121 getsid 124 rt_sigpending 127
rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 statfs 137 fstatfs 138 getpriority 140 sched_getparam 143
sched_getscheduler 145 sched_get_priority_max 146 sched_get_priority_min 147 arch_prctl 158 gettid 186 time 201
sched_getaffinity 204 getdents64 217 set_tid_address 218 restart_syscall 219 fadvise64 221 clock_gettime 228
clock_getres 229 clock_nanosleep 230 exit_group 231 epoll_wait 232 epoll_ctl 233 readlinkat 267 faccessat 269
pselect6 270 ppoll 271 set_robust_list 273 get_robust_list 274 epoll_pwait 281 eventfd2 290 epoll_create1 291 dup3 292
pipe2 293 preadv 295 pwritev 296 getcpu 309 getrandom 318 membarrier 324 copy_file_range 326 statx 332 rseq 334
close_range 436 faccessat2 439
""")
"""The calls with any arguments. restart_syscall is what the kernel makes of a timed wait that a stop interrupted."""
FILES = numbers("""
flock 73 truncate 76 rename 82 mkdir 83 rmdir 84 creat 85 unlink 87 chmod 90 fchmod 91 utime 132 utimes 235
mkdirat 258 futimesat 261 unlinkat 263 renameat 264 fchmodat 268 utimensat 280 renameat2 316
""")
"""Allowed only if all visible files are the sandbox's own, because Landlock does not check all of these calls."""
ATTRIBUTES = range(188, 200)
"""Extended attributes of files, from setxattr to fremovexattr. They are refused with the error of a file system without
attributes, which `shutil` expects when it copies a file."""
PROCESSES = (57, 58, 59, 109, 112, 247, 293, 434)
"""fork vfork execve setpgid setsid waitid pipe2 pidfd_open."""

# Flags of clone: every flag that makes a new namespace, and the one that makes a thread.
NEW_NAMESPACE = 0x7E020000
CLONE_THREAD = 0x00010000
WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC and O_APPEND."""


def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction of the filter. `yes`, `no`: instructions that are skipped if its test holds or does not."""
    return struct.pack("HBBI", code, yes, no, value)


def arg(index: int, high: bool = False) -> bytes:
    """Load one half of an argument."""
    return op(LOAD, 16 + 8 * index + 4 * high)


def allow(number: int) -> bytes:
    """Allow a call with any arguments."""
    return op(EQUAL, number, 0, 1) + op(RETURN, ALLOW)


def stretches(allowed: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first number, verdict) of each run of numbers with the same verdict, from 0 on."""
    # The last run begins one number above the largest allowed one, so all numbers above are refused.
    runs = [(0, ALLOW if 0 in allowed else ERRNO | EPERM)]
    for number in range(1, max(allowed) + 2):
        verdict = ALLOW if number in allowed else ERRNO | (ENOTSUP if number in ATTRIBUTES else EPERM)
        if verdict != runs[-1][1]:
            runs.append((number, verdict))
    return runs


def search(parts: list[tuple[int, int]]) -> bytes:
    """Code that finds the run of a number by binary search. When a filter is set, the kernel runs it once for every
    number, and a chain of tests would cost each job half a millisecond."""
    if len(parts) == 1:
        return op(RETURN, parts[0][1])
    # A jump is counted in instructions of 8 bytes. Numbers below the middle do not jump, and `below` follows for them.
    middle = len(parts) // 2
    below, above = search(parts[:middle]), search(parts[middle:])
    return op(AT_LEAST, parts[middle][0], len(below) // 8, 0) + below + above


def when(number: int, body: bytes) -> bytes:
    """Code that decides the call `number` by `body`, which always returns a verdict. Other calls skip it."""
    return op(EQUAL, number, 0, len(body) // 8) + body


def among(index: int, values: tuple[int, ...]) -> bytes:
    """Allow if the low half of an argument is one of `values`. The kernel reads these arguments as 32 bits."""
    tests = b"".join(op(EQUAL, v, 0, 1) + op(RETURN, ALLOW) for v in values)
    return arg(index) + tests + op(RETURN, ERRNO | EPERM)


def null(index: int) -> bytes:
    """Allow if a pointer is null."""
    # A comparison sees 32 bits, and a pointer whose low half is zero need not be null. So both halves are tested.
    zero = op(EQUAL, 0, 1, 0) + op(RETURN, ERRNO | EPERM)
    return arg(index) + zero + arg(index, high=True) + zero + op(RETURN, ALLOW)


def other_than(index: int, values: tuple[int, ...]) -> bytes:
    """Allow unless the low half of an argument is one of `values`, negative ones included."""
    tests = b"".join(op(EQUAL, v & 0xFFFFFFFF, 0, 1) + op(RETURN, ERRNO | EPERM) for v in values)
    return arg(index) + tests + op(RETURN, ALLOW)


def without(index: int, mask: int) -> bytes:
    """Allow where none of the bits of `mask` is set."""
    return arg(index) + op(SET, mask, 0, 1) + op(RETURN, ERRNO | EPERM) + op(RETURN, ALLOW)


def threads_only() -> bytes:
    """Allow a clone that makes a thread of this process and no namespace."""
    refuse = op(RETURN, ERRNO | EPERM)
    return arg(0) + op(SET, NEW_NAMESPACE, 0, 1) + refuse + op(SET, CLONE_THREAD, 1, 0) + refuse + op(RETURN, ALLOW)


PID, KEEPER, KEEPERS = 0x7A11C0D1, 0x7A11C0D2, 0x7A11C0D3
"""Numbers in the template that are replaced by a job's process ids. No process has such an id."""


def telling() -> bytes:
    """The filter that reports every request for a network socket.

    Sockets of this machine are refused without a report, because the C library asks for some when it looks up a user's
    name.
    """
    refuse = op(RETURN, ERRNO | EPERM)
    local = arg(0) + op(EQUAL, UNIX, 0, 1) + refuse + op(EQUAL, NETLINK, 0, 1) + refuse
    return op(LOAD, 0) + when(SOCKET, local + op(RETURN, TELL)) + op(RETURN, ALLOW)


def program(pid: int, keeper: int, keepers: int, *, host_files: bool, processes: bool, told: bool) -> bytes:
    """The filter for one job.

    Args:
        pid: the job's own process, the only one to which it may send signals.
        keeper: the zygote, which reports how the job ended.
        keepers: the process group of the zygote.
        host_files: the machine's files are visible, so no call that changes a file is allowed.
        processes: children and exec are allowed, and signals too, but not to all processes at once, to `keeper`, to
            `keepers` or to process 1.
        told: the filter of `telling` is set too, and it decides about sockets. The stricter verdict of two filters
            holds, so this one says TRACE, which is less strict than a report, and refuses (ENOSYS) without a tracer.
    """
    code = template(host_files, processes, told)
    for mark, number in ((PID, pid), (KEEPER, keeper), (-KEEPERS, -keepers)):
        code = code.replace(struct.pack("I", mark & 0xFFFFFFFF), struct.pack("I", number & 0xFFFFFFFF))
    return code


@functools.cache
def template(host_files: bool, processes: bool, told: bool) -> bytes:
    """The filter with `PID`, `KEEPER` and `KEEPERS` in place of process ids; cached, since it takes a millisecond."""
    # The architecture is tested first, because it gives the numbers their meaning; x32 has the same one, and numbers
    # with bit 30 set. Then the number stays in the accumulator, and each `when` tests it: it loads an argument only
    # behind its test, and then always returns.
    start = op(LOAD, 4) + op(EQUAL, AUDIT_ARCH_X86_64, 1, 0) + op(RETURN, KILL)
    start += op(LOAD, 0) + op(AT_LEAST, 0x40000000, 0, 1) + op(RETURN, KILL)
    plain = PLAIN + (() if host_files else FILES) + (PROCESSES if processes else ())
    body = when(SOCKET, op(RETURN, TRACE)) if told else b""
    # With the host's files, only opening for reading is allowed. Landlock checks the paths too, but its first versions
    # do not check truncation.
    if host_files:
        body += when(OPEN, without(1, WRITING)) + when(OPENAT, without(2, WRITING))
    else:
        body += allow(OPEN) + allow(OPENAT)
    # Commands of fcntl: descriptors and their flags, locks on files (5 to 7), a copy that closes on exec, reading
    # seals. F_SETOWN is refused, because with it the kernel sends signals for the program.
    locks = () if host_files else (5, 6, 7)
    body += when(FCNTL, among(1, (0, 1, 2, 3, 4, *locks, 1030, 1034)))
    # Commands of ioctl: the settings and the size of a terminal, FIONREAD, FIONBIO, and the two that set close-on-exec.
    # TIOCSTI, which types into a terminal, is refused.
    body += when(IOCTL, among(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)))
    # prctl may read whether the process can be dumped, and set and read a thread's name.
    body += when(PRCTL, among(0, (3, 15, 16)))
    # Without a new value prlimit only reads a limit.
    body += when(PRLIMIT, null(2))
    # A program may have a pair of sockets (asyncio needs one), but it may not send to an address: a datagram to an
    # abstract socket would leave the sandbox.
    body += when(SENDTO, null(4)) + when(SOCKETPAIR, among(0, (1,)))
    body += when(CLONE, without(0, NEW_NAMESPACE) if processes else threads_only())
    whom = other_than(0, (KEEPER, -KEEPERS, -1, 1)) if processes else among(0, (PID,))
    body += when(KILL_CALL, whom) + when(TGKILL, whom)
    # The flags of clone3 are in memory, which a filter cannot read. With the error ENOSYS the C library uses clone
    # instead.
    body += op(EQUAL, CLONE3, 0, 1) + op(RETURN, ERRNO | ENOSYS)
    return start + body + search(stretches(plain))
