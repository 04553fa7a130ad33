"""Whether what a supervised stage imitates is what will be asked, and ends once."""

from __future__ import annotations

import numpy as np

from posttrain.checks.data import demonstration_ends_once, same_question
from posttrain.core import abilities, seeds
from posttrain.role.events import Event, Observer, PackedEvent, Remark
from posttrain.role.prompts import Prompts
from posttrain.role.roles import SupervisedRoles


class ImitationCheck(Observer):
    """Every demonstration ends once; the prompt of a stage's first one is what a rollout is shown."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the stage begins here."""

    def hear(self, h: SupervisedRoles, event: Event) -> Remark | None:
        if not isinstance(event, PackedEvent):
            return
        demonstration_ends_once(event.batch, h.stop_ids, h.text)
        if self._first:
            self._first = False
            self._same_question(h, event)

    def _same_question(self, h: SupervisedRoles, event: PackedEvent) -> None:
        """Compare the first demonstration's prompt with what a rollout shows; a document answers nothing."""
        stage, batch = h.stage, event.batch
        walk = Prompts(
            h.environment.train,
            seeds.torch_seed(h.run.seed, f"sft/{stage.name}"),
            cursor=(event.index - 1) * stage.batch,
        )
        task, _ = next(walk)
        prompt, _ = abilities.demonstrations(h.environment).write(
            task, stage.style, seeds.generator(h.run.seed, "look", event.index), 0.0
        )
        if not len(prompt):
            return
        first = int(batch.source_M[0]) + 1
        same_question(batch.ids_N[:first], np.asarray(h.dialogue(task.id).see(prompt)), h.text)
