"""Work that takes seconds, in a process of its own: it can be cut at any time, and the server answers meanwhile.

The process is a fork of one that has imported the library already (`forkserver`), so it begins at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

LONGEST = 60.0
"""Seconds after which work is ended."""


def _train(name: str, values: dict[str, Any], out: Connection) -> None:
    """In the process: send each readout as a message of JSON, or an error of the library as the last one."""
    import torch

    from posttrain.lab.catalog import load
    from posttrain.system.errors import PosttrainError

    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        try:
            for readout in load(name).readouts(values):
                out.send_bytes(json.dumps(readout.as_json()).encode())
        except PosttrainError as error:
            out.send_bytes(json.dumps({"error": str(error)}).encode())
        out.close()


class Trainings:
    """Starts processes that train, one at a time: a new one ends the one before."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["posttrain.lab.preload"])
        self._running: Any = None

    def warm(self) -> None:
        """Start the process that the others are forked from."""
        p = self._context.Process(target=int, daemon=True)  # any that ends at once
        p.start()
        p.join()

    def end(self) -> None:
        """End the training that runs, if there is one."""
        if self._running is not None and self._running.is_alive():
            self._running.kill()
            self._running.join()
        self._running = None

    async def lines(self, name: str, values: dict[str, Any]) -> AsyncIterator[bytes]:
        """The readouts of a lesson, a line each, as they come. Ends the process where nobody reads on."""
        self.end()
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_train, args=(name, values, theirs), daemon=True)
        self._running = process
        await asyncio.to_thread(process.start)
        theirs.close()  # only the process may hold this end: the pipe then closes when the process ends
        try:
            async with asyncio.timeout(LONGEST):
                while await _readable(ours):
                    try:
                        line = ours.recv_bytes()
                    except (EOFError, OSError):
                        break
                    yield line + b"\n"
            process.join(1)
            # One that a new training or `end` has ended is not told as a failure.
            if process.exitcode and self._running is process:
                yield json.dumps({"error": f"the training ended with exit code {process.exitcode}"}).encode() + b"\n"
        except TimeoutError:
            yield json.dumps({"error": f"the training was ended after {LONGEST:.0f} s"}).encode() + b"\n"
        finally:
            ours.close()
            if process.is_alive():
                process.kill()


async def _readable(pipe: Connection) -> bool:
    """Wait until a pipe has something or is closed; always True, so that a loop can wait in its condition."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return True
