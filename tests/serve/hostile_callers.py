"""Callers in a process of their own, so that their files are not the server's. Standard library only.

python hostile_callers.py hold HOST PORT COUNT TEXT     connects COUNT times, sends TEXT on each, holds them until its
stdin ends python hostile_callers.py ask HOST PORT COUNT TEXT      sends TEXT on COUNT connections at once; prints what
came back, as JSON
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import time
from collections import Counter


def hold(host: str, port: int, count: int, text: bytes) -> None:
    held = []
    for _ in range(count):
        wire = socket.create_connection((host, port), timeout=10)
        wire.sendall(text)
        held.append(wire)
    print("held", flush=True)
    sys.stdin.read()


async def ask(host: str, port: int, count: int, text: bytes) -> None:
    """Prints {"status": how often each, "seconds": the slowest, "errors": how often each}."""
    status: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    slowest = 0.0

    async def one() -> None:
        nonlocal slowest
        start = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(text)
            line = await reader.readline()
            status[line.split()[1].decode() if line else "nothing"] += 1
            writer.close()
        except OSError as error:
            errors[type(error).__name__] += 1
        slowest = max(slowest, time.monotonic() - start)

    await asyncio.gather(*[one() for _ in range(count)])
    print(json.dumps({"status": status, "errors": errors, "seconds": slowest}))


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    what, host, port, count, text = sys.argv[1:]
    sent = text.encode().decode("unicode_escape").encode("latin-1")
    if what == "hold":
        hold(host, int(port), int(count), sent)
    else:
        asyncio.run(ask(host, int(port), int(count), sent))
