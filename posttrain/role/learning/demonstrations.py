"""Supervised minibatches from an environment's demonstrations: the prompt is masked, a stop token ends a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.config.run import Supervised
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import Stage
from posttrain.core import abilities, seeds
from posttrain.core.batch import Batch
from posttrain.core.conversation import LearnedConversation
from posttrain.core.ports import Dialogue, Environment, PairRenderer
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.core.transcript import Transcript, shown_segment
from posttrain.core.types import Message, Segment, Task
from posttrain.role.episode_conversation import DemonstrationTalk
from posttrain.role.prompt_order import Prompts
from posttrain.system.errors import DataError

LIKELIHOOD = Sampling(stop_ids=())
"""Sampling settings under which imitated tokens are scored: the model's own distribution, temperature 1, nothing
truncated."""


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

    Its one stream is WEIGHT. The weight of a token is that of the data (1 where the data gives none), divided by the
    sum of all weights.
    """
    return together(await demonstrated(environment, renderer, dialogue, stage, seed=seed, step=step, context=context))


@dataclass(frozen=True, eq=False)
class Demonstrated:
    """One demonstration: its sequences, and the weight of each token that is learned (float64)."""

    segments: tuple[Segment, ...]
    weight_M: np.ndarray

    @staticmethod
    def of(segment: Segment) -> Demonstrated:
        """A sequence whose tokens count alike."""
        return Demonstrated((segment,), np.ones(segment.spoken))


def together(ones: Sequence[Demonstrated]) -> Batch:
    """The demonstrations as one minibatch."""
    sequence = [i for i, d in enumerate(ones) for _ in d.segments]
    return imitated([s for d in ones for s in d.segments], sequence, np.concatenate([d.weight_M for d in ones]))


def imitated(
    segments: Sequence[Segment], sequence: Sequence[int] | None = None, weight_M: np.ndarray | None = None
) -> Batch:
    """A minibatch whose spoken tokens are imitated, by their weights divided by their sum, or all alike. `sequence`:
    the episode of each segment; None: one segment each."""
    spoken = sum(s.spoken for s in segments)
    # A mean over tokens, not over demonstrations: a longer demonstration counts more.
    shares = np.full(spoken, 1.0 / spoken) if weight_M is None else weight_M / weight_M.sum()
    return Batch.of(segments, sequence, streams={WEIGHT: shares})


async def demonstrated(
    environment: Environment,
    renderer: PairRenderer,
    dialogue: Callable[[str], Dialogue],
    stage: Supervised,
    *,
    seed: int,
    step: int,
    context: int,
) -> list[Demonstrated]:
    """The demonstrations of one supervised step, in order."""
    # The cursor is computed from the step, and the generator belongs to the step: no step needs an earlier one.
    prompts = Prompts(environment.train, seeds.torch_seed(seed, f"sft/{stage.name}"), cursor=step * stage.batch)
    rng = seeds.generator(seed, f"demonstrate/{stage.name}", step)
    tasks = [next(prompts)[0] for _ in range(stage.batch)]
    return [await shown(environment, renderer, dialogue, stage, task, rng, context) for task in tasks]


async def shown(
    environment: Environment,
    renderer: PairRenderer,
    dialogue: Callable[[str], Dialogue],
    stage: Supervised,
    task: Task,
    rng: np.random.Generator,
    context: int,
) -> Demonstrated:
    """The demonstration of a task that a stage imitates: the learned turns of its conversation, or its completion."""
    if (talk := conversation_of(environment, stage, task)) is not None:
        pairs = renderer.conversation(talk, task.id, task.tools, stage.tool_arguments)
        sequences = [shown_segment(ids, weight_T > 0, LIKELIHOOD) for ids, weight_T in pairs]
        # Tokens that are only read have weight 0 and are left out: there
        # is one weight for each learned token, in packing order.
        learned_M = np.concatenate([w[w > 0] for _, w in pairs])
        return Demonstrated(tuple(fitting(s, task, context) for s in sequences), learned_M)
    prompt, completion = abilities.demonstrations(environment).write(task, stage.style, rng, stage.wrong)
    if isinstance(completion, str):
        return Demonstrated.of(demonstration(renderer, task, prompt, completion, context))
    # Several turns: the environment's answers between them are known only by playing the episode.
    talk_played = await recited(environment, renderer, dialogue(task.id), task, prompt, completion, LIKELIHOOD)
    return Demonstrated.of(fitting(talk_played.transcript.segment(), task, context))


def imitating(stage: Stage) -> Supervised | None:
    """Returns the settings with which a stage imitates the environment's demonstrations; None where it does not."""
    if isinstance(stage, Rejection) and stage.style is not None:
        return Supervised(name=stage.name, style=stage.style, turns=stage.turns, batch=stage.batch - stage.own)
    return stage if isinstance(stage, Supervised) else None


def conversation_of(environment: Environment, stage: Supervised, task: Task) -> LearnedConversation | None:
    """Returns the conversation of a task as far as a stage learns from it; None where it learns a completion alone."""
    # Only `write` can write wrong texts (`stage.wrong`).
    whole = None if stage.wrong else abilities.demonstrations(environment).conversation(task, stage.style)
    if whole is None or stage.turns == "all":
        return whole
    # Where the last turn comes directly after the task's prompt, it is the completion: it needs no conversation.
    return None if whole.last.after(task.prompt) else whole.last


def demonstration(
    renderer: PairRenderer, task: Task, prompt: str | Sequence[Message], completion: str, context: int
) -> Segment:
    """One demonstration of one turn as a segment, its prompt masked; DataError where the completion has no token, or
    the text is longer than the context."""
    prompt_ids, completion_ids = renderer.pair(prompt, completion, task.id, task.tools)
    if not len(completion_ids):
        raise DataError(f"the demonstration of task {task.id!r} has no token to imitate: its completion is empty")
    transcript = Transcript(LIKELIHOOD)
    transcript.see(prompt_ids)
    transcript.show(completion_ids)
    return fitting(transcript.segment(), task, context)


def fitting(segment: Segment, task: Task, context: int) -> Segment:
    """The segment; DataError where it is longer than the model's context."""
    if len(segment.ids) > context:
        # Where it is far beyond the context, the message gives no exact number.
        count = f"{len(segment.ids)}" if len(segment.ids) <= 2 * context else f"more than {2 * context}"
        raise DataError(
            f"the demonstration of task {task.id!r} has {count} tokens and the model's context is {context}: shorten"
            " it, or use a longer context"
        )
    return segment


async def recited(
    environment: Environment,
    renderer: PairRenderer,
    dialogue: Dialogue,
    task: Task,
    prompt: str | Sequence[Message],
    turns: Sequence[str],
    sampling: Sampling,
) -> DemonstrationTalk:
    """Play a demonstration of several turns in the environment, which answers each turn as it answers the policy.
    DataError where the episode ends before the last turn, or asks for more."""
    talk = DemonstrationTalk(renderer, dialogue, turns, sampling, chat=not isinstance(prompt, str), task=task.id)
    await environment.play(task, talk)
    if len(talk.turns) != len(turns):
        raise DataError(
            f"the demonstration of task {task.id!r} has {len(turns)} turns and its episode ended after"
            f" {len(talk.turns)}: correct the environment's demonstrate()"
        )
    return talk
