"""An event loop in a thread of its own, for judges that wait for an engine or a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any

ENDING = 2.0
"""Most seconds for which `close` waits."""


class LoopThread:
    """An event loop in a thread of its own, started when it is first used. What runs there does not hold up the
    episodes of the loop that waits for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one = threading.Lock()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which is run in the thread."""
        with self._one:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            loop = self._loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Cancel what still runs, and stop the loop. `last` is run in it before."""
        with self._one:
            loop, self._loop = self._loop, None
        if loop is None:
            return

        async def ended() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if last is not None:
                await last()

        done = asyncio.run_coroutine_threadsafe(ended(), loop)
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        wait([done], ENDING)
