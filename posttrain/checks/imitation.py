"""Whether what a supervised stage imitates is what will be asked, and ends once."""

from __future__ import annotations

import numpy as np

from posttrain.checks.data import demonstration_ends_once, same_question
from posttrain.core import abilities, seeds
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.prompts import Prompts
from posttrain.role.roles import SupervisedRoles


class ImitationCheck(Observer):
    """Every demonstration ends once; the prompt of a stage's first one is what a rollout is shown."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the stage begins here."""

    def on_event(self, roles: SupervisedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return
        demonstration_ends_once(event.batch, roles.stop_ids, roles.text)
        if self._first:
            self._first = False
            self._same_question(roles, event)

    def _same_question(self, roles: SupervisedRoles, event: PackedEvent) -> None:
        """Compare the first demonstration's prompt with what a rollout shows; a document answers nothing."""
        stage, batch = roles.stage, event.batch
        walk = Prompts(
            roles.environment.train,
            seeds.torch_seed(roles.run.seed, f"sft/{stage.name}"),
            cursor=(event.index - 1) * stage.batch,
        )
        task, _ = next(walk)
        prompt, _ = abilities.demonstrations(roles.environment).write(
            task, stage.style, seeds.generator(roles.run.seed, "look", event.index), 0.0
        )
        if not len(prompt):
            return
        first = int(batch.source_M[0]) + 1
        same_question(batch.ids_N[:first], np.asarray(roles.dialogue(task.id).see(prompt)), roles.text)
