"""The routers of a learner, for those who read them: checks and gauges."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from posttrain.core.batch import Packed
from posttrain.core.errors import ConfigError
from posttrain.core.routed import RoutedPass
from posttrain.engine.packed_reader import PackedReader, forward_only
from posttrain.engine.packed_routing import PackedRouting
from posttrain.engine.routing import RouterModules, why_not
from posttrain.engine.stateful import is_stateful


@dataclass(frozen=True, eq=False)
class LearnerRouters:
    """`core.routed.Routers` of a learner."""

    reader: PackedReader
    experts: int
    names: tuple[str, ...]
    stacked: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, reader: PackedReader, found: RouterModules) -> LearnerRouters | None:
        """None for a model with a recurrent state, whose passes are padded."""
        if is_stateful(reader.module):
            return None
        return cls(reader, found.experts, found.names, found.stacked)

    def read(self, packed: Packed, *, replay: bool) -> RoutedPass:
        with forward_only(self.reader.module):
            routing = PackedRouting(packed, packed.routed_N if replay else None, True)
            hidden = self.reader.routed(packed, None, routing)
            return routing.told(self.reader.head(packed, hidden, False)[0])


def refuse_replay(module: PreTrainedModel) -> None:
    """ConfigError where a model's experts cannot follow given choices."""
    off = "Set model.router_replay=none"
    if why := why_not(module):
        raise ConfigError(f"model.router_replay: {why}. {off}")
    if is_stateful(module):
        raise ConfigError(f"model.router_replay is not offered for models with a recurrent state. {off}")
