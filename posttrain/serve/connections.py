"""Limits on connections: which are accepted, and when one is closed. aiohttp parses requests and writes answers.

aiohttp alone has no time-out for endless headers or for a caller that does not read, and no limit on connections. It
accepts through asyncio, which logs a line per connection in the backlog whenever no file descriptor is left.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

from aiohttp import web

from posttrain.serve.caller_limits import LOG, CallerLimits, most_connections
from posttrain.serve.refusal import Refusal, answer
from posttrain.system.hostile_callers import network

BACKLOG = 4096
"""Connections that may wait to be accepted. The usual 128 would drop some of a thousand simultaneous callers."""
AT_ONCE = 64
"""Most connections accepted before open ones are read again."""
SWEEP = 0.5
"""Seconds between two searches for connections that have taken too long."""
YOUNG = 3.0
"""Seconds of silence before a connection may be closed for a new one; honest callers on a busy machine are silent
too."""
LOOKED_AT = 16
"""Silent connections that are considered for closing, the longest silent first."""
LINGER = 2.0
"""Seconds in which the rest of a refused body is read and discarded, so that the caller receives the refusal."""
WRITTEN = 64 << 10
"""Bytes that a caller must read in `CallerLimits.write_seconds`."""

Phase = Literal["idle", "headers", "body", "answer"]
"""Event that a connection waits for: the next request, the rest of its headers, its body, our answer."""


class Connection(web.RequestHandler):
    """aiohttp's handler of one connection, with its phase and the time since it began."""

    def __init__(self, listener: Listener, address: str, sock: socket.socket, **settings: Any) -> None:
        super().__init__(listener.server, **settings)
        self.address, self._sock = address, sock
        self.phase: Phase = "headers"
        self._clock: Callable[[], float] = self._loop.time
        self.since = self._clock()
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._stuck: tuple[float, int] | None = None
        """While the caller does not read fast enough: (time, bytes waiting to be written) at its last progress."""

    @property
    def silent(self) -> bool:
        """True where the connection has no request at present."""
        return self.phase in ("idle", "headers")

    def unread(self) -> bool:
        """True where data has arrived that has not been read yet: the caller has sent a request."""
        try:
            # MSG_PEEK leaves the byte in the socket.
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except OSError:  # nothing has arrived (the socket does not block), or the connection is broken
            return False

    def now(self, phase: Phase) -> None:
        """Begin another phase."""
        self.phase, self.since = phase, self._clock()
        self._listener.changed(self)

    def overdue(self) -> bool:
        """True if the phase has taken too long, the caller does not read, or it has sent so much ahead of our answer
        that reading was paused."""
        now, limits, transport = self._clock(), self._listener.limits, self._transport
        # Reading `WRITTEN` bytes is progress, and the time begins again. Who reads less in `write_seconds` is cut off.
        if self._stuck is not None and transport is not None:
            when, size = self._stuck
            unwritten = transport.get_write_buffer_size()
            if unwritten <= size - WRITTEN:
                self._stuck = now, unwritten
            elif now - when > limits.write_seconds:
                return True
        # An answer may take as long as it needs. But if the caller sends more and more meanwhile, asyncio stops
        # reading, and would not notice that the caller has gone. Such a connection is overdue.
        if self.phase == "answer":
            return transport is not None and not transport.is_closing() and not transport.is_reading()
        seconds = {"idle": limits.idle_seconds, "headers": limits.header_seconds, "body": limits.body_seconds + LINGER}
        return now - self.since > seconds[self.phase]

    def cut(self) -> None:
        """Abort the connection; unwritten data is lost."""
        self._listener.left(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if not self._listener.holds(self):  # closed for another connection before it began
            self._transport.abort()  # type: ignore[union-attr]
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The first byte of the next request. The time for its headers begins.
        if data and self.phase == "idle":
            self.now("headers")
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._clock(), 0 if self._transport is None else self._transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck = None

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> Any:
        """Write the answer, then wait for the next request."""
        if isinstance(resp, web.HTTPException):  # aiohttp's own, raised before our handlers were called
            resp = answer(Refusal(str(resp.reason), status=resp.status))
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.now("idle")

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """Answer invalid HTTP like every other refusal, without a line in the log. A caller that has gone gets no
        answer and causes no line either."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            LOG.error("%s %r", request.method, request.path, exc_info=exc)
        # If an answer has begun, a second status line in the middle would be read as its text.
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so nothing else can be said")
        reason = (message or "a bug in the server, whose log has the traceback").strip().partition("\n")[0].rstrip(":")
        response = answer(Refusal(reason if status >= 500 else f"this is no HTTP request ({reason})", status=status))
        response.force_close()
        return response


class Listener:
    """Accepts connections for one application, within the limits. aiohttp's `server` handles requests."""

    def __init__(self, server: web.Server, limits: CallerLimits) -> None:
        self.server, self.limits = server, limits
        self.most = most_connections(limits)
        self._loop = asyncio.get_running_loop()
        # These dictionaries are ordered sets, changed in constant time, with the oldest entry first.
        self._held: dict[Connection, None] = {}
        self._count: Counter[str] = Counter()
        self._silent: dict[str, dict[Connection, None]] = {}
        """Silent connections by address, the longest silent first."""
        self._sockets: list[socket.socket] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, connection: Connection) -> bool:
        return connection in self._held

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Begin to accept from listening sockets. They are closed with the listener."""
        self._sockets = list(sockets)
        self._listen()
        self._sweep()

    def close(self) -> None:
        """Accept no more connections. Open ones remain, with their time limits, until `cut`."""
        self._pause()
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def cut(self) -> None:
        """Abort all connections and stop the time limits."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._held):
            connection.cut()

    def changed(self, connection: Connection) -> None:
        """Record that a connection became silent or has a request."""
        silent = self._silent.setdefault(connection.address, {})
        # A silent connection is moved to the end, because its silence begins now: the order is kept without sorting.
        silent.pop(connection, None)
        if connection.silent and connection in self._held:
            silent[connection] = None
        if not silent:
            del self._silent[connection.address]

    def left(self, connection: Connection) -> None:
        """Record that a connection has ended."""
        if connection in self._held:
            del self._held[connection]
            self._count[connection.address] -= 1
            if not self._count[connection.address]:
                del self._count[connection.address]
            self.changed(connection)

    def _sweep(self) -> None:
        """Cuts the connections that are overdue, and calls itself again after `SWEEP` seconds."""
        self._sweeping = self._loop.call_later(SWEEP, self._sweep)
        for connection in [c for c in self._held if c.overdue()]:
            connection.cut()

    def _listen(self) -> None:
        self._resume = None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _pause(self, seconds: float | None = None) -> None:
        """Leave new connections in the backlog, for `seconds` where given."""
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
        if self._resume is not None:
            self._resume.cancel()
        self._resume = None if seconds is None else self._loop.call_later(seconds, self._listen)

    def _accept(self, sock: socket.socket) -> None:
        """Accept waiting connections, as far as the limits allow."""
        # The number is bounded, so that open connections are served too when very many callers connect at once.
        for _ in range(AT_ONCE):
            if len(self._held) >= self.most and not self._make_room():
                self._pause(SWEEP / 10)  # room comes when any connection ends, and nothing tells of that
                return
            try:
                wire, peer = sock.accept()
            # No connection waits any more, or the caller has gone while it waited.
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                LOG.warning(
                    "connections wait: %s. Lower --limit connections=%d, or raise the limit on files", error, self.most
                )
                # No descriptor is left. Without a pause the loop would call this method again at once, without end.
                self._make_room()
                self._pause(SWEEP)
                return
            address = network(peer[0])
            if self._count[address] < self.limits.per_address or self._make_room(address):
                self._admit(wire, address)
            else:
                message = "%s has %d connections, all being answered or just begun: a further one was refused"
                LOG.warning(message, address, self._count[address])
                refuse(wire)

    def _admit(self, wire: socket.socket, address: str) -> None:
        """Counts a new connection and begins to handle it."""
        wire.setblocking(False)
        # A compressed body is refused by its header (`Intake.check`), and never inflated before.
        settings = {"access_log": None, "lingering_time": LINGER, "auto_decompress": False}
        connection = Connection(
            self, address, wire, loop=self._loop, keepalive_timeout=self.limits.idle_seconds, **settings
        )
        # It is counted before it begins, so that the next `accept` in the same loop counts it too.
        self._held[connection] = None
        self._count[address] += 1
        self.changed(connection)
        task = self._loop.create_task(self._begin(connection, wire))
        # asyncio keeps only weak references to tasks, so the task is kept here until it is done.
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, connection: Connection, wire: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, wire)
        except OSError as error:  # it was closed before it began
            self.left(connection)
            wire.close()
            LOG.debug("a connection did not begin: %s", error)

    def _make_room(self, address: str | None = None) -> bool:
        """Close the longest silent connection: of `address`, or else of the address with the most. False where none of
        those that are considered may be closed."""
        # At the limit of all, the address with the most loses one. So one caller cannot push out others.
        if address is None:
            address = max(self._silent, key=lambda a: self._count[a], default=None)
        # The first connection is silent the longest, but it may have sent data that was not read yet. Only a few
        # connections are considered, because at the limit this runs for every new connection.
        latest = self._loop.time() - YOUNG
        for connection in islice(self._silent.get(address or "", ()), LOOKED_AT):
            if connection.since <= latest and not connection.unread():
                connection.cut()
                return True
        return False


def refuse(wire: socket.socket) -> None:
    """Send 429 to a connection that is not accepted, if that is possible at once, and close it."""
    message = Refusal("too many connections from this address", status=429).bytes()
    with suppress(OSError), wire:
        wire.setblocking(False)
        wire.send(message)
        wire.shutdown(socket.SHUT_WR)
        wire.recv(1 << 16)  # unread data would make the close discard the answer


async def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at every address of a host name, all with one port.

    Raises:
        OSError: the name has no address, or an address cannot be bound.
    """
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError | None = None
    for family, kind, proto, _, address in dict.fromkeys(addresses):
        # For port 0 the system chooses a port at the first address, and the other addresses use the same one.
        chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
        try:
            sockets.append(_listening(family, kind, proto, (address[0], chosen, *address[2:])))
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    # A name may have addresses that belong to other machines. They are left out, if at least one address was bound. A
    # port in use is an error at any address: callers would reach the other program there.
    if failure is not None and (not sockets or failure.errno == errno.EADDRINUSE):
        for sock in sockets:
            sock.close()
        raise failure
    return sockets


def _listening(family: int, kind: int, proto: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Else a socket for all IPv6 addresses takes the port of IPv4 too, and binding that one fails.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
