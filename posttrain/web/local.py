"""A server for pages of this machine: it listens on 127.0.0.1 alone, opens the browser, and ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import webbrowser
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from aiohttp import web

from posttrain.system.errors import ConfigError
from posttrain.web.guard import Guard

GRACE = 1.0
"""Seconds that open requests have to finish when the server ends."""


def static_files(*packages: str) -> dict[str, Path]:
    """The files of the `static` folders of these packages, by name. Of two files with one name the later one counts."""
    folders = [Path(str(resources.files(p))) / "static" for p in packages]
    return {f.name: f for folder in folders for f in sorted(folder.iterdir()) if f.suffix in (".js", ".css", ".svg")}


def bound_socket(port: int) -> socket.socket:
    """A socket on 127.0.0.1. Raises ConfigError where the port is taken."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: a port lies in 0..65535 (0: any free one)")
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Without this option the port of a server that has just ended is refused for a minute.
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind(("127.0.0.1", port))
    except OSError as error:
        s.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
        raise ConfigError(f"port {port} of 127.0.0.1 {why}: choose another with --port (0: any free one)") from None
    return s


async def serve_locally(
    app: web.Application, guard: Guard, at: socket.socket, path: str, open_browser: bool, say: Callable[[str], None]
) -> int:
    """Serve until SIGINT or SIGTERM; returns 128 and the signal's number.

    Args:
        at: a socket of `bound_socket`.
        path: the page that is opened first.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        done.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=GRACE, handler_cancellation=True)
    await runner.setup()
    # The port is set before the first request, because hosts, cookie and address contain it. The system may have chosen
    # it.
    guard.port = at.getsockname()[1]
    try:
        await web.SockSite(runner, at).start()
        address = guard.address(path)
        say(f"open {address}")
        if open_browser:
            # A machine without a screen has no browser; the address is printed anyway.
            with contextlib.suppress(Exception):
                await asyncio.to_thread(webbrowser.open, address)
        say("Ctrl-C ends it")
        await done.wait()
    finally:
        await runner.cleanup()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 128 + signals[0]
