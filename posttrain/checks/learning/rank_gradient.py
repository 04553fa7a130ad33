"""Checks of the gradient that several ranks have together: every parameter gets one, and ranks are summed exactly once.

Two checks test the sum. `summed_once` moves the weights along the gradient and looks whether the log-probs change as
the gradient says. `products_agree` computes the gradient of each linear layer from its inputs and from what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posttrain.core.batch import Packed
from posttrain.core.exchange.ranks import joint_norm, of_one_copy
from posttrain.core.exchange.row_gradient import square_sum
from posttrain.core.exchange.scores import Reads
from posttrain.engine.parallel.shard_modules import first_row
from posttrain.engine.parallel.sharded_learner import NARROW, ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.system.errors import InvariantError

DEAF = (
    "{} get no gradient from the values that they make: values would stay as they are. Look for a detach, a hook, or"
    " requires_grad=False in the value head"
)
MOVED = 0.005
"""Nats by which the weighted sum of the log-probs shall change where the weights are moved along its gradient: far
above rounding, and small enough that the change is linear."""
BOUND = 0.1
"""Largest relative difference of that change from what the gradient says. A gradient that is averaged over ranks, or
summed twice, is off by a factor of two at least; one without the part of a rank by 1 / ranks."""

WRONG = (
    "the gradient of {} ranks is not that of the log-probs: {}. It was averaged over ranks, summed twice, or lacks a"
    " rank's part. Every update would be wrong; go on from the last checkpoint with a build that sums gradients once"
)


def cotangent(logp: torch.Tensor) -> torch.Tensor:
    """The factors with which the log-probs of the fixed sequence are weighted."""
    # Unequal factors, so that values that stand at other tokens do not give the same sum.
    return torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype, device=logp.device)


def silent_on_all_ranks(
    learner: ShardedLearner, packed: Packed, parameters: Mapping[str, Any], head: Mapping[str, Any]
) -> list[str]:
    """Returns the names of the parameters of which no rank's rows get a gradient.

    Every rank calls it with the same tokens and weighs its loss with 1 / ranks.

    Raises:
        InvariantError: on every rank, where the value head gets no gradient, or the gradients are not summed once.
    """
    adapter = learner.policy.lora
    # PEFT treats the norm of DoRA as a constant. It moves with the weights, so their gradient is not exact.
    dora = adapter is not None and adapter.dora
    # Whether products of layers are compared, and the weights stay where they are: see `products_agree`.
    by_layer = dora or learner.narrow is not None or learner.policy.dtype in NARROW
    if by_layer:
        # The first pass makes more passes, which prove shared beginnings. Made here, none of them is under the hooks.
        learner.score(packed)
    with products(learner, parameters if by_layer else {}) as wanted:
        scores = learner.forward(packed, Reads(value=bool(head)))
        total = (scores.logp * cotangent(scores.logp)).sum()
        total = total if scores.value is None else total + scores.value.sum()
        # All ranks compute the same tokens and gradients are summed, so the sum over ranks is one gradient.
        (total / learner.ranks.world).backward()
    # The optimizer must find nothing of this.
    gradients = _take_gradients({**parameters, **head})
    heard_here = {n: bool(g.any()) for n, g in gradients.items()}
    # A parameter counts as heard where any rank's rows of it have a gradient. The exchange comes before any raise.
    heard = {n for of_rank in learner.ranks.every(heard_here) for n, any_there in of_rank.items() if any_there}
    if deaf := [n for n in head if n not in heard]:
        raise InvariantError(DEAF.format(", ".join(deaf)))
    if by_layer:
        products_agree(learner, gradients, wanted)
    elif scores.value is None or not head:
        summed_once(learner, packed, parameters, gradients)
    else:  # the values send gradients into the policy too: those of the log-probs alone are wanted
        summed_once(learner, packed, parameters, _of_logp(learner, packed, parameters, head))
    return [n for n in parameters if n not in heard]


def silent_in_parts(
    learner: TensorLearner, packed: Packed, parameters: Mapping[str, Any], head: Mapping[str, Any]
) -> list[str]:
    """Returns the names of the parameters of which some rank's part gets no gradient.

    Where a part may rightly be unused (an expert), a parameter counts only if no rank's part gets one. Each rank
    computes all tokens, and calls this with the same ones.

    Raises:
        InvariantError: the value head gets no gradient, or the gradients of all parts are not that of the log-probs.
    """
    # A mixture follows fixed experts: else a small move could change a choice, and log-probs would jump.
    learner, packed = _as_chosen(learner, packed)
    scores = learner.forward(packed)
    (scores.logp * cotangent(scores.logp)).sum().backward()
    gradients = _take_gradients(parameters)
    # A pass of its own for the values: layers that are recomputed in a backward pass can be differentiated only once.
    value = learner.forward(packed, Reads(value=True)).value if head else None
    if value is not None:
        value.sum().backward()
        # The values' gradient of the policy is thrown away: what is checked is that of the log-probs.
        heads = _take_gradients(head)
        _take_gradients(parameters)
        if deaf := [n for n in head if n not in heads or not bool(heads[n].any())]:
            raise InvariantError(DEAF.format(", ".join(deaf)))
    heard_here = {n: bool(g.any()) for n, g in gradients.items()}
    # Every rank reaches the exchange before anything is decided.
    table = learner.holders.every(heard_here)
    summed_once(learner, packed, parameters, gradients)
    # Where some part may rightly be unused (an expert), one rank that hears the parameter is enough.
    needed = all if learner.every_part_is_used else any
    return [n for n in parameters if not needed(of_rank.get(n, False) for of_rank in table)]


def _as_chosen(learner: TensorLearner, packed: Packed) -> tuple[TensorLearner, Packed]:
    """The learner and the batch with the experts fixed to those that the weights choose at present.

    A small move of the weights then changes no choice. A model without experts is returned as it is.
    """
    routers = learner.routers()
    if routers is None:
        return learner, packed
    follows = routers.followed()
    assert isinstance(follows, TensorLearner)
    return follows, replace(packed, routed_N=routers.read(packed, replay=False).own)


def _take_gradients(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the parameters' gradients, which are then cleared."""
    gradients = {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return gradients


def _of_logp(
    learner: ShardedLearner, packed: Packed, parameters: Mapping[str, Any], head: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The gradients of the weighted sum of the log-probs alone; the parameters' own gradients are cleared."""
    scores = learner.forward(packed)
    ((scores.logp * cotangent(scores.logp)).sum() / learner.ranks.world).backward()
    _take_gradients(head)
    return _take_gradients(parameters)


@contextmanager
def products(learner: ShardedLearner, parameters: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """While it is open, computes what the gradient of each linear layer must be, from what goes in and what comes back.

    The pass inside must be of the same tokens on every rank. The result has this rank's rows of each gradient, in
    float64, times the number of ranks.
    """
    wanted, hooks = dict[str, Tensor](), list[Any]()

    # `turned`: the weight is [in, out], as that of Conv1D.
    def listen(name: str, turned: bool) -> Any:
        whole_weight: Any = learner.like(name, parameters[name].detach())
        # A rank holds some rows of the weight, from `begin` on.
        begin, rows = first_row(whole_weight), len(parameters[name])

        def forward(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            layer_input = inputs[0].detach().flatten(0, -2)

            def backward(gradient: Tensor) -> None:
                # W of nn.Linear is [out, in] and of Conv1D [in, out]: rows are outputs in the first and inputs in the
                # second.
                left, right = (layer_input, gradient.flatten(0, -2))[:: 1 if turned else -1]
                # dL/dW = left^T right over all tokens, and of it this rank's rows.
                row_gradient = left[:, begin : begin + rows].double().T @ right.double()
                # Each rank weighed the loss with 1 / ranks, so the sum over ranks is this one's times their number.
                wanted[name] = wanted.get(name, 0) + learner.ranks.world * row_gradient

            # Nothing comes back to a layer that is not differentiated.
            if out.requires_grad:
                out.register_hook(backward)

        return forward

    # Only layers whose gradient is such a product: embeddings and norms are not.
    for module_name, module in learner.policy.module.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and (name := f"{module_name}.weight") in parameters:
            hooks.append(module.register_forward_hook(listen(name, isinstance(module, Conv1D))))
    try:
        yield wanted
    finally:
        # A hook that stays would compute these products in every later pass.
        for hook in hooks:
            hook.remove()


def products_agree(learner: ShardedLearner, gradients: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The gradient of each linear layer is the sum over ranks.

    This takes the place of `summed_once` below float32, where its moves would be rounded away, and with DoRA, whose
    gradient is not that of the log-probs. Embeddings and norms are cut and summed in the same way, and are not read.

    Raises:
        InvariantError: on every rank, where a gradient is not that sum, or no layer could be compared.
    """
    products_here = {
        # <g, w> and <w, w> of this rank's rows; g is the gradient and w the wanted one. Their sums over ranks give the
        # share g / w.
        n: (float((gradients[n].double() * w).sum()) if n in gradients else 0.0, float((w * w).sum()))
        for n, w in wanted.items()
    }
    table = learner.ranks.every(products_here)
    shares: dict[str, float] = {}
    for name in table[0]:
        # One share over all ranks, since a single rank's rows may have hardly any gradient.
        along, size = (math.fsum(of_rank[name][i] for of_rank in table) for i in (0, 1))
        if size and math.isfinite(size):
            shares[name] = along / size
    if not shares:
        raise InvariantError(
            f"no gradient of a linear layer of {type(learner.policy.module).__name__} could be compared over ranks, and"
            " below float32 nothing else shows whether ranks sum it. Set model.dtype=float32"
        )
    name = max(shares, key=lambda n: abs(shares[n] - 1))
    if not abs(shares[name] - 1) <= BOUND:
        raise InvariantError(WRONG.format(learner.ranks.world, f"{name} has {shares[name]:.3g} times of it"))


@torch.no_grad()
def summed_once(
    learner: ShardedLearner | TensorLearner,
    packed: Packed,
    parameters: Mapping[str, Any],
    gradient: Mapping[str, torch.Tensor],
) -> None:
    """Moving the weights along the gradient changes the log-probs as the gradient says."""
    # |g|^2 over all ranks: a rank alone knows its own rows.
    if isinstance(learner, TensorLearner):
        ranks, squared = learner.holders, learner.norm(gradient) ** 2
    else:
        ranks = learner.ranks
        norm_here = math.sqrt(math.fsum(square_sum(g) for g in gradient.values()))
        squared = joint_norm(of_one_copy(ranks, norm_here, "gradient")) ** 2
    # Nothing to move along; that a parameter is silent is told elsewhere.
    if not squared or not math.isfinite(squared):
        return
    before = {n: parameters[n].detach().clone() for n in gradient}
    # Forward and back: the difference of the two has no quadratic term.
    sums: list[float] = []
    for sign in (1.0, -1.0):
        for name, g in gradient.items():
            # MOVED g / |g|^2 changes the sum by MOVED to first order, where g is its gradient.
            parameters[name].copy_(before[name] + sign * (MOVED / squared) * g)
        logp = learner.score(packed).astype(np.float64)
        sums.append(float(logp @ np.linspace(0.5, 1.5, len(logp))))
    # The weights themselves are put back, not the moves taken back, which would leave rounding.
    for name, kept in before.items():
        parameters[name].copy_(kept)
    share = (sums[0] - sums[1]) / 2 / MOVED
    if not abs(share - 1) <= BOUND:
        raise InvariantError(WRONG.format(ranks.world, f"along it they change by {share:.3g} times what it says"))
