"""Counts how often a program asked for a socket of a network. Each request is refused; the kernel tells of it here,
whichever way it was asked.

The zygote carries the filter that tells, every job inherits it, and no job holds the descriptor that answers: a program
can neither hide an attempt nor allow one. Nobody there to answer is a refusal too (seccomp_unotify(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct

from . import syscalls

SECCOMP, FILTER, NEW_LISTENER = 317, 1, 8
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTICE = 80
"""Bytes of struct seccomp_notif, which begins with the attempt's id."""


class Attempts:
    """The filter, set for this process and its children, and the count."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        """OSError where this cannot be: a kernel before 5.0, or somebody outside already listens."""
        code = syscalls.telling()
        text = ctypes.create_string_buffer(code, len(code))
        # struct sock_fprog: the number of instructions (8 bytes each), padding, and a pointer to them.
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text)))
        self.fd = libc.syscall(SECCOMP, ctypes.c_uint(FILTER), ctypes.c_uint(NEW_LISTENER), header)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"seccomp listener: {os.strerror(code)}")
        self.count = 0

    def refuse(self) -> None:
        """Answer one attempt. The program that made it may be gone, which is an answer too."""
        notice = bytearray(NOTICE)
        # ENOENT: the program was ended between its attempt and our reading or answering it.
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(self.fd, RECEIVE, notice)
            self.count += 1
            # struct seccomp_notif_resp: the attempt's id, the value, the error, flags. A negative error is what
            # the call returns; the kernel itself never carries the call out.
            fcntl.ioctl(self.fd, SEND, struct.pack("QqiI", *struct.unpack_from("Q", notice), 0, -syscalls.EPERM, 0))


def watched(attempts: Attempts | None, *fds: int) -> select.poll:
    """A poll of `fds`, and of the attempts where they are counted."""
    poll = select.poll()
    for fd in (*fds, *([attempts.fd] if attempts else [])):
        poll.register(fd, select.POLLIN)
    return poll


def heard(poll: select.poll, attempts: Attempts | None, seconds: float | None = None) -> set[int]:
    """The descriptors that have something to say, after `seconds` at most; attempts are answered here."""
    ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
    if attempts and attempts.fd in ready:
        attempts.refuse()
    return ready


def taken(attempts: Attempts | None) -> int | None:
    """Returns the number of attempts since the last call; None where nobody counts."""
    if attempts is None:
        return None
    count, attempts.count = attempts.count, 0
    return count
