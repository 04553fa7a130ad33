"""Rank 0 of a run over ranks: the learner, the optimizer, the trainer and the references that the run works with there.

Each looks like the one of a run in one process. What reads or changes whole weights is ordered of all ranks first and
then done here as well, so the step, the stages and the checks know of no ranks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithm.loss.losses import Loss
from posttrain.config.rank_limits import Parallel
from posttrain.config.stages.stage import Optimizer
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Gauges
from posttrain.core.types import Top
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.ranks.rank_orders import RankLost, RankOrders, Store
from posttrain.engine.parallel.ranks.rank_processes import RankProcesses
from posttrain.role.events import (
    UNOBSERVED,
    Event,
    Observers,
    PackedEvent,
)
from posttrain.role.learner_passes import Needs
from posttrain.role.trainer import NonFiniteGradient, Trainer
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.rank_state import RankState
from posttrain.stages.ranks.rank_worker import EXCHANGE, Proceed, StepOrder, of_exchange

SETTLE = 3.0
"""Seconds after a lost exchange in which the other ranks say why they ended."""


class RankLead:
    """Orders work of all ranks. Used on rank 0.

    Args:
        processes: the other ranks, where this process has started them; None: somebody else did, such as torchrun.
    """

    def __init__(
        self, ranks: ProcessRanks, store: Store, processes: RankProcesses | None = None, parallel: Parallel = "rows"
    ) -> None:
        self.ranks, self.state = ranks, RankState(ranks)
        self._orders, self._processes = RankOrders(ranks, store), processes
        self._inside = 0
        """How deep it is in work that all ranks do now."""
        self.stepping = False
        """Whether all ranks are in a step of the trainer."""
        self._open = ""
        """The order that is not done yet, in words."""
        self.dropped: list[int] = []
        """References that nobody reads any more."""
        self._number = 0
        self.parallel: Parallel = parallel
        """How ranks share the model."""
        self.by_rows = False
        """Whether each rank reads its own rows of the model."""

    @property
    def busy(self) -> bool:
        """True while all ranks do the same work, so that nothing may be ordered."""
        return self._inside > 0

    def number(self) -> int:
        """A new one, for what ranks keep."""
        self._number += 1
        return self._number

    def drop(self, number: int) -> None:
        """A reference is read no more. The ranks free it when the next one is made."""
        self.dropped.append(number)

    def all(self, function: Callable[..., Any], *given: Any, what: str = "") -> Any:
        """Have all ranks call `function(state, *given)`; returns what it returns here."""
        with self.ordered(what or function.__name__.replace("_", " "), (function, given)):
            return function(self.state, *given)

    @contextmanager
    def ordered(self, what: str, order: Any, meanwhile: bool = False) -> Iterator[None]:
        """Send an order. Inside the block this rank does its part.

        Args:
            meanwhile: other orders may follow inside the block.

        Raises:
            RankLost: a rank is lost.
        """
        # An order may be sent inside another one (`meanwhile`), so the words of the outer one come back at the end.
        outer, self._open = self._open, what
        with self.told():
            self._orders.send(what, order)
            # In a step of the trainer the ranks stand still in each event, where observers of rank 0 may order more.
            # Everywhere else the other ranks are at work until the block ends, and take no order.
            self._inside += not meanwhile
            try:
                yield
            except NonFiniteGradient:  # all ranks have it, and go on
                self._open = outer
                raise
            finally:
                self._inside -= not meanwhile
        # Not in `finally`: after any other error the order stays open, and `close` then ends the ranks by force.
        self._open = outer

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside: an exchange that fails is told with its first cause."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks.world == 1 or not of_exchange(error):
                raise
            raise RankLost(self._cause(error)) from error

    def proceed(self, value: Any = None) -> None:
        """Let the ranks that stand in an event go on."""
        with self.told():
            self._orders.send("go on", Proceed(value))

    def close(self) -> None:
        """End the other ranks: by themselves, or at once where they are in the middle of an order."""
        self._orders.end()
        if self._processes is not None:
            self._processes.close(kill=bool(self._open))

    # --- who failed -------------------------------------------------------------------------------------------------

    def _cause(self, error: RuntimeError) -> str:
        """Says in words which rank failed first."""
        where = f"in order {self._orders.number} ({self._open or 'go on'})"
        stand = "Nothing was written of this step. Go on from the last checkpoint with --resume"
        # One rank that fails breaks the exchanges of all, and each says why it ended. The first cause is a rank whose
        # words do not begin with `EXCHANGE`, or a process that is gone without a word. It may take a moment until that
        # is known.
        last = time.monotonic() + SETTLE
        while True:
            said, ended = self._orders.failed(), self._ended()
            first = {r: why for r, why in said.items() if not why.startswith(EXCHANGE)}
            gone = {r: how for r, how in ended.items() if r not in said}
            if first:
                rank, why = min(first.items())
                return f"rank {rank} failed {where}: {why}. {stand}"
            if gone:
                rank, how = min(gone.items())
                return f"rank {rank} is gone {where}: {how}. {stand}"
            if time.monotonic() > last:
                return self._stall(where, said, error, stand)
            time.sleep(0.1)

    def _stall(self, where: str, said: Mapping[int, str], error: RuntimeError, stand: str) -> str:
        late = [r for r in range(1, self.ranks.world) if r not in said]
        notes, number = self._orders.standing(), self._orders.number
        # A rank that ended this order only waits for the next one. Such ranks are named where all others are in the
        # same state.
        late = [r for r in late if notes.get(r) != f"ended order {number}"] or late
        told = "; ".join(f"rank {r} {self._stopped(r)}{notes.get(r, '')}" for r in late) or f"nobody says why ({error})"
        waits = [0, *sorted(said)]
        who = f"rank{'s' * (len(waits) > 1)} {', '.join(map(str, waits))}"
        return f"{who} waited {where} until the time-out for others: {told}. {stand}"

    def _stopped(self, rank: int) -> str:
        stopped = self._processes is not None and self._processes.stopped(rank)
        return "is a process that is stopped; it " if stopped else ""

    def _ended(self) -> dict[int, str]:
        if self._processes is None:
            return {}
        return {r: how for r in self._processes.pids if (how := self._processes.ended(r))}


class LeadReference:
    """`core.ports.Reference` on rank 0: a frozen copy of the weights, of which each rank has its rows."""

    def __init__(self, lead: RankLead) -> None:
        self._lead, self._number = lead, lead.number()
        # The order to make this copy carries the numbers of those that may be freed.
        dropped, lead.dropped = tuple(lead.dropped), []
        self.digest: str = lead.all(together.freeze, self._number, dropped)
        # A finalizer runs whenever the collector does, perhaps in the middle of an exchange: so it only notes the
        # number.
        weakref.finalize(self, lead.drop, self._number)

    def _asked(self, method: str, *given: Any) -> Any:
        what = f"{method} of a reference"
        return self._lead.all(together.ask_reference, self._number, method, given, what=what)

    def score(self, packed: Packed) -> np.ndarray:
        return self._asked("score", packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        return self._asked("entropy", packed)

    def energy(self, packed: Packed) -> np.ndarray:
        return self._asked("energy", packed)

    def top(self, packed: Packed, k: int) -> Top:
        return self._asked("top", packed, k)

    def fingerprint(self) -> str:
        return self._asked("fingerprint")


class LeadOptimizer(StageOptimizer):
    """The optimizer on rank 0. Its state is written, read and fingerprinted by all ranks
    (`core.exchange.shards.DividedState`)."""

    lead: RankLead

    def write_state(self, folder: Path) -> None:
        self.lead.all(together.write_state, str(folder.resolve()))

    def read_state(self, folder: Path) -> None:
        self.lead.all(together.read_state, str(folder.resolve()))

    def fingerprint(self) -> str:
        return self.lead.all(together.state_fingerprint)


def lead_optimizer(lead: RankLead, config: Optimizer, given: tuple[Any, ...]) -> LeadOptimizer:
    """An optimizer on every rank, each for its own rows."""
    # The order names the plain class. Only that of rank 0 knows the lead, which no other rank has.
    with lead.ordered("make optimizer", (together.make_optimizer, (config, StageOptimizer, given))):
        together.make_optimizer(lead.state, config, LeadOptimizer, given)
    made = lead.state.optimizer
    assert isinstance(made, LeadOptimizer)
    made.lead = lead
    return made


class LeadTrainer(Trainer):
    """The trainer on rank 0: each step is taken by all ranks."""

    lead: RankLead

    def step(
        self, batch: Batch, loss: Loss, watch: Observers = UNOBSERVED, *, index: int = 0, first: bool = False
    ) -> Gauges:
        # The whole minibatch goes to all ranks; the trainer of each takes its own share.
        order = StepOrder(batch, loss, index, first)
        with self.lead.ordered(f"a step of the trainer, step {index} of the stage", order, meanwhile=True):
            self.lead.stepping = True
            try:
                return super().step(batch, loss, LeadObservers(watch, self.lead), index=index, first=first)
            finally:
                self.lead.stepping = False


def lead_trainer(lead: RankLead, optimizer: Any, micro_tokens: int, version: int) -> LeadTrainer:
    """A trainer on every rank."""
    with lead.ordered("make trainer", (together.make_trainer, (micro_tokens, version))):
        made = LeadTrainer(lead.state.learner, optimizer, micro_tokens, version, ranks=lead.state.sharing)
    made.lead, lead.state.trained = lead, made
    return made


class LeadObservers(Observers):
    """The observers of a step on rank 0. The other ranks stand still in each event until they are through."""

    def __init__(self, inner: Observers, lead: RankLead) -> None:
        super().__init__()
        self._inner, self._lead = inner, lead

    def needs(self, event: PackedEvent) -> Needs:
        found = self._inner.needs(event)
        # All ranks keep the same parts of their passes, as the observers of rank 0 need them.
        self._lead.proceed(found)
        return found

    def emit(self, event: Event) -> None:
        # `check_rows` reads the event on every rank; the others set theirs where they stand (`StandingObservers`).
        self._lead.state.event = event
        self._inner.emit(event)
        self._lead.state.event = None
        self._lead.proceed()
