"""Run the server: listening address, banner, and shutdown.

After the first SIGINT or SIGTERM no connection is accepted, and open requests have `GRACE` seconds to finish. A second
signal ends them at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiohttp import web

from posttrain.serve.caller_limits import CallerLimits, check_address, most_connections, quiet
from posttrain.serve.connections import Listener, bind
from posttrain.serve.intake import ServedModel
from posttrain.serve.routes import Server
from posttrain.system.errors import ConfigError
from posttrain.system.hostile_callers import loopback, raise_file_limit

GRACE = 10.0
"""Seconds that requests have to finish after the first signal."""
FLUSH = 1.0
"""Seconds that a caller has to read the rest after its answers were ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@asynccontextmanager
async def listening(server: Server, host: str, port: int) -> AsyncIterator[str]:
    """Listen; yields the base address. At the end of the block open requests have `GRACE` seconds to finish.

    Raises:
        ConfigError: the address is in use, or is not an address of this machine.
    """
    loop = asyncio.get_running_loop()
    # handler_cancellation: a caller that leaves cancels its handler, and with it the tokens nobody will read.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=GRACE)
    await runner.setup()
    assert runner.server is not None
    try:
        sockets = await bind(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a text that is no host name, such as a..b
        await runner.cleanup()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use: choose another with --port (0: any free one)"
            ) from None
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port}: {why}") from error
    listener = Listener(runner.server, server.limits)

    def hang_up() -> None:
        loop.call_later(FLUSH, listener.cut)

    # After `server.cut` the answers say why they ended; a caller that does not read that is cut off after FLUSH.
    server.hang_up = hang_up
    with quiet():
        listener.open(sockets)
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{sockets[0].getsockname()[1]}/v1"
        finally:
            # No new connections; open requests go on until they end or GRACE is over, while `cleanup` waits for
            # them. Then the connections, and last the threads that read requests.
            listener.close()
            # After GRACE the answers are ended by the server, so that each says why; the runner would only drop them.
            end = loop.call_later(GRACE, server.cut)
            await runner.cleanup()
            end.cancel()
            listener.cut()
            server.close()


@dataclass
class Ending:
    """The first signal that arrived."""

    first: asyncio.Event
    number: int = 0
    """Its number; 0 until it has arrived."""


@contextmanager
def signals(cut: Callable[[], None]) -> Iterator[Ending]:
    """Handle signals in the running loop; the second one calls `cut`."""
    loop = asyncio.get_running_loop()
    ending = Ending(asyncio.Event())

    def came(number: int) -> None:
        # The first signal only asks. A second one means that the user does not want to wait.
        if ending.number:
            cut()
        ending.number = ending.number or number
        ending.first.set()

    # add_signal_handler replaces what the process had, and its removal would leave the default.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, came, number)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def serve(
    served: ServedModel,
    host: str,
    port: int,
    facts: tuple[str, ...],
    say: Callable[[str], None],
    limits: CallerLimits | None = None,
    token_env: str | None = None,
) -> int:
    """Serve until a signal arrives; returns its exit code. Raises this process's limit on open files to the maximum.

    Args:
        facts: lines about the model, for the banner.
        say: prints a line.
        token_env: the environment variable that holds the token, if one does.
    """
    check_address(host, served.token)
    limits = limits or CallerLimits()
    files = raise_file_limit()
    server = Server(served, limits)
    with signals(server.cut) as ending:
        async with listening(server, host, port) as url:
            for line in banner(served, url, host, (*facts, capacity(limits, files)), token_env):
                say(line)
            await ending.first.wait()
            if server.running:
                say(f"stopping: {len(server.running)} requests have {GRACE:g} s to end; Ctrl-C again ends them now")
        say("stopped")
    return 128 + ending.number


def capacity(limits: CallerLimits, files: int) -> str:
    """The banner's line about how many callers are served at once."""
    most = most_connections(limits)
    line = f"callers: {most:,} connections at once, {min(most, limits.per_address):,} from one address"
    if most < limits.connections:
        line += f"; fewer than --limit connections={limits.connections}, as this process may open {files:,} files"
    return line


def banner(
    served: ServedModel, url: str, host: str, facts: tuple[str, ...], token_env: str | None = None
) -> Iterator[str]:
    """Lines about the model, the address, and an example request.

    Args:
        token_env: the environment variable that holds the token; it is then named and its value not printed.
    """
    yield from facts
    chat = bool(served.renderer.tokenizer.chat_template)
    paths = (
        "/chat/completions and /completions" if chat else "/completions (no chat: the tokenizer has no chat template)"
    )
    yield f"serving {served.name} at {url}: {paths}"
    # A token from the environment stays out of the terminal and its logs.
    shown_token = f"the value of {token_env}" if token_env is not None else served.token
    yield f"token: {shown_token}" if served.token else "token: none; everybody on this machine is served"
    if not loopback(host):
        yield (
            f"note: {host} is reached from other machines, and plain HTTP shows them token and texts; put TLS in front"
            " of it"
        )
    # 0.0.0.0 and :: are no addresses that a client can ask.
    base = url.replace(f"[{host}]", "127.0.0.1").replace(host, "127.0.0.1") if host in ("0.0.0.0", "::") else url
    header = f"'Authorization: Bearer {served.token}'" if token_env is None else f'"Authorization: Bearer ${token_env}"'
    auth = f"-H {header} " if served.token else ""
    what = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    # In a shell's single quotes a quote is written '\''.
    body = json.dumps({"model": served.name, **what, "max_tokens": 32}).replace("'", r"'\''")
    yield (
        f"try: curl {base}/{'chat/' if chat else ''}completions {auth}-H 'Content-Type: application/json' -d '{body}'"
    )
    yield "stop with Ctrl-C"
