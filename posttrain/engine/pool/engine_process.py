"""An engine, or environments, in a process of its own on this machine: `serve` is what the process runs, `ProcessHost`
is the learner's side.

The process is started by command, not by `multiprocessing`, because that would import the user's program again. It ends
with the learner's process, on Linux even where it is stopped or hangs (`system.child_lifetime`). They talk by pickled
messages over a pair of sockets: (number, method, arguments) there, (number, value, error, report) back.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.worker_side import EngineEnded, EngineReport, HostStart, WorkerMethods, portable
from posttrain.system.child_lifetime import begun
from posttrain.system.terminal_output import tell

LOG_LINES = 12
"""Last lines of a process's output that an error message quotes."""
END_SECONDS = 10.0
"""Seconds that a process has to end after its connection was closed."""
CANCEL, START = "cancel", "start"
"""Messages that are no calls: cancel the call of this number; make the engine. The number of a cancel is 0."""
COMMAND = "from {module} import serve; serve({fd})  # {name}"
"""The Python program of the process. The comment shows the engine's name in a list of processes."""


def serve(fd: int) -> None:
    """Make the engine of the first message, then answer until the learner's process has closed the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner decides when the run ends
    faulthandler.enable()  # a crash of compiled code writes its stack into the log, whose end `last_words` quotes
    connection = Connection(fd)
    try:
        asyncio.run(_serve(connection))
    except (EOFError, OSError):
        os._exit(0)


async def _serve(connection: Connection) -> None:
    """Make the engine, then start a task for each call that comes. Calls run side by side."""
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str, Any]]()
    # The start is pickled on its own inside of the message: where a module is missing here, the answer can say so.
    number, _, start = pickle.loads(connection.recv_bytes())
    try:
        hosted = cast("HostStart", pickle.loads(start)).host()
    except BaseException as error:
        _send(connection, number, None, None, error)
        return
    _send(connection, number, *await hosted.answer("facts", ()))
    # A thread, because reading blocks. It begins when the engine is made: until then only the start can be answered.
    threading.Thread(target=_receive, args=(connection, loop, messages), daemon=True).start()
    calls = dict[int, asyncio.Task[None]]()
    while True:
        number, method, argument = await messages.get()
        if method == CANCEL:
            if (task := calls.get(argument)) is not None:
                task.cancel()
            continue
        calls[number] = loop.create_task(_answer(hosted, connection, number, method, argument))
        calls[number].add_done_callback(lambda _, n=number: calls.pop(n))


async def _answer(hosted: WorkerMethods, connection: Connection, number: int, method: str, arguments: Any) -> None:
    """Make one call and send its answer, or the error of an answer that cannot be sent. A cancelled call has none."""
    try:
        _send(connection, number, *await hosted.answer(method, arguments))
    except asyncio.CancelledError:
        return
    except BaseException as error:
        _send(connection, number, None, None, error)


def _send(
    to: Connection, number: int, value: Any, report: EngineReport | None, error: BaseException | None = None
) -> None:
    """Send the answer to call `number`: its value with a report, or its error."""
    message = (number, value, None if error is None else portable(error), report)
    to.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[Any]) -> None:
    """Pass on what comes. When the learner's process is gone, this one has nothing left to do."""
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        # `os._exit`, because `sys.exit` would end this thread alone.
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # else this process would live and answer nothing any more
            tell(traceback.format_exc(), file=sys.stderr)
            os._exit(1)
        loop.call_soon_threadsafe(messages.put_nowait, message)


class ProcessHost(EngineHost):
    """`parent_side.EngineHost` over a process. It begins at once; the first answer, to `started`, comes when it can
    sample.

    Args:
        start: a pickled `worker_side.HostStart`.
        threads: of torch in the process.
        cores: the CPU cores that it may use; None: those of this process.
    """

    def __init__(self, name: str, start: bytes, *, threads: int, cores: frozenset[int] | None) -> None:
        super().__init__(name)
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-engine-")
        self._log = Path(self._folder.name) / "log"
        ours, theirs = socket.socketpair()
        with self._log.open("wb") as log:
            self._process = begun(
                COMMAND.format(module=__name__, fd=theirs.fileno(), name=name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        self.pid = self._process.pid
        # As long as this process held the child's end too, the end of the child would not be the end of the stream.
        theirs.close()
        if cores is not None:
            os.sched_setaffinity(self.pid, cores)
        self._killed = ""
        """Why this process has ended it."""
        atexit.register(self.close)
        self._connection = Connection(ours.detach())
        # A thread writes: a socket whose other side does not read would else block the event loop of the learner.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        number, self.started = self._begin()
        self._outgoing.put(pickle.dumps((number, START, start)))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        number, future = self._begin()
        if not future.done():
            future.add_done_callback(lambda f: self._cancelled(number) if f.cancelled() else None)
            self._outgoing.put(pickle.dumps((number, method, arguments), pickle.HIGHEST_PROTOCOL))
        return future

    def _cancelled(self, number: int) -> None:
        self._drop(number)
        self._outgoing.put(pickle.dumps((0, CANCEL, number)))

    def kill(self, why: str) -> None:
        # Before the end, which the reader may see first.
        self._killed = self._killed or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self.die(self._cause())

    def close(self) -> None:
        atexit.unregister(self.close)
        # Before the connection ends, so that calls that still wait get this cause and not the end of the stream.
        self.die("it was closed at the end of the run")
        self._outgoing.put(None)
        self._shut()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The threads first, then the descriptor: its number could be given to another file while they still use it.
        for thread in self._threads:
            thread.join(END_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.close()
        self._folder.cleanup()

    def _shut(self) -> None:
        """Close both directions, so that reads and writes on both sides stop."""
        if self._connection.closed:
            return
        # close() does not wake a thread that reads or writes on the same descriptor; shutdown does. It is done on a
        # copy of it, because the socket object closes what it was given.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """What a thread runs: sends the messages in their order, until None comes."""
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                return  # the reader says why

    def _read(self) -> None:
        """What a thread runs: passes answers on, until the process closes the connection."""
        while True:
            try:
                number, value, error, report = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self.die(self._cause())
                return
            except BaseException as error:  # else no call would ever be answered
                self.kill(f"it was ended, as what it answered could not be read ({type(error).__name__}: {error})")
                return
            # The process lives but its engine does not: its calls raise EngineDied and are asked again.
            if isinstance(error, EngineEnded):
                self.kill(str(error))
            self._end(number, value, error, report)

    def _cause(self) -> str:
        """Returns the reason why the process has closed its end of the connection."""
        try:
            # The stream ends a moment before the exit code is there.
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            cause = f"it closed its connection and goes on as process {self.pid}"
        else:
            end = f"it ended with exit code {code}" if code >= 0 else f"it was killed by {signal_name(-code)}"
            cause = self._killed or end
        return cause + self._memory + last_words(self._log)


def last_words(log: Path) -> str:
    """The last lines of a file with what a process printed, as the end of a message; '' where there are none."""
    with contextlib.suppress(OSError):
        if lines := log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            return ". Its last words:\n" + "\n".join(lines)
    return ""


def signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (the system may have run out of memory)" if number == signal.SIGKILL else name
