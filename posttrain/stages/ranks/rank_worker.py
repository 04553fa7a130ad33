"""A rank other than rank 0: it does what rank 0 orders, until rank 0 ends the orders. It writes no record and samples
nothing. In each event of a trainer's step it does what the observers of rank 0 order there."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from posttrain.algorithm.loss.losses import Loss
from posttrain.core.batch import Batch
from posttrain.engine.parallel.ranks.rank_orders import OrdersEnded, RankOrders, Store, met
from posttrain.engine.parallel.ranks.rank_processes import KEY
from posttrain.role.events import Event, Observers, PackedEvent
from posttrain.role.learner_passes import Needs
from posttrain.role.trainer import NonFiniteGradient
from posttrain.stages.ranks.rank_state import RankState
from posttrain.system.errors import PosttrainError
from posttrain.system.terminal_output import tell

EXCHANGE = "an exchange with another rank failed"
"""Begins the reason of a rank that failed only because another rank had failed."""


@dataclass(frozen=True)
class Proceed:
    """Says that rank 0's observers have finished an event. `value`: what they returned."""

    value: Any = None


def serve(rank: int, world: int, path: str, seconds: float, replicas: int = 1) -> None:
    """The main function of a process that the run has started on this machine."""
    store = FileStore(path, -1)  # -1: torch counts no users of the file
    sys.exit(work(store, rank, world, seconds, replicas, key=store.get(KEY), local=True))


def work(
    store: Store, rank: int, world: int, seconds: float, replicas: int = 1, *, key: bytes, local: bool = False
) -> int:
    """Do what rank 0 orders; returns the exit code of the process. Arguments: as of `rank_orders.met`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides when the run ends
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    with met(store, rank, world, seconds, replicas, key=key, local=local) as ranks:
        orders = RankOrders(ranks, store)
        try:
            RankWorker(RankState(ranks), orders).until_ended()
        except OrdersEnded:
            return 0
        except BaseException as error:
            # The reason goes into the store, which still works when exchanges do not. Rank 0 reads it there.
            orders.fail(_reason(error))
            if not isinstance(error, PosttrainError):
                tell(traceback.format_exc().rstrip(), file=sys.stderr)
            return 1
    return 0


def _reason(error: BaseException) -> str:
    """The reason that a rank leaves in the store. It begins with `EXCHANGE` where another rank was the cause."""
    # NotImplementedError is a RuntimeError too, but never comes from an exchange.
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError) and of_exchange(error):
        return f"{EXCHANGE}: {error}"
    return f"{type(error).__name__}: {error}"


def of_exchange(error: BaseException) -> bool:
    """Returns whether an error comes from an exchange of torch.distributed: a rank is gone, or did not come in time."""
    # torch raises the errors of gloo, its exchange library, as plain RuntimeErrors, which only their words show.
    words = ("gloo", "Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe", "recvBytes")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


class RankWorker:
    """Takes one order after the other."""

    def __init__(self, state: RankState, orders: RankOrders) -> None:
        self.state, self.orders = state, orders

    def until_ended(self) -> None:
        """Do what is ordered until `OrdersEnded` is raised."""
        while True:
            self.until_proceed()

    def until_proceed(self) -> Any:
        """Do what is ordered until rank 0's observers have finished an event; returns what they returned."""
        while True:
            # A `StepOrder` runs the trainer, whose `StandingObservers` call this method again in each event. `Proceed`
            # ends that inner call. Outside a step none comes.
            order = self.orders.next()
            if isinstance(order, Proceed):
                self.orders.done()
                return order.value
            if isinstance(order, StepOrder):
                self._step(order)
            else:
                function, arguments = order
                function(self.state, *arguments)
            self.orders.done()

    def _step(self, order: StepOrder) -> None:
        try:
            self.state.trainer.step(
                order.batch, order.loss, StandingObservers(self), index=order.index, first=order.first
            )
        except NonFiniteGradient:
            # Rank 0 has the same error, and decides whether the run goes on.
            self.state.trainer.learner.train_mode(False)


@dataclass(frozen=True)
class StepOrder:
    """A step of the trainer on a minibatch."""

    batch: Batch
    loss: Loss
    index: int
    first: bool


class StandingObservers(Observers):
    """In each event of a step this waits, and does what is ordered, until rank 0's observers have finished."""

    def __init__(self, worker: RankWorker) -> None:
        super().__init__()
        self._worker = worker

    def needs(self, event: PackedEvent) -> Needs:
        return self._worker.until_proceed()

    def emit(self, event: Event) -> None:
        self._worker.state.event = event
        self._worker.until_proceed()
        self._worker.state.event = None
