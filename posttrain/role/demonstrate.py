"""Supervised minibatches from an environment's demonstrations: the prompt is masked, and one stop token ends each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from posttrain.core import abilities, seeds
from posttrain.core.batch import Batch
from posttrain.core.errors import DataError
from posttrain.core.ports import Dialogue, Environment, PairRenderer
from posttrain.core.run import Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.core.transcript import Transcript
from posttrain.core.types import Message, Segment, Task
from posttrain.role.prompts import Prompts
from posttrain.role.talk import DemonstrationTalk

LIKELIHOOD = Sampling(stop_ids=())
"""What is imitated is scored under the model's own distribution: temperature 1, nothing truncated."""


async def demonstrations(
    environment: Environment,
    renderer: PairRenderer,
    dialogue: Callable[[str], Dialogue],
    stage: Supervised,
    *,
    seed: int,
    step: int,
    context: int,
) -> Batch:
    """The minibatch of one supervised step. It is a function of (seed, stage, step), so a resumed run needs no state.

    Its one stream is WEIGHT. Every demonstrated token weighs 1 / (demonstrated tokens of the minibatch).
    """
    return imitated(await demonstrated(environment, renderer, dialogue, stage, seed=seed, step=step, context=context))


def imitated(segments: Sequence[Segment], sequence: Sequence[int] | None = None) -> Batch:
    """A minibatch whose spoken tokens are imitated, each with the same weight.

    Args:
        sequence: the episode of each segment; None: one segment each.
    """
    spoken = sum(s.spoken for s in segments)
    return Batch.of(segments, sequence, streams={WEIGHT: np.full(spoken, 1.0 / spoken)})


async def demonstrated(
    environment: Environment,
    renderer: PairRenderer,
    dialogue: Callable[[str], Dialogue],
    stage: Supervised,
    *,
    seed: int,
    step: int,
    context: int,
) -> list[Segment]:
    """The demonstrations of one supervised step, in order."""
    walk = Prompts(environment.train, seeds.torch_seed(seed, f"sft/{stage.name}"), cursor=step * stage.batch)
    texts = abilities.demonstrations(environment)
    rng = seeds.generator(seed, f"demonstrate/{stage.name}", step)
    segments: list[Segment] = []
    for _ in range(stage.batch):
        task, _visit = next(walk)
        prompt, completion = texts.write(task, stage.style, rng, stage.wrong)
        if isinstance(completion, str):
            segments.append(demonstration(renderer, task, prompt, completion, context))
        else:
            said = await recited(environment, renderer, dialogue(task.id), task, prompt, completion, LIKELIHOOD)
            segments.append(_fits(said.transcript.segment(), task, context))
    return segments


def demonstration(
    renderer: PairRenderer, task: Task, prompt: str | Sequence[Message], completion: str, context: int
) -> Segment:
    """One demonstration of one turn as a segment, its prompt masked.

    Raises:
        DataError: the completion has no token, or the text is longer than the model's context.
    """
    seen, said = renderer.pair(prompt, completion, task.id, task.tools)
    if not len(said):
        raise DataError(f"the demonstration of task {task.id!r} has no token to imitate: its completion is empty")
    transcript = Transcript(LIKELIHOOD)
    transcript.see(seen)
    transcript.show(said)
    return _fits(transcript.segment(), task, context)


def _fits(segment: Segment, task: Task, context: int) -> Segment:
    if len(segment.ids) > context:
        many = f"{len(segment.ids)}" if len(segment.ids) <= 2 * context else f"more than {2 * context}"
        raise DataError(
            f"the demonstration of task {task.id!r} has {many} tokens and the model's context is {context}: shorten it,"
            " or use a longer context"
        )
    return segment


async def recited(
    world: Environment,
    renderer: PairRenderer,
    dialogue: Dialogue,
    task: Task,
    prompt: str | Sequence[Message],
    turns: Sequence[str],
    sampling: Sampling,
) -> DemonstrationTalk:
    """Play a demonstration of several turns in the environment, which answers each turn as it answers the policy.

    Raises:
        DataError: the episode ends before the demonstration's last turn, or asks for more turns.
    """
    talk = DemonstrationTalk(renderer, dialogue, turns, sampling, chat=not isinstance(prompt, str), task=task.id)
    await world.play(task, talk)
    if len(talk.turns) != len(turns):
        raise DataError(
            f"the demonstration of task {task.id!r} has {len(turns)} turns and its episode ended after"
            f" {len(talk.turns)}: correct the environment's demonstrate()"
        )
    return talk
