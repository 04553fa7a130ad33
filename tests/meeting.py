"""Ranks that do something wrong while they meet, and one that sends a pickle which calls a function."""

from __future__ import annotations

import os
import signal
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store

from posttrain.engine.parallel.ranks.process_ranks import joined
from posttrain.engine.parallel.ranks.rank_orders import met
from posttrain.engine.parallel.ranks.rank_processes import KEY
from posttrain.engine.parallel.ranks.signed_messages import VARIABLE
from posttrain.system.errors import EngineError


class DiesAfter(Store):
    """Ends its process before it says one thing more than so many."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__()
        self.inner, self.left = inner, left

    def asked(self, method: str, *given: Any) -> Any:
        if method == "set" and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= method == "set"
        return getattr(self.inner, method)(*given)


for _method in ("set", "get", "add", "check", "wait"):
    setattr(DiesAfter, _method, partialmethod(DiesAfter.asked, _method))


def serve(rank: int, world: int, path: str, seconds: float, hangs: bool, after: int, replicas: int = 1) -> None:
    """What `RankProcesses` runs: a rank that hangs or dies while it meets the others."""
    store = FileStore(path, -1)
    if hangs:
        time.sleep(600)
    with met(DiesAfter(store, after), rank, world, seconds, replicas, key=store.get(KEY), local=True):
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
