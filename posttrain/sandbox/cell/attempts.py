"""Counts how often a program asked for a network socket. The kernel reports each request here, and it is refused.

A seccomp filter makes these reports. The zygote sets it, every job inherits it, and no job has the descriptor that
answers. So a program can neither hide an attempt nor allow it. If nobody answers, it is refused (seccomp_unotify(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct

from . import syscalls

# The number of the system call, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER.
SECCOMP, FILTER, NEW_LISTENER = 317, 1, 8
# SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND.
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTICE = 80
"""Bytes of struct seccomp_notif, which begins with the attempt's id."""


class Attempts:
    """The filter, set for this process and its children, and the count."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        """OSError where the filter cannot be set: the kernel is older than 5.0, or another listener exists already."""
        code = syscalls.telling()
        text = ctypes.create_string_buffer(code, len(code))
        # struct sock_fprog: the number of instructions (8 bytes each), padding, and a pointer to them.
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text)))
        self.fd = libc.syscall(SECCOMP, ctypes.c_uint(FILTER), ctypes.c_uint(NEW_LISTENER), header)
        if self.fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"seccomp listener: {os.strerror(error)}")
        self.count = 0

    def refuse(self) -> None:
        """Read one attempt, count it and refuse it. The program that made it may have ended meanwhile."""
        notice = bytearray(NOTICE)
        # ENOENT means that the program ended before the attempt was read or answered.
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(self.fd, RECEIVE, notice)
            self.count += 1
            # struct seccomp_notif_resp: id, value, negative error, flags. The kernel does not execute the call.
            fcntl.ioctl(self.fd, SEND, struct.pack("QqiI", *struct.unpack_from("Q", notice), 0, -syscalls.EPERM, 0))


def watched(attempts: Attempts | None, *fds: int) -> select.poll:
    """A poll of `fds`, and of the descriptor of the attempts if they are counted."""
    poll = select.poll()
    for fd in (*fds, *([attempts.fd] if attempts else [])):
        poll.register(fd, select.POLLIN)
    return poll


def heard(poll: select.poll, attempts: Attempts | None, seconds: float | None = None) -> set[int]:
    """The descriptors that can be read, after `seconds` at most. An attempt among them is answered here."""
    ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
    if attempts and attempts.fd in ready:
        attempts.refuse()
    return ready


def taken(attempts: Attempts | None) -> int | None:
    """Returns the number of attempts since the last call; None if they are not counted."""
    if attempts is None:
        return None
    count, attempts.count = attempts.count, 0
    return count
