"""The attacks of the self-test: small programs that try to leave the sandbox, and the outcomes that are allowed.

Each attack is harmless where it succeeds (it reads a canary, sends signal 0, changes our own file in a temporary
folder), so testing a leaky sandbox does no damage.
"""

from __future__ import annotations

ATTACKS = """
import ctypes, os, socket, sys, resource
libc = ctypes.CDLL(None, use_errno=True)
canary, port, abstract, parent, started = {canary!r}, {port!r}, {abstract!r}, {parent!r}, {started!r}
opened, tried = [], []

def call(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return True

def attack(name):
    def run(function):
        try:
            worked = function()
        except BaseException:
            worked = False
        tried.append(name)
        if worked:
            opened.append(name)
        return function
    return run

@attack("read a file of the host")
def _(): return bool(open(canary).read())

@attack("read /etc/passwd")
def _(): return bool(open("/etc/passwd").read())

@attack("find the host's environment")
def _():
    if "POSTTRAIN_CANARY" in os.environ: return True
    for process in ("self", "1", os.getppid(), parent, started):
        try:
            if b"POSTTRAIN_CANARY" in open(f"/proc/{{process}}/environ", "rb").read(): return True
        except OSError: pass

@attack("walk /proc")
def _(): return bool(os.listdir("/proc/self/fd"))

@attack("write beside the canary")
def _():
    open(canary + ".out", "w").write("x")
    return True

@attack("change a file of the host")
def _():
    for change in (lambda: os.chmod(canary, 0o600), lambda: os.utime(canary), lambda: os.utime(canary, (1, 1)),
                   lambda: os.truncate(canary, 0),
                   lambda: os.open(canary, os.O_RDONLY | os.O_TRUNC), lambda: os.unlink(canary)):
        try:
            change()
            return True
        except OSError: pass

@attack("write to the system")
def _():
    for path in ("/usr/x", "/etc/x", "/dev/shm/x", "/x", "/var/tmp/x", "/python/x", "/inside/cell/x"):
        try:
            open(path, "w").close()
            return True
        except OSError: pass

@attack("TCP to loopback")
def _():
    s = socket.socket(); s.settimeout(1)
    s.connect(("127.0.0.1", port))
    return True

@attack("UDP")
def _():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return s.sendto(b"x", ("127.0.0.1", port)) > 0

@attack("abstract unix socket")
def _():
    s = socket.socket(socket.AF_UNIX); s.settimeout(1)
    s.connect(abstract)
    return True

@attack("abstract unix socket through a socket pair")
def _():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return a.sendto(b"x", abstract + "-datagram") > 0

@attack("signal another process")
def _():
    for pid in (os.getppid(), parent, -1, 1):
        if pid > 0 or pid == -1:
            try:
                os.kill(pid, 0)
                return True
            except OSError: pass

@attack("tgkill")
def _(): return call(234, parent, parent, 0)

@attack("open a pidfd")
def _(): return call(434, parent, 0)

@attack("ptrace")
def _(): return call(101, 0x4206, os.getppid(), 0, 0)

@attack("read another process's memory")
def _(): return call(310, os.getppid(), None, 0, None, 0, 0)

@attack("new user namespace")
def _(): return call(272, 0x10000000)

@attack("mount")
def _(): return call(165, b"none", b"/tmp", b"tmpfs", 0, None)

@attack("chroot")
def _(): return call(161, b"/")

@attack("join a namespace")
def _():
    libc.syscall(308, -1, 0)
    return ctypes.get_errno() != 1

@attack("raise a limit")
def _():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return True

@attack("bpf, io_uring, keyctl, perf, userfaultfd, memfd, SysV shm")
def _():
    for number, args in ((321, (99,)), (425, (0, None)), (250, (0, -3, 0)), (298, (None, 0, -1, -1, 0)), (323, (0,)),
                         (319, (b"x", 0)), (29, (0, 4096, 0o600))):
        libc.syscall(number, *args)
        if ctypes.get_errno() not in (1, 38): return True

@attack("keep a descriptor of the host")
def _():
    for fd in range(4, 64):
        try:
            os.fstat(fd)
            return True
        except OSError: pass

@attack("be root or hold a capability")
def _():
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0: return True
    return libc.syscall(125, header, data) == 0 and any(data[i] for i in (0, 1, 3, 4))
{processes}
print("tried", len(tried))
print("\\n".join(opened))
"""

NO_PROCESSES = """
@attack("fork")
def _():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    return True

@attack("vfork and exec")
def _():
    import subprocess
    return subprocess.call(["/bin/true"]) == 0

@attack("exec")
def _():
    if libc.syscall(59, b"/nowhere", None, None) < 0: return ctypes.get_errno() != 1
"""

OTHER_ARCHITECTURE = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid of i386); int 0x80; ret
got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("int 0x80 answered", got)
"""
X32 = """
import ctypes
print("x32 answered", ctypes.CDLL(None).syscall(0x40000000 + 39))
"""
HUNGRY = "x = bytearray(1 << 30)\nprint('allocated')"
ENDLESS = "while True: print('x' * 1000)"
LOOP = "while True: pass"
HONEST = """
import json, math, random, threading, decimal, asyncio, re, sys
t = threading.Thread(target=lambda: None); t.start(); t.join()
assert sys.stdin.read() == "in"
async def soon(): await asyncio.sleep(0)
asyncio.run(soon())
print(math.factorial(5), decimal.Decimal("0.1") + 1, re.sub("a", "b", "cat"))
"""
HONEST_SAYS = b"120 1.1 cbt\n"
