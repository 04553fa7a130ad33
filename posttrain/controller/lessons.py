"""The canaries of a supervised stage: what is imitated is what will be asked, it ends once, and everything learns from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from posttrain.controller.house import Parts
from posttrain.core import seeds
from posttrain.core.batch import Demonstrations
from posttrain.core.errors import InvariantError
from posttrain.core.run import Supervised
from posttrain.core.types import Step
from posttrain.role.agreement import demonstration_ends_once, same_question, served_is_trained
from posttrain.role.listening import listening
from posttrain.role.movement import gradient_reaches, moved
from posttrain.role.prompts import Prompts
from posttrain.role.trainer import NAMED, NotFinite, Trainer


class Lessons:
    """Watches one supervised stage. `fresh`: no step of it was taken yet."""

    def __init__(self, *, fresh: bool) -> None:
        self._fresh = fresh

    @contextmanager
    def watch(self, parts: Parts, trainer: Trainer, stage: Supervised, batch: Demonstrations, index: int) -> Iterator[None]:
        """Around one optimizer step of imitation: every demonstration ends once; at the first, the first demonstration's
        prompt is the one a rollout is shown, and every parameter moves. A gradient that is not finite names the demonstrations that make
        it, and the step is in the record."""
        demonstration_ends_once(batch, parts.stop_ids, parts.text)
        try:
            with self._first(parts, trainer, stage, batch, index):
                yield
        except NotFinite as error:
            names = [f"demonstration {e} ({parts.text(batch.select([e]).ids_N)[:60]!r})" for e in error.culprits[:NAMED]]
            told = error.told([*names, *[""] * (len(error.culprits) - len(names))], f" ({stage.name} step {index})")
            parts.book.write(Step(stage.name, index, trainer.version, {}, notes=(f"stopped: {told}",)))
            raise InvariantError(told) from error

    @contextmanager
    def _first(self, parts: Parts, trainer: Trainer, stage: Supervised, batch: Demonstrations, index: int) -> Iterator[None]:
        """Around the first step of the stage: the first demonstration's prompt is the one a rollout is shown, and every parameter moves."""
        if not self._fresh:
            yield
            return
        self._fresh = False
        served_is_trained(dict(parts.learner.tensors()), trainer.trained())
        gradient_reaches(parts.learner, parts.sync.canary)
        self._first_question(parts, stage, batch, index)
        lr = trainer.optimizer.lr
        with listening(trainer, update=stage.optimizer) as heard:
            yield
        if heard.handed is not None:
            moved(heard.handed, trainer.trained(), lr)

    def _first_question(self, parts: Parts, stage: Supervised, batch: Demonstrations, index: int) -> None:
        """Compare the first demonstration's prompt with what a rollout shows; a document answers nothing."""
        walk = Prompts(parts.environment.train, seeds.torch_seed(parts.run.seed, f"sft/{stage.name}"), cursor=(index - 1) * stage.batch)
        task, _ = next(walk)
        prompt, _ = parts.environment.demonstrate(task, stage.style, seeds.generator(parts.run.seed, "look", index), 0.0)
        if not len(prompt):
            return
        first = int(batch.source_M[0]) + 1
        same_question(batch.ids_N[:first], np.asarray(parts.rollout.dialogue(task.id).see(prompt)), parts.text)
