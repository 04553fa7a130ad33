"""The learner that a run over ranks works with on rank 0. What reads or changes whole weights is ordered of all ranks
first and then done here as well."""

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
    """A learner that rank 0 puts before a learner of one rank: each method that reads whole weights is ordered of all
    ranks.

    `forward` and `parameters` are this rank's own. A step of the trainer calls them on all ranks at once.
    """

    _lead: RankLead
    _ask: Callable[..., Any] = staticmethod(together.ask_learner)
    """Function that each rank runs for an ordered method."""

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        # All ranks are in this pass only inside an order or a step of the trainer. Alone it would stand in the first
        # exchange.
        if not (self._lead.busy or self._lead.stepping):
            raise InvariantError(
                "a forward pass of one rank alone would wait for the others for ever: what differentiates outside a"
                " step of the trainer is not built over ranks"
            )
        return super().forward(packed, reads)

    def _do(self, method: str, *given: Any) -> Any:
        """A method on all ranks: ordered, or called here while all do the same."""
        # Inside an order every rank calls this method itself. A second order would find no rank that waits for one.
        if self._lead.busy:
            return getattr(super(), method)(*given)
        return self._lead.all(self._ask, method, given, what=f"{method} of the learner")

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
        found = super().routers()
        return found if found is None or self._lead.busy else LeadRouters(**vars(found), lead=self._lead)

    def _following(self) -> HFLearner:
        other = super()._following()
        if other is not self:
            assert isinstance(other, OrderedLearner)
            # On the other ranks too it is another learner than the usual one, so its methods are ordered by a function
            # of their own.
            other._ask = together.ask_followed
        return other

    def shards(self) -> Iterator[Shard]:
        """The parts of all ranks, in buckets; this rank's own while all do the same."""
        return super().shards() if self._lead.busy else self._of_all()

    def _of_all(self) -> Iterator[Shard]:
        # The other ranks give bucket after bucket until the last: whoever takes these parts must take all of them.
        with freed_at_once(), self._lead.ordered("gather the weights", (together.send_weights, ())):
            yield from gathered(super().shards(), self._lead.ranks, self._lead.state.version)

    # --- kept and put back (`core.exchange.shards.DividedWeights`)
    # ------------------------------------------------------------

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

    def __init__(self, policy: Policy, lead: RankLead, **given: Any) -> None:
        ShardedLearner.__init__(self, policy, lead.ranks, **given)
        self._lead, read = lead, self._inside

        # Every read of whole weights of the parent class goes through `_inside`, so a read that nobody ordered is found
        # here and does not wait for ranks that will not come.
        def inside(function: Callable[[], Any]) -> Any:
            if not (lead.busy or lead.stepping):
                raise InvariantError(
                    "the learner over ranks reads whole weights, and that was not ordered of all ranks"
                )
            return read(function)

        self._inside: Any = inside


class LeadTensorLearner(OrderedLearner, TensorLearner):
    """`core.ports.Learner` of rank 0 over layers that are cut by columns and rows."""

    def __init__(self, policy: Policy, lead: RankLead, **given: Any) -> None:
        self._lead = lead
        TensorLearner.__init__(self, policy, lead.ranks, **given)


class LeadExpertLearner(OrderedLearner, ExpertLearner):
    """`core.ports.Learner` of rank 0 over ranks that hold whole experts."""

    def __init__(self, policy: Policy, lead: RankLead, **given: Any) -> None:
        self._lead = lead
        ExpertLearner.__init__(self, policy, lead.ranks, **given)


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
    """`core.exchange.scores.AdapterTrial` on rank 0: every rank makes its own rows of the adapter loud."""

    def __init__(self, lead: RankLead) -> None:
        self._lead = lead

    @contextmanager
    def loud(self) -> Iterator[None]:
        self._lead.all(together.make_loud)
        try:
            yield
        finally:
            # In every case: the ranks would else train an adapter of random numbers.
            self._lead.all(together.make_quiet)

    def without(self, packed: Packed) -> np.ndarray:
        return self._lead.all(together.score_without_adapter, packed)
