"""Whether demonstrations have the prompts that rollouts get, and end in one stop token."""

from __future__ import annotations

import numpy as np

from posttrain.checks.data import demonstration_ends_once, same_question
from posttrain.core import abilities, seeds
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.prompts import Prompts
from posttrain.role.roles import SupervisedRoles


class ImitationCheck(Observer):
    """Every demonstration ends in one stop token. A stage's first one has the prompt that a rollout would get."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the stage starts here, not from a checkpoint."""

    def on_event(self, roles: SupervisedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return
        demonstration_ends_once(event.batch, roles.stop_ids, roles.text)
        if self._first:
            self._first = False
            self._same_question(roles, event)

    def _same_question(self, roles: SupervisedRoles, event: PackedEvent) -> None:
        """Compare the first demonstration's prompt with a rollout's. A document has no prompt to compare."""
        stage, batch = roles.stage, event.batch
        prompts = Prompts(
            roles.environment.train,
            seeds.torch_seed(roles.run.seed, f"sft/{stage.name}"),
            cursor=(event.index - 1) * stage.batch,
        )
        task, _ = next(prompts)
        prompt, _ = abilities.demonstrations(roles.environment).write(
            task, stage.style, seeds.generator(roles.run.seed, "look", event.index), 0.0
        )
        if not len(prompt):
            return
        first = int(batch.source_M[0]) + 1
        same_question(batch.ids_N[:first], np.asarray(roles.dialogue(task.id).see(prompt, task.tools)), roles.text)
