"""A rank's experts of a layer, over the batch that all ranks share (`engine.parallel.expert_parallel`).

It is imported where experts are divided, because an older transformers has nothing to build it on.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementationInterface, apply_expert_parallelism

HOW = "posttrain_joined"
"""The name of `JoinedExperts` among the implementations of transformers."""


class JoinedExperts(AllReduceEP):
    """A rank's experts over the batch that all ranks share; what they add is summed over ranks.

    A rank none of whose experts was chosen for any token computes one of them times 0. Otherwise its pass would not
    reach the exchange of gradients in which the other ranks wait, and its experts would have no gradient, where one
    process has zeros.

    The choices are those of the first rank. Each rank's router makes them, but where two experts score alike rounding
    decides, and a token would be computed by both of them, or by none.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        # What the parent's __call__ calls between masking other ranks' experts and the sum is replaced.
        self._forward = self.experts_forward
        self.experts_forward = self._joined

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        # broadcast writes into its argument, and whoever records the router's own choice needs it as it is.
        if self.ep_mesh.size() > 1:
            index = index.clone()
            dist.broadcast(index, group=self.ep_mesh.get_group(), group_src=0)
        return super().__call__(hidden, index, weights)

    def _joined(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        # Here `index` is local: 0 to local - 1 are this rank's experts, and `local` is the mark of any other one.
        local: Any = self.num_local_experts
        if bool((index < local).any()):
            return self._forward(hidden, index, weights)
        # One token through expert 0. Its product with 0 keeps all in the graph, with gradients of 0.
        first, nothing = index.new_zeros((1, 1)), weights.sum().view(1, 1)  # the weights of other ranks' experts are 0
        return self._forward(hidden[:1], first, nothing).repeat(len(hidden), 1)


EPImplementationInterface.register(HOW, JoinedExperts)


def divide(decoder: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Divide the experts of a decoder over ranks, in place. `plan`: the style of each module and parameter by name."""
    apply_expert_parallelism(decoder, mesh, mesh, plan, ep_implementation=HOW)
