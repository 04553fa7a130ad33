"""The routers of a learner's mixture of experts, as checks and gauges read them, and refusals of models without them.

A stage that replays the sampler's choices, or has a load-balance loss, needs routers that are understood
(`expert_routing.why_not`) and a model without a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config.stages.reinforce import Reinforce
from posttrain.config.stages.stage import Stage
from posttrain.core.batch import Packed
from posttrain.core.exchange.expert_choices import RoutedPass
from posttrain.core.ports import Learner
from posttrain.engine.layers.expert_routing import PackedRouting, RouterModules, why_not
from posttrain.engine.learner.packed_reader import SCORE_TOKENS, PackedReader, forward_only
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.system.errors import ConfigError


@dataclass(frozen=True, eq=False)
class LearnerRouters(RouterModules):
    """`core.exchange.expert_choices.Routers` of a learner. `follow` returns the learner whose passes follow the
    choices of a batch."""

    reader: PackedReader
    follow: Callable[[], Learner]
    held: slice = field(default_factory=lambda: slice(None))  # all experts; `ExpertLearner` has those of its rank
    of_all: Callable[[np.ndarray], np.ndarray] = np.asarray  # one process has the rows of all experts already

    def followed(self) -> Learner:
        return self.follow()

    def read(self, packed: Packed, *, replay: bool) -> RoutedPass:
        return RoutedPass.join([self._read(part, replay) for part in packed.split(SCORE_TOKENS)])

    def probabilities(self, packed: Packed, *, replay: bool) -> np.ndarray:
        with forward_only(self.reader.module):
            return self._pass(packed, replay)[0].probabilities()

    def _read(self, packed: Packed, replay: bool) -> RoutedPass:
        """The record of one pass."""
        with forward_only(self.reader.module):
            routing, hidden = self._pass(packed, replay)
            return routing.told(self.reader.head(packed, hidden, False)[0])

    def _pass(self, packed: Packed, replay: bool) -> tuple[PackedRouting, Tensor]:
        """(the record of one pass, with the routers' scores; its hidden states)."""
        routing = PackedRouting(packed, packed.routed_N if replay else None, True)
        return routing, self.reader.routed(packed, None, routing)


def refuse_replay(module: PreTrainedModel) -> None:
    """ConfigError where a model's experts cannot follow given choices."""
    off = "Set model.router_replay=none"
    if why := why_not(module):
        raise ConfigError(f"model.router_replay: {why}. {off}")
    if is_stateful(module):
        raise ConfigError(f"model.router_replay is not offered for models with a recurrent state. {off}")


def refuse_balance(stages: Sequence[Stage], module: PreTrainedModel) -> None:
    """ConfigError where a stage has a load-balance loss and the model no routers that are understood."""
    for stage in stages:
        if isinstance(stage, Reinforce) and stage.router_aux_loss_coef:
            why = why_not(module) or ("it keeps a recurrent state" if is_stateful(module) else "")
            if why:
                off = f"Set {stage.name}.router_aux_loss_coef=0"
                raise ConfigError(f"{stage.name}.router_aux_loss_coef={stage.router_aux_loss_coef:g}: {why}. {off}")
