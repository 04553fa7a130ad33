"""The learner of rank 0 in a run over ranks.

A method that reads or changes whole weights is first ordered of all other ranks and then done here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.exchange.expert_choices import RoutedPass
from posttrain.core.exchange.scores import AdapterTrial, Odds, Reads, TokenScores
from posttrain.core.exchange.shards import Shard
from posttrain.core.types import Top
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.learner.learner_routers import LearnerRouters
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.parallel.expert_parallel import ExpertLearner
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.rank_lead import RankLead
from posttrain.system.errors import InvariantError
from posttrain.system.machine import freed_at_once


class OrderedLearner(HFLearner):
    """A first base class for a learner of rank 0: a method that reads whole weights is ordered of all ranks.

    Derive `class LeadX(OrderedLearner, X)`, where `X` is the learner of one rank. `forward` and `parameters` are of
    this rank alone. A step of the trainer calls them on all ranks at once.
    """

    _lead: RankLead
    _ask: Callable[..., Any] = staticmethod(together.ask_learner)
    """Function that each rank runs for an ordered method."""

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        # Only inside an order or a step of the trainer do all ranks make this pass. One rank alone would wait in its
        # first exchange for ever.
        if not (self._lead.busy or self._lead.stepping):
            raise InvariantError(
                "a forward pass of one rank alone would wait for the others for ever: what differentiates outside a"
                " step of the trainer is not built over ranks"
            )
        return super().forward(packed, reads)

    def _do(self, method: str, *arguments: Any) -> Any:
        """Calls a method on all ranks; returns the result of this rank."""
        # Inside an order every rank already runs the same code and calls this method itself, so only this rank's part
        # is done here. A second order would find no rank that waits for one.
        if self._lead.busy:
            return getattr(super(), method)(*arguments)
        return self._lead.all(self._ask, method, arguments, what=f"{method} of the learner")

    def score(self, packed: Packed) -> np.ndarray:
        return self._do("score", packed)

    def packed_score(self, packed: Packed) -> np.ndarray:
        return self._do("packed_score", packed)

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        return self._do("examine", packed, tuple(names))

    def value(self, packed: Packed) -> np.ndarray:
        return self._do("value", packed)

    def rewards(self, packed: Packed) -> np.ndarray:
        return self._do("rewards", packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        return self._do("entropy", packed)

    def energy(self, packed: Packed) -> np.ndarray:
        return self._do("energy", packed)

    def collision(self, packed: Packed) -> np.ndarray:
        return self._do("collision", packed)

    def top(self, packed: Packed, k: int) -> Top:
        return self._do("top", packed, k)

    def odds(self, packed: Packed, temperatures: Sequence[float] = ()) -> Odds:
        return self._do("odds", packed, temperatures)

    def fingerprint(self) -> str:
        return self._do("fingerprint")

    def adapter(self) -> AdapterTrial | None:
        return None if self.policy.lora is None else LeadTrial(self._lead)

    def routers(self) -> LearnerRouters | None:
        routers = super().routers()
        return routers if routers is None or self._lead.busy else LeadRouters(**vars(routers), lead=self._lead)

    def _following(self) -> HFLearner:
        other = super()._following()
        if other is not self:
            assert isinstance(other, OrderedLearner)
            # On each rank this is a second learner beside the usual one. So its methods are ordered with another
            # function, which finds that second learner there.
            other._ask = together.ask_followed
        return other

    def shards(self) -> Iterator[Shard]:
        """The parts of the weights on all ranks, in buckets. Inside an order only the parts of this rank."""
        return super().shards() if self._lead.busy else self._of_all()

    def _of_all(self) -> Iterator[Shard]:
        # The other ranks send bucket after bucket until the last one, so the caller must take all of these parts.
        with freed_at_once(), self._lead.ordered("gather the weights", (together.send_weights, ())):
            yield from gathered(super().shards(), self._lead.ranks, self._lead.state.version)

    # --- kept and put back (`core.exchange.shards.DividedWeights`) ---------------------------------------------------

    def write_weights(self, folder: Path) -> None:
        self._lead.all(together.write_weights, str(folder.resolve()))

    def read_weights(self, folder: Path) -> None:
        self._lead.all(together.read_weights, str(folder.resolve()))

    def copied_weights(self) -> int:
        self._lead.all(together.keep_copy, number := self._lead.number())
        return number

    def put_weights(self, copied: int) -> None:
        self._lead.all(together.put_copy, copied)


class LeadLearner(OrderedLearner, ShardedLearner):
    """`core.ports.Learner` of rank 0 over weights that are cut by rows."""

    def __init__(self, policy: Policy, lead: RankLead, **arguments: Any) -> None:
        ShardedLearner.__init__(self, policy, lead.ranks, **arguments)
        self._lead, inside_of_parent = lead, self._inside

        # In the parent class every read of whole weights goes through `_inside`. So a read without an order is found
        # here, and raises. Else it would wait for ranks that never come.
        def inside(function: Callable[[], Any]) -> Any:
            if not (lead.busy or lead.stepping):
                raise InvariantError(
                    "the learner over ranks reads whole weights, and that was not ordered of all ranks"
                )
            return inside_of_parent(function)

        self._inside: Any = inside


class LeadTensorLearner(OrderedLearner, TensorLearner):
    """`core.ports.Learner` of rank 0 over layers that are cut by columns and rows."""

    def __init__(self, policy: Policy, lead: RankLead, **arguments: Any) -> None:
        self._lead = lead
        TensorLearner.__init__(self, policy, lead.ranks, **arguments)


class LeadExpertLearner(OrderedLearner, ExpertLearner):
    """`core.ports.Learner` of rank 0 over ranks that hold whole experts."""

    def __init__(self, policy: Policy, lead: RankLead, **arguments: Any) -> None:
        self._lead = lead
        ExpertLearner.__init__(self, policy, lead.ranks, **arguments)


@dataclass(frozen=True, eq=False)
class LeadRouters(LearnerRouters):
    """`core.exchange.expert_choices.Routers` on rank 0: a pass is ordered of all ranks."""

    lead: RankLead | None = None

    def read(self, packed: Packed, *, replay: bool) -> RoutedPass:
        return self._ordered("read", packed, replay)

    def probabilities(self, packed: Packed, *, replay: bool) -> np.ndarray:
        return self._ordered("probabilities", packed, replay)

    def _ordered(self, method: str, packed: Packed, replay: bool) -> Any:
        assert self.lead is not None
        return self.lead.all(together.ask_routers, method, packed, replay, what=f"{method} of the routers")


class LeadTrial:
    """`core.exchange.scores.AdapterTrial` on rank 0: every rank puts random numbers into its own rows of the adapter
    ("loud"), for as long as the trial lasts."""

    def __init__(self, lead: RankLead) -> None:
        self._lead = lead

    @contextmanager
    def loud(self) -> Iterator[None]:
        self._lead.all(together.make_loud)
        try:
            yield
        finally:
            # Also after an error. Else the ranks would train an adapter of random numbers.
            self._lead.all(together.make_quiet)

    def without(self, packed: Packed) -> np.ndarray:
        return self._lead.all(together.score_without_adapter, packed)
