"""Ranks that do something wrong while they meet, and one that sends a pickle which calls a function."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from posttrain.core.errors import EngineError
from posttrain.engine.process_ranks import joined
from posttrain.engine.rank_keys import FarKeys
from posttrain.engine.rank_orders import met
from posttrain.engine.signed import VARIABLE


class DiesAfter(FarKeys):
    """Ends its process before it says one thing more than so many."""

    left = 0

    def set(self, key: str, value: Any) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        super().set(key, value)


def serve(rank: int, world: int, fd: int, seconds: float, hangs: bool, after: int, replicas: int = 1) -> None:
    """What `RankProcesses` runs: a rank that hangs or dies while it meets the others."""
    connection = Connection(fd)
    key, store = connection.recv_bytes(), DiesAfter(connection)
    store.left = after
    if hangs:
        time.sleep(600)
    with met(store, rank, world, seconds, replicas, key=key, local=True):
        time.sleep(600)


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def exchange(rank: int, folder: Path, key: str, how: str) -> None:
    """One of two ranks. The last one has another key and sends `Touches`; the first one writes what it was told."""
    os.environ[VARIABLE] = key
    bad = Touches(folder / "called") if rank else 0
    with joined(rank, 2, f"file://{folder / 'meet'}", seconds=60) as ranks:
        try:
            match how:
                case "every":
                    ranks.every(bad)
                case "broadcast":
                    dist.broadcast_object_list([bad], src=1)
                case "gather":
                    dist.gather_object(bad, [None, None] if rank == 0 else None, dst=0)
                case _:
                    dist.scatter_object_list([None], [bad, 0] if rank else None, src=1)
        except EngineError as error:
            (folder / f"told-{rank}").write_text(str(error))
