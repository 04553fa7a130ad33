"""Checks that the load-balance loss of a mixture of experts, and its gradient, are those of its definition.

The definition is computed over the whole minibatch, from the choices it holds and the routers' probabilities, by code
that shares nothing with what trained: E sum_e f_e P_e over the tokens whose experts are known and over the layers.
"""

from __future__ import annotations

import numpy as np

from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch
from posttrain.core.exchange.expert_choices import UNKNOWN, Routers
from posttrain.core.gauge import Gauge, Gauges
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport
from posttrain.role.learner_passes import Passes
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

BALANCE_BOUND = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""Largest difference of the load-balance loss, relative to it."""


def balance_agrees(batch: Batch, passes: Passes, routers: Routers, coef: float, *, replay: bool, dtype: str) -> Gauges:
    """The load-balance loss is that of its definition over the minibatch, and has its coefficient as gradient.

    Args:
        batch: the minibatch.
        passes: the learner's passes over its micro-batches. `balance` has the loss of each and
            the gradient by it.
        coef: the coefficient of the settings.
        replay: whether the passes followed the choices of the batch.
    """
    assert batch.routed_N is not None
    # Of a token whose experts are not known (the last of a sequence) nothing is counted.
    known_N = (batch.routed_N != UNKNOWN).all((1, 2))
    chosen = batch.routed_N[known_N]
    # Rows are pairs of token and layer.
    rows = chosen.shape[0] * chosen.shape[1]
    load_E = np.zeros(routers.experts)
    # f_e: the share of rows that chose expert e, over the whole minibatch.
    np.add.at(load_E, chosen.ravel(), 1 / rows)
    wanted = 0.0
    for micro in passes.micros:
        assert micro.routed_N is not None
        known_here_N = (micro.routed_N != UNKNOWN).all((1, 2))
        # P_e adds up over micro-batches, since each is divided by the rows of the whole minibatch.
        mean_E = routers.probabilities(micro, replay=replay)[known_here_N].sum((0, 1), dtype=np.float64) / rows
        wanted += routers.experts * float(load_E @ mean_E)
    reported, gap = sum(value for value, _ in passes.balance), np.inf
    # Fewer terms than micro-batches: one had no such loss. The gap stays infinite.
    if len(passes.balance) == len(passes.micros):
        gap = abs(reported - wanted) / wanted
    if not gap <= BALANCE_BOUND[dtype]:
        raise InvariantError(
            f"the load-balance loss is {reported:.6g} over {len(passes.balance)} micro-batches, and by its definition"
            f" over the minibatch it is {wanted:.6g}: {int(known_N.sum())} of its {len(known_N)} tokens have known"
            " experts, and no other ones count. Shares of choices are those of the whole minibatch, not of each part"
        )
    # Each part must get exactly the coefficient as its gradient; it is never divided by the number of parts.
    if wrong := [gradient for _, gradient in passes.balance if not abs(gradient - coef) <= 1e-4 * coef]:
        raise InvariantError(
            f"the load-balance loss asks {wrong[0]:.6g} of a part of it, and router_aux_loss_coef is {coef:g}: it does"
            " not reach the routers, or is scaled on its way. Look for a detach, and for a division by micro-batches"
        )
    return {"canary/balance_gap": Gauge(float(gap), 1)}


class BalanceCheck(Observer):
    """In runs with a load-balance loss: its value and what it asks of the routers, at `due` steps."""

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, DifferentiatedEvent) or not due(event.packed.index):
            return None
        batch, routers, coef = event.packed.batch, roles.learner.routers(), roles.stage.router_aux_loss_coef
        # None: this minibatch has no load-balance loss.
        if routers is None or batch.balance_E is None:
            return None
        model = roles.run.model
        with roles.clock.of("check"):
            return ObserverReport(
                balance_agrees(
                    batch, event.passes, routers, coef, replay=model.router_replay != "none", dtype=model.dtype
                )
            )
