"""Rank 0 of a run over ranks: how it orders work, and its optimizer, trainer and references. Each has the interface
that it has in a run of one process, so the step, the stages and the checks need not know of ranks. A method that reads
or changes whole weights is ordered of all other ranks and then done here too."""

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
from posttrain.role.events import UNOBSERVED, Event, Observers, PackedEvent
from posttrain.role.learner_passes import Needs
from posttrain.role.trainer import NonFiniteGradient, Trainer
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.rank_state import RankState
from posttrain.stages.ranks.rank_worker import EXCHANGE, Proceed, StepOrder, of_exchange

SETTLE = 3.0
"""Seconds after a failed exchange in which rank 0 waits for the other ranks to say why they ended."""


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
        """How many orders are being carried out, one inside the other; those with `meanwhile` do not count."""
        self.stepping = False
        """Whether all ranks are in a step of the trainer."""
        self._open = ""
        """A description of the order that is not done yet; '' where all are done."""
        self.dropped: list[int] = []
        """The numbers of references that nobody reads any more."""
        self._number = 0
        self.parallel: Parallel = parallel
        """How ranks share the model."""
        self.reads_own_rows = False
        """Whether each rank reads its own rows of the weights from the files, and does not get them from rank 0."""

    @property
    def busy(self) -> bool:
        """True while all ranks do the same work, so that nothing may be ordered."""
        return self._inside > 0

    def number(self) -> int:
        """A new number, under which all ranks keep a reference or a copy."""
        self._number += 1
        return self._number

    def drop(self, number: int) -> None:
        """Notes that a reference is read no more. The ranks free it when the next reference is made."""
        self.dropped.append(number)

    def all(self, function: Callable[..., Any], *arguments: Any, what: str = "") -> Any:
        """Have all ranks call `function(state, *arguments)`; returns rank 0's result. `what`: the order in words."""
        with self.ordered(what or function.__name__.replace("_", " "), (function, arguments)):
            return function(self.state, *arguments)

    @contextmanager
    def ordered(self, what: str, order: Any, meanwhile: bool = False) -> Iterator[None]:
        """Send an order to the other ranks. Inside the block rank 0 does its own part.

        Args:
            what: the order in words, for messages.
            order: (function, its arguments after the state), or a `StepOrder`.
            meanwhile: whether other orders may follow inside the block.

        Raises:
            RankLost: a rank is lost.
        """
        # An order may be sent inside another one (`meanwhile`). At its end the outer one is again the open order.
        outer, self._open = self._open, what
        with self.failures_explained():
            self._orders.send(what, order)
            # In a step of the trainer (`meanwhile`) the other ranks wait in each event for orders of rank 0's
            # observers. In all other orders they work until the block ends, and take no further order.
            self._inside += not meanwhile
            try:
                yield
            except NonFiniteGradient:  # raised on all ranks, which then wait for the next order
                self._open = outer
                raise
            finally:
                self._inside -= not meanwhile
        # Not in `finally`: after any other error the order stays open, and `close` then ends the ranks by force.
        self._open = outer

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Inside the block an exchange that fails raises `RankLost`, with the first cause as its message."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks.world == 1 or not of_exchange(error):
                raise
            raise RankLost(self._cause(error)) from error

    def proceed(self, value: Any = None) -> None:
        """Let the ranks that wait in an event go on. `value`: what rank 0's observers returned."""
        with self.failures_explained():
            self._orders.send("go on", Proceed(value))

    def close(self) -> None:
        """End the other ranks: by themselves, or at once where they are in the middle of an order."""
        self._orders.end()
        if self._processes is not None:
            self._processes.close(kill=bool(self._open))

    # --- who failed -------------------------------------------------------------------------------------------------

    def _cause(self, error: RuntimeError) -> str:
        where = f"in order {self._orders.number} ({self._open or 'go on'})"
        advice = "Nothing was written of this step. Go on from the last checkpoint with --resume"
        # When one rank fails, the exchanges of all ranks break, and each rank leaves its reason in the store. A reason
        # that begins with `EXCHANGE` is only a consequence. The first cause is a rank with another reason, or a process
        # that is gone without a reason. It may take up to `SETTLE` seconds until that is known.
        deadline = time.monotonic() + SETTLE
        while True:
            reasons, ended = self._orders.failed(), self._ended()
            first_causes = {r: why for r, why in reasons.items() if not why.startswith(EXCHANGE)}
            gone = {r: ending for r, ending in ended.items() if r not in reasons}
            if first_causes:
                rank, why = min(first_causes.items())
                return f"rank {rank} failed {where}: {why}. {advice}"
            if gone:
                rank, ending = min(gone.items())
                return f"rank {rank} is gone {where}: {ending}. {advice}"
            if time.monotonic() > deadline:
                return self._stall(where, reasons, error, advice)
            time.sleep(0.1)

    def _stall(self, where: str, reasons: Mapping[int, str], error: RuntimeError, advice: str) -> str:
        """The message where no rank failed by itself: which ranks waited (those with `reasons`), and for whom."""
        late = [r for r in range(1, self.ranks.world) if r not in reasons]
        notes, number = self._orders.standing(), self._orders.number
        # A rank that has ended this order waits for the next one and is not late. Such ranks are named only if there
        # are no others.
        late = [r for r in late if notes.get(r) != f"ended order {number}"] or late
        doing = "; ".join(f"rank {r} {self._stopped(r)}{notes.get(r, '')}" for r in late)
        waits = [0, *sorted(reasons)]
        who = f"rank{'s' * (len(waits) > 1)} {', '.join(map(str, waits))}"
        return f"{who} waited {where} until the time-out for others: {doing or f'nobody says why ({error})'}. {advice}"

    def _stopped(self, rank: int) -> str:
        """Part of a sentence for a rank whose process is stopped (SIGSTOP); else ''."""
        stopped = self._processes is not None and self._processes.stopped(rank)
        return "is a process that is stopped; it " if stopped else ""

    def _ended(self) -> dict[int, str]:
        """How processes of other ranks ended, by rank; {} where this process has not started them."""
        if self._processes is None:
            return {}
        return {r: how for r in self._processes.pids if (how := self._processes.ended(r))}


class LeadReference:
    """`core.ports.Reference` on rank 0: a frozen copy of the weights. Each rank has its own part of it."""

    def __init__(self, lead: RankLead) -> None:
        self._lead, self._number = lead, lead.number()
        # The order to make this copy also has the numbers of the references that may be freed.
        dropped, lead.dropped = tuple(lead.dropped), []
        self.digest: str = lead.all(together.freeze, self._number, dropped)
        # A finalizer may run in the middle of an exchange. So it sends no order and only notes the number.
        weakref.finalize(self, lead.drop, self._number)

    def _asked(self, method: str, *arguments: Any) -> Any:
        what = f"{method} of a reference"
        return self._lead.all(together.ask_reference, self._number, method, arguments, what=what)

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
    """The optimizer on rank 0. Its state is written, read and fingerprinted by all ranks."""

    lead: RankLead

    def write_state(self, folder: Path) -> None:
        self.lead.all(together.write_state, str(folder.resolve()))

    def read_state(self, folder: Path) -> None:
        self.lead.all(together.read_state, str(folder.resolve()))

    def fingerprint(self) -> str:
        return self.lead.all(together.state_fingerprint)


def lead_optimizer(lead: RankLead, config: Optimizer, arguments: tuple[Any, ...]) -> LeadOptimizer:
    """An optimizer on every rank, each for its own part of the weights."""
    # The other ranks make the plain class. Only rank 0 makes `LeadOptimizer`, which needs the lead.
    with lead.ordered("make optimizer", (together.make_optimizer, (config, StageOptimizer, arguments))):
        together.make_optimizer(lead.state, config, LeadOptimizer, arguments)
    optimizer = lead.state.optimizer
    assert isinstance(optimizer, LeadOptimizer)
    optimizer.lead = lead
    return optimizer


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
        trainer = LeadTrainer(lead.state.learner, optimizer, micro_tokens, version, ranks=lead.state.sharing)
    trainer.lead, lead.state.trained = lead, trainer
    return trainer


class LeadObservers(Observers):
    """The observers of a step on rank 0. In each event the other ranks wait until these observers have finished."""

    def __init__(self, inner: Observers, lead: RankLead) -> None:
        super().__init__()
        self._inner, self._lead = inner, lead

    def needs(self, event: PackedEvent) -> Needs:
        needs = self._inner.needs(event)
        # All ranks keep the same parts of their passes: those that the observers of rank 0 need.
        self._lead.proceed(needs)
        return needs

    def emit(self, event: Event) -> None:
        # `check_rows` reads the event from the state on every rank. The other ranks set theirs in `StandingObservers`.
        self._lead.state.event = event
        self._inner.emit(event)
        self._lead.state.event = None
        self._lead.proceed()
