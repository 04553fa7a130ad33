"""Honest programs do in the sandbox what they do in plain Python: a wall that an honest one runs into is a right answer
scored 0."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import Call, ProgramLimits
from tests.sandbox.sandbox_parts import backend

PROGRAMS: dict[str, tuple[str, str]] = {
    "streams: another encoding": ("import sys\nsys.stdout.reconfigure(encoding='utf-8'); print('é42')", ""),
    "streams: another of stderr": ("import sys\nsys.stderr.reconfigure(errors='replace'); print('42')", ""),
    "streams: errors replaced": ("import sys\nsys.stdout.reconfigure(errors='replace'); print('\\ud800x')", ""),
    "streams: wrapped anew": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8'); print('é42')",
        "",
    ),
    "streams: input wrapped anew": (
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8'); print(input())",
        "héy\n",
    ),
    "streams: input in another encoding": (
        "import sys\nsys.stdin.reconfigure(encoding='utf-8'); print(input())",
        "héy\n",
    ),
    "streams: a codec's writer": (
        "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer); print('é42')",
        "",
    ),
    "streams: nothing to seek": (
        (
            "import sys\nprint(sys.stdout.seekable(), sys.stdout.name, sys.stdin.name, sys.stdout.encoding,"
            " sys.stdout.errors)"
        ),
        "",
    ),
    "streams: bytes and no end of line": (
        "import sys\nsys.stdout.buffer.write('é\\n'.encode()); sys.stdout.write('abc')",
        "",
    ),
    "streams: straight to the descriptor": ("import os\nprint(os.read(0, 100)); os.write(1, b'raw\\n')", "1 2\n3"),
    "streams: read as a file": (
        "import io, os\nprint(io.BytesIO(os.read(0, os.fstat(0).st_size)).readline(), open(0).read())",
        "1 2\n3",
    ),
    "streams: every way of reading": (
        "import sys\nprint(input(), sys.stdin.readline().split(), sys.stdin.buffer.read().split())",
        "3\n1 2 3\n4 5\n6",
    ),
    "streams: fileinput": ("import fileinput\nprint([line.strip() for line in fileinput.input()])", "1 2\n3"),
    "streams: a prompt": ("x = input('n? ')\nprint(x)", "5\n"),
    "streams: another in its place": ("import io, sys\nprint('5'); sys.stdout = io.StringIO(); print('noise')", ""),
    "streams: closed": ("import sys\nprint('42'); sys.stdout.close()", ""),
    "streams: as a context": ("import sys\nwith sys.stdout as out: out.write('42\\n')", ""),
    "streams: a file never closed": ("f = open(1, 'w', closefd=False)\nf.write('42\\n')", ""),
    "streams: a descriptor's file never closed": ("import os\nout = os.fdopen(1, 'w')\nout.write('42\\n')", ""),
    "ends: exit of False": ("import sys\nprint('ok'); sys.exit(False)", ""),
    "ends: exit of True": ("import sys\nprint('ok'); sys.exit(True)", ""),
    "ends: exits of every kind": (
        "import sys\nprint('ok')\ntry: sys.exit((1, 2))\nexcept SystemExit as e: print(e.code)\nsys.exit(-1)",
        "",
    ),
    "ends: a message": ("import sys\nsys.exit('msg')", ""),
    "ends: unittest": (
        (
            "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(1,"
            " 1)\nprint('5')\nunittest.main()"
        ),
        "",
    ),
    "ends: what is said at the end": (
        "import atexit\natexit.register(print, 'bye'); print('hi'); raise SystemExit",
        "",
    ),
    "ends: an error at the end": ("import atexit\natexit.register(lambda: 1 / 0); print('x')", ""),
    "ends: an object that goes": ("class A:\n def __del__(self): print('del')\na = A(); print('x')", ""),
    "ends: a finalizer": ("import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'fin'); print('x')", ""),
    "ends: a thread that is late": (
        (
            "import threading, time\ndef f(): time.sleep(0.1); print('late')\nthreading.Thread(target=f).start();"
            " print('x')"
        ),
        "",
    ),
    "ends: a daemon": (
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(9), daemon=True).start(); print('x')",
        "",
    ),
    "ends: an exception": ("print('x')\nraise ValueError('y')", ""),
    "threads: pool": (
        (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as e:"
            " print(list(e.map(lambda i: i * i, range(9))))"
        ),
        "",
    ),
    "threads: deep recursion": (
        (
            "import sys, threading\ndef main():\n sys.setrecursionlimit(10**6)\n def r(n): return 0 if n == 0 else 1 +"
            " r(n - 1)\n print(r(50000))\nthreading.stack_size(2**27)\nt = threading.Thread(target=main); t.start();"
            " t.join()"
        ),
        "",
    ),
    "threads: waits of every kind": (
        (
            "import queue, threading\nprint(threading.Event().wait(0.01),"
            " threading.Semaphore(0).acquire(timeout=0.01))\nb = threading.Barrier(2); t ="
            " threading.Thread(target=b.wait); t.start(); b.wait(); t.join()\nt = threading.Timer(0.01, print,"
            " ('timer',)); t.start(); t.join()\ntry: queue.Queue().get(timeout=0.01)\nexcept queue.Empty:"
            " print('empty')"
        ),
        "",
    ),
    "asyncio: tasks, threads, time-outs": (
        (
            "import asyncio\nasync def main():\n print(await asyncio.gather(*(asyncio.sleep(0.01, i) for i in"
            " range(3))), await asyncio.to_thread(sum, [1, 2]))\n try: await asyncio.wait_for(asyncio.sleep(5), 0.02)\n"
            " except TimeoutError: print('late')\nasyncio.run(main())"
        ),
        "",
    ),
    "asyncio: a signal": (
        (
            "import asyncio, os, signal\nasync def main():\n e = asyncio.Event();"
            " asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, e.set)\n os.kill(os.getpid(),"
            " signal.SIGUSR1); await e.wait(); print('got')\nasyncio.run(main())"
        ),
        "",
    ),
    "signals: alarm": (
        (
            "import signal\ndef h(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, h);"
            " signal.setitimer(signal.ITIMER_REAL, 0.02)\ntry:\n while True: pass\nexcept TimeoutError: print('alarm')"
        ),
        "",
    ),
    "numpy": (
        (
            "import numpy as np, sys\na = np.arange(9.).reshape(3, 3) +"
            " np.eye(3)\nprint(np.linalg.inv(a).round(3).tolist(), np.fft.fft([1, 2,"
            " 3]).round(3).tolist())\nprint(np.random.default_rng(1).integers(0, 9, 5).tolist(), np.fromfile(sys.stdin,"
            " dtype=int, sep=' ').sum(), np.loadtxt(['1 2', '3 4']).tolist())"
        ),
        "1 2 3",
    ),
    "library: time zones": (
        (
            "from datetime import datetime\nfrom zoneinfo import ZoneInfo\nprint(datetime(2024, 7, 1, 12,"
            " tzinfo=ZoneInfo('America/New_York')).isoformat())"
        ),
        "",
    ),
    "library: digests and archives": (
        (
            "import bz2, gzip, hashlib, lzma, zlib\nprint(hashlib.sha256(b'x').hexdigest()[:8], hashlib.scrypt(b'a',"
            " salt=b'b', n=2, r=1, p=1).hex()[:6])\nprint([m.decompress(m.compress(b'q' * 99)) == b'q' * 99 for m in"
            " (bz2, gzip, lzma, zlib)])"
        ),
        "",
    ),
    "library: sqlite in memory": (
        (
            "import sqlite3\nc = sqlite3.connect(':memory:'); c.execute('create table t(a)'); print(c.execute('select"
            " 1').fetchall())"
        ),
        "",
    ),
    "library: a pair of sockets": (
        "import socket\na, b = socket.socketpair(); print(repr(a.getpeername())); a.sendall(b'abc'); print(b.recv(3))",
        "",
    ),
    "library: pipes and polls": (
        (
            "import os, select\nr, w = os.pipe(); os.write(w, b'x'); p = select.poll(); p.register(r); e ="
            " select.epoll(); e.register(r)\nprint(select.select([r], [], [], 1)[0] == [r], len(p.poll(10)),"
            " len(e.poll(1)))"
        ),
        "",
    ),
    "library: large numbers": (
        (
            "import math\nprint(2**5000 % 1000007, math.factorial(500) % (10**9 + 7), math.isqrt(10**100),"
            " len(str(3**5000)))"
        ),
        "",
    ),
    "library: pickled classes": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P: x: int\nprint(pickle.loads(pickle.dumps(P(3))))",
        "",
    ),
    "library: where it lies": ("import os, sys\nprint(os.path.basename(__file__) != '', __name__, len(sys.argv))", ""),
}
FILES = {
    "files: copied with all that belongs to them": (
        (
            "import os, shutil, tempfile\nd = tempfile.mkdtemp(); f = os.path.join(d, 'a'); open(f,"
            " 'w').write('hi')\nshutil.copy2(f, f + '2'); print(open(f + '2').read())\nshutil.copytree(d, d + 'c');"
            " print(sorted(os.listdir(d + 'c'))); shutil.move(d + 'c', d + 'm'); shutil.rmtree(d + 'm')"
        ),
        "",
    ),
    "files: temporary ones": (
        (
            "import tempfile\nwith tempfile.TemporaryFile() as t: t.write(b'x'); t.seek(0); print(t.read())\nwith"
            " tempfile.NamedTemporaryFile('w+') as t: t.write('x'); t.flush(); print(open(t.name).read())"
        ),
        "",
    ),
    "files: sqlite with a journal": (
        (
            "import os, sqlite3, tempfile\nf = os.path.join(tempfile.mkdtemp(), 'x.db')\nc = sqlite3.connect(f);"
            " print(c.execute('pragma journal_mode=wal').fetchone())\nc.execute('create table t(a)'); c.execute('insert"
            " into t values(2)'); c.commit(); print(sqlite3.connect(f).execute('select * from t').fetchall())"
        ),
        "",
    ),
    "files: arrays": (
        (
            "import numpy as np, os, tempfile\nos.chdir(tempfile.mkdtemp()); np.save('a.npy', np.arange(3));"
            " print(np.load('a.npy').tolist())"
        ),
        "",
    ),
}


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend(request.param), workers=1, limits=ProgramLimits(wall=20.0, cpu=10.0)) as sandbox:
        yield sandbox


def plain(folder: Path, source: str, stdin: str) -> tuple[bytes, int]:
    """What Python itself makes of it, with its input in a file, as it is in the sandbox."""
    (folder / "program.py").write_text(source)
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    own = keep | {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    (folder / "stdin").write_text(stdin)
    with (folder / "stdin").open() as file:
        done = subprocess.run(
            [sys.executable, "program.py"], stdin=file, capture_output=True, cwd=folder, timeout=60, env=own
        )
    return done.stdout, done.returncode


@pytest.mark.parametrize("name", [*PROGRAMS, *FILES])
def test_it_does_what_it_does_in_plain_python(box: Sandbox, tmp_path: Path, name: str) -> None:
    source, stdin = (PROGRAMS | FILES)[name]
    if box.name == "landlock" and name in FILES:
        pytest.skip("landlock has no file to write to")
    if "numpy" in source and "numpy" not in box.backend.packages:  # type: ignore[attr-defined]
        pytest.skip("the Python that an unused user can read has no numpy here")
    ran = box.run_sync(source, stdin=stdin)
    assert (ran.stdout, ran.exit) == plain(tmp_path, source, stdin), ran


def test_streams_are_each_programs_own_in_calls_and_sessions_too(box: Sandbox) -> None:
    first = "import sys\nsys.stdout.reconfigure(encoding='utf-8')\n"
    called = box.run_sync(first + "def f(): print('é'); return sys.stdout.seekable()", call=Call("f"))
    assert (called.why, called.said, called.result) == ("ok", "é\n", b'{"value": false}')

    async def main() -> list[str]:
        async with box.session() as session:
            return [(await session.run(piece)).said for piece in (first, "print('é')", "sys.stdout.seekable()")]

    assert asyncio.run(main()) == ["", "é\n", "False\n"]
