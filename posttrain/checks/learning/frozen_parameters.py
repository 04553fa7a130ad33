"""Checks that frozen parameters stay as they are, and only they are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.checks.stage_history import due
from posttrain.config.stages.stage import Optimizer
from posttrain.core.exchange.ranks import of_every
from posttrain.core.gauge import Gauge
from posttrain.engine.files.fingerprint import fingerprints
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport
from posttrain.role.roles import StageRoles
from posttrain.system.errors import InvariantError


def only_frozen_is_left_out(config: Optimizer, parameters: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """The optimizer updates every parameter that the settings do not freeze, and no other."""
    frozen = {n for n in parameters if config.frozen(n)}
    if moved := sorted(frozen & set(trained)):
        raise InvariantError(
            f"{len(moved)} of {len(frozen)} frozen parameters would be trained: {', '.join(moved[:5])}. The optimizer"
            " was built with other settings than the stage's"
        )
    if lost := sorted(set(parameters) - frozen - set(trained)):
        raise InvariantError(
            f"{len(lost)} parameters would not be trained, and optimizer.freeze={','.join(config.freeze)} does not name"
            f" them: {', '.join(lost[:5])}"
        )


def frozen_stays(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Frozen parameters have the digests that they had."""
    if changed := [n for n, digest in before.items() if after.get(n) != digest]:
        raise InvariantError(
            f"{len(changed)} of {len(before)} frozen parameters moved: {', '.join(changed[:5])}. Something else than"
            " the optimizer writes them, or it holds them although they are frozen"
        )


class FrozenCheck(Observer):
    """Frozen parameters stay as they were at the beginning of the stage, bit for bit."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def begin(self, roles: StageRoles[Any]) -> None:
        if roles.stage.optimizer.freeze:
            only_frozen_is_left_out(roles.stage.optimizer, roles.learner.parameters(), roles.trainer.trained())
            self._digests = self._now(roles)

    def on_event(self, roles: StageRoles[Any], event: Event) -> ObserverReport | None:
        if not self._digests or not isinstance(event, LearnedEvent) or not due(event.packed.index):
            return None
        of_every(roles.trainer.ranks, lambda: frozen_stays(self._digests, self._now(roles)))
        return ObserverReport({"canary/frozen": Gauge(len(self._digests), 1)})

    def _now(self, roles: StageRoles[Any]) -> dict[str, str]:
        config = roles.stage.optimizer
        return fingerprints((n, p) for n, p in roles.learner.parameters().items() if config.frozen(n))
