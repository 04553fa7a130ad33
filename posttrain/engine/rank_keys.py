"""Where the ranks of one machine meet: a store of keys in the memory of rank 0, which the others reach over pairs of
sockets that rank 0 gave them. Nobody else can reach it, and nothing listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

LOOK_SECONDS = 0.2
"""Between two looks whether a rank is gone, while somebody waits for a key."""
METHODS = ("set", "get", "add", "check", "wait", "delete_key")
"""What a rank may ask of the store."""


class LeadKeys(Store):
    """The store, in the process of rank 0.

    Args:
        seconds: how long a key is waited for at least: a process may need longer to begin than an exchange may take.
        gone: which rank has ended, in words; '' while all live.
    """

    def __init__(self, seconds: float, gone: Callable[[], str]) -> None:
        super().__init__()
        self._held: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._seconds, self._gone = seconds, gone

    def serve(self, connection: Connection) -> None:
        """Answer one rank, in a thread, until it has closed its end."""
        threading.Thread(target=self._answer, args=(connection,), name="keys of a rank", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                method, given = connection.recv()
                try:
                    assert method in METHODS
                    connection.send((getattr(self, method)(*given), ""))
                except RuntimeError as error:
                    connection.send((None, str(error)))
        except (EOFError, OSError):
            connection.close()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._held[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._held[key]

    def add(self, key: str, value: int) -> int:
        with self._changed:
            found = int(self._held.get(key, b"0")) + value
            self.set(key, str(found))
        return found

    def check(self, keys: list[str]) -> bool:
        return all(key in self._held for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = max(self._seconds, 0.0 if timeout is None else timeout.total_seconds())
        last = time.monotonic() + seconds
        with self._changed:
            while not self.check(keys):
                if how := self._gone():
                    raise dist.DistStoreError(how)
                if time.monotonic() > last:
                    raise dist.DistStoreError(f"Timed out after {seconds:g} s: no rank has said {', '.join(keys)}")
                self._changed.wait(LOOK_SECONDS)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._held.pop(key, None) is not None


class FarKeys(Store):
    """The store, as another rank sees it. Errors mean that a key did not come, or that rank 0 is gone."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection, self._lock = connection, threading.Lock()

    def asked(self, method: str, *given: Any) -> Any:
        try:
            with self._lock:
                self._connection.send((method, given))
                value, wrong = self._connection.recv()
        except (EOFError, OSError) as error:
            raise dist.DistStoreError("rank 0 is gone") from error
        if wrong:
            raise dist.DistStoreError(wrong)
        return value


for _method in METHODS:
    setattr(FarKeys, _method, partialmethod(FarKeys.asked, _method))
