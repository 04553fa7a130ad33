"""A learner whose ranks hold whole experts, some of each layer (expert parallelism), by the plan that transformers has
for the architecture (`base_model_ep_plan`) and its `apply_expert_parallelism`.

Every rank computes every token. Attention, routers and norms are whole on each rank; of the experts it computes only
its own. Their outputs, and the gradients of their inputs, are summed over ranks once in each layer. So all ranks are
given the same micro-batches, as in `tensor_parallel`, and every other gradient is the same on each.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers

from posttrain.engine.learner.learner_routers import LearnerRouters
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.parallel.tensor_parallel import TensorLearner, check_can_be_cut
from posttrain.system.errors import ConfigError

PART = "transformers.distributed.expert_parallel"
"""The module of transformers that divides experts over ranks. Older versions do not have it."""
STYLES = ("grouped_gemm", "ep_dispatch_experts")
"""The styles that a plan may name: the first is for the experts' weights, the second for the module that holds them."""


class ExpertLearner(TensorLearner):
    """`core.ports.Learner` of one rank, which is given what one process would be. It cuts the experts of
    `policy.module` in place, so the policy is no longer of use to others.

    Args:
        replays: as in `HFLearner`.

    Raises:
        ConfigError: the architecture has no plan for its experts, they do not divide, or another part is not built.
        InvariantError: the ranks begin with different weights.
    """

    every_part_is_used = False  # a rank's experts may compute no token

    def _plan(self, policy: Policy, world: int) -> dict[str, str]:
        return whole_experts(policy, world)

    def beside(self, policy: Policy) -> ExpertLearner:
        return ExpertLearner(policy, self.holders)

    def routers(self) -> LearnerRouters | None:
        all_routers = super().routers()
        if all_routers is None:
            return None
        # Rank r has the experts r * per_rank to (r + 1) * per_rank - 1 of each layer, as transformers divides them.
        per_rank = all_routers.experts // self.holders.world
        begin = per_rank * self.holders.rank
        return replace(all_routers, held=slice(begin, begin + per_rank), of_all=self._every_expert)

    def _every_expert(self, own_experts: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, joined along the experts."""
        return np.concatenate(self.holders.every(own_experts))

    def _cut(self, decoder: Any, plan: dict[str, str]) -> None:
        # The plan's patterns name parameters (the experts' stacked weights) and modules (what holds them).
        names = [*(n for n, _ in decoder.named_parameters()), *(n for n, _ in decoder.named_modules())]
        style_of_name = {n: style for n in names for pattern, style in plan.items() if fnmatch.fnmatch(n, pattern)}
        from posttrain.engine.parallel.joined_experts import divide  # not in every transformers that is used here

        with torch.no_grad():
            divide(decoder, self.holders.mesh, style_of_name)


def whole_experts(policy: Policy, world: int) -> dict[str, str]:
    """The plan of the decoder's experts. ConfigError for what it cannot do here."""
    config, name = policy.module.config.get_text_config(decoder=True), type(policy.module).__name__
    check_can_be_cut(policy, "expert parallelism")
    if find_spec(PART) is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no expert parallelism ({PART}). Install a newer one, or train"
            " in one process"
        )
    plan: dict[str, str] = dict(getattr(config, "base_model_ep_plan", None) or {})
    if not plan or any(style not in STYLES for style in plan.values()):
        styles = ", ".join(sorted(set(plan.values()))) or "none"
        raise ConfigError(
            f"{name} has no plan of whole experts in transformers (its plan: {styles}). Leave out"
            " --parallel experts, or train it in one process"
        )
    decoder: Any = policy.module.get_decoder()
    # By the style grouped_gemm a plan names the stacked weights [experts, ...], so their first axis counts the experts.
    counts = {
        int(p.shape[0])
        for name, p in decoder.named_parameters()
        if any(style == "grouped_gemm" and fnmatch.fnmatch(name, pattern) for pattern, style in plan.items())
    }
    uneven = [n for n in counts if n % world]
    if uneven or not counts:
        raise ConfigError(
            f"{world} ranks cannot share {min(uneven, default=0)} experts of {name} evenly: give a divisor of them"
        )
    return plan
