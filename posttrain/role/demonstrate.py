"""Supervised minibatches: what an environment demonstrates, the prompt masked, one stop token at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core import seeds
from posttrain.core.batch import Demonstrations
from posttrain.core.errors import DataError
from posttrain.core.ports import PairRenderer, Teacher
from posttrain.core.run import Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.types import Message, Segment, Task
from posttrain.role.prompts import Prompts

_LIKELIHOOD = Sampling(stop_ids=())
"""Demonstrations are scored in the plain distribution."""


def demonstrations(teacher: Teacher, renderer: PairRenderer, stage: Supervised, *, seed: int, step: int, context: int) -> Demonstrations:
    """The minibatch of one supervised step: a function of (seed, stage, step), so it needs no state.

    Every demonstrated token weighs 1 / (demonstrated tokens of the minibatch).
    """
    walk = Prompts(teacher.train, seeds.torch_seed(seed, f"sft/{stage.name}"), cursor=step * stage.batch)
    rng = seeds.generator(seed, f"demonstrate/{stage.name}", step)
    segments: list[Segment] = []
    for _ in range(stage.batch):
        task, _visit = next(walk)
        prompt, completion = teacher.demonstrate(task, stage.style, rng, stage.wrong)
        segments.append(demonstration(renderer, task, prompt, completion, context))
    spoken = sum(s.spoken for s in segments)
    return Demonstrations.of(segments, weight_M=np.full(spoken, 1.0 / spoken))


def demonstration(renderer: PairRenderer, task: Task, prompt: str | Sequence[Message], completion: str, context: int) -> Segment:
    """One demonstrated text as a segment, its prompt masked.

    Raises DataError where nothing is left to imitate or the text is longer than the model's context.
    """
    seen, said = renderer.pair(prompt, completion, task.id)
    if not len(said):
        raise DataError(f"the demonstration of task {task.id!r} has no token to imitate: its completion is empty")
    ids = np.concatenate([seen, said])
    if len(ids) > context:
        raise DataError(
            f"the demonstration of task {task.id!r} has {len(ids)} tokens and the model's context is {context}: shorten it, or use a longer context"
        )
    mask = np.arange(len(ids)) >= len(seen)
    return Segment(ids, mask, np.where(mask, 0.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32), _LIKELIHOOD)
