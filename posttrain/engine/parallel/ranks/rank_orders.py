"""Tells the other ranks what rank 0 wants them to compute next, and finds out which rank failed.

A store of keys, a file of the run's own or in the process of torchrun, says that there is a next order; its content
goes to all ranks by broadcast, signed (`signed_messages`). So a rank can wait for an order as long as rollouts take,
and only exchanges have a time-out. Each rank notes in the store which order it began and ended, and why it failed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks, in_copies
from posttrain.engine.parallel.ranks.signed_messages import signed
from posttrain.engine.pool.pool_waits import in_thread
from posttrain.system.errors import EngineError

LONG = timedelta(days=365)
"""How long a rank waits for its next order. It ends with the store, or with torchrun."""
END = "end"
"""Stands in place of an order when there will be none any more."""
HERE = "here/{}"
"""The key by which a rank says that it has begun."""
ORDER = "order/{}"
"""The key that says that the order of this number exists."""
FAILED = "failed/{}"
"""The key by which a rank says why it ends."""
AT = "at/{}"
"""The key by which a rank says which order it began or ended."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface at which gloo listens."""
LOOK_SECONDS = 0.05
"""Seconds between two looks whether a rank is gone, while ranks meet."""
MEET_SECONDS = 120.0
"""Least seconds that ranks have to meet, also where an exchange may take fewer."""


class RankLost(EngineError):
    """A rank died, failed or stands still, so the others cannot go on. The message names the first cause."""


class OrdersEnded(Exception):
    """Rank 0 has no more work."""


@contextmanager
def met(
    store: Store,
    rank: int,
    world: int,
    seconds: float,
    replicas: int = 1,
    *,
    key: bytes,
    local: bool = False,
    gone: Callable[[], str] = str,
) -> Iterator[ProcessRanks]:
    """Inside, this process is one of `world` ranks that share a store. RankLost where they did not meet.

    Args:
        seconds: how long an exchange may wait for a rank.
        key: with which ranks sign what they send each other as pickles.
        local: all ranks are on this machine: listen at its loopback address alone.
        gone: returns which rank has ended, in words; '' while all live, as its default, `str`, always does.
    """
    with signed(key):
        # Only while they meet, which is when gloo reads the variable.
        with _loopback() if local else contextlib.nullcontext():
            ranks = _meet_watched(
                lambda: _meet(store, rank, world, seconds, replicas), max(seconds, MEET_SECONDS), gone
            )
        try:
            yield ranks
        finally:
            dist.destroy_process_group()


def _meet(store: Store, rank: int, world: int, seconds: float, replicas: int) -> ProcessRanks:
    """Meet the other ranks in the store, and make a group with them."""
    # torch's own meeting waits for each rank in turn and cannot be interrupted. All say that they are here first, so it
    # begins only when none is missing.
    store.set(HERE.format(rank), "1")
    store.wait([HERE.format(r) for r in range(world)], timedelta(seconds=max(seconds, MEET_SECONDS)))
    # A prefix, so that torch's keys and the keys of the orders do not meet in the same store.
    exchange_store = PrefixStore("exchange", store)
    # torch names groups by this count. A process that met before, or failed to, would name them otherwise than others.
    c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
    dist.init_process_group(
        "gloo", store=exchange_store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    return in_copies(seconds, replicas)


def _meet_watched(work: Callable[[], ProcessRanks], seconds: float, gone: Callable[[], str]) -> ProcessRanks:
    """Returns the result of `work`, which a thread runs. RankLost where it takes too long or a rank is gone: while
    torch connects ranks, neither a signal nor the end of a rank interrupts it."""
    future = in_thread(work)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                why = gone() or ("" if time.monotonic() < deadline else f"not all were there within {seconds:g} s")
            except RuntimeError as error:
                why = gone() or str(error)
            if why:
                raise RankLost(f"the ranks did not meet: {why}. Nothing was begun: start again")
    # Also where the user interrupts: the group may have been made by the thread a moment before.
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


@contextmanager
def _loopback() -> Iterator[None]:
    """Inside, gloo listens at this machine's loopback interface alone."""
    before, names = os.environ.get(INTERFACE), [name for _, name in socket.if_nameindex()]
    if loopback := next((n for n in ("lo", "lo0") if n in names), None):
        os.environ[INTERFACE] = loopback
    try:
        yield
    finally:
        if loopback and before is None:
            del os.environ[INTERFACE]
        elif loopback and before is not None:
            os.environ[INTERFACE] = before


class RankOrders:
    """The orders of rank 0, as each rank sees them."""

    def __init__(self, ranks: ProcessRanks, store: Store) -> None:
        self.ranks, self._store = ranks, store
        self.number = 0
        """Number of the last order."""

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def send(self, what: str, work: Any) -> None:
        """Give an order to the other ranks. `what`: in words, for messages."""
        if self.ranks.world == 1:
            return
        self.number += 1
        # The key first, then the broadcast. A rank waits at the store without a time-out; the key tells it to come to
        # the exchange, which has one.
        self._store.set(ORDER.format(self.number), what)
        dist.broadcast_object_list([work], group_src=0, group=self.ranks.group)
        # Every rank was in the broadcast of this order, so none can still want the key of the one before. The store
        # does not grow with the steps of a run.
        if self.number > 1:
            self._store.delete_key(ORDER.format(self.number - 1))

    def end(self) -> None:
        """Tell the ranks that wait for an order that there is none."""
        with contextlib.suppress(RuntimeError):  # the process with the store may be gone
            self._store.set(ORDER.format(self.number + 1), END)

    def failed(self) -> dict[int, str]:
        """Returns the reasons why ranks failed, by rank, of those that said so."""
        return {rank: why for rank, why in self._said(FAILED) if why is not None}

    def standing(self) -> dict[int, str]:
        """Returns the state of each other rank: the words of its last note."""
        unheard = "has not begun any order"
        return {rank: unheard if note is None else note for rank, note in self._said(AT)}

    def _said(self, key: str) -> Iterator[tuple[int, str | None]]:
        """(rank, what it stored under this key, or None) of each other rank, while the store is there."""
        with contextlib.suppress(RuntimeError):
            for rank in range(1, self.ranks.world):
                # `check` first, because `get` of a key that is not there would wait for it.
                there = self._store.check([key.format(rank)])
                yield rank, self._store.get(key.format(rank)).decode() if there else None

    # --- the others ---------------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """Wait for the next order and return its work. OrdersEnded where there is none."""
        key = ORDER.format(self.number + 1)
        try:
            self._store.wait([key], LONG)
            what = self._store.get(key)
        except RuntimeError as error:  # the process with the store is gone
            raise OrdersEnded from error
        if what.decode() == END:
            raise OrdersEnded
        self.number += 1
        # Before the broadcast, so that rank 0 can tell a rank that never came from one that stood still.
        self._note(f"began order {self.number} ({what.decode()})")
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group_src=0, group=self.ranks.group)
        return box[0]

    def done(self) -> None:
        """The work of an order is done."""
        self._note(f"ended order {self.number}")

    def fail(self, why: str) -> None:
        """Say why this rank ends."""
        with contextlib.suppress(RuntimeError):  # as in `end`
            self._store.set(FAILED.format(self.ranks.rank), why)

    def _note(self, words: str) -> None:
        """Note the state of this rank in the store, for `standing`."""
        self._store.set(AT.format(self.ranks.rank), words)
