"""Checks that demonstrations have the prompts that rollouts get, and end in one stop token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.checks.data_checks import demonstration_ends_once, same_question
from posttrain.core import abilities, seeds
from posttrain.core.conversation import LearnedConversation
from posttrain.core.types import Message, Task
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.learning.demonstrations import conversation_of
from posttrain.role.prompt_order import Prompts
from posttrain.role.roles import SupervisedRoles


class ImitationCheck(Observer):
    """Checks that every demonstrated turn ends in one stop token, and that the stage's first demonstration has the
    prompt that a rollout of its task would get."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the first demonstration is still to be compared. False from the beginning in a resumed stage."""
        self._documents = False
        """Whether the data has documents: texts that are learned whole, without a prompt."""

    async def begin(self, roles: SupervisedRoles) -> None:
        talks = [r.conversation for r in abilities.declared(roles.environment).rows or ()]
        self._documents = any(c is not None and isinstance(c.messages, str) for c in talks)

    def on_event(self, roles: SupervisedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return
        whole, texts = roles.stage.tool_arguments, self._documents
        demonstration_ends_once(event.batch, roles.stop_ids, roles.text, whole_turns=whole, documents=texts)
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
        # A source is the position before a token that counts, so the first source is the last token of the prompt.
        shown = batch.ids_N[: int(batch.source_M[0]) + 1]
        asked = [np.asarray(roles.dialogue(task.id).see(p, task.tools)) for p in _prompts(roles, event.index, task)]
        # No prompt is equal: this raises the error that says where they differ.
        if asked and not any(np.array_equal(shown, ids) for ids in asked):
            same_question(shown, asked[0], roles.text)


def _prompts(roles: SupervisedRoles, index: int, task: Task) -> list[str | Sequence[Message]]:
    """The prompts that may stand before the first learned turn of a demonstration; [] where none can be compared.

    Where the chat template rewrites history, each learned turn is a sequence of its own, so any of them may come first.
    The template writes tool calls in its own form, so prompts with a message that has calls are left out.
    """
    stage = roles.stage
    if (talk := conversation_of(roles.environment, stage, task)) is not None:
        return _before_turns(talk, roles.run.model.history == "rewrite")
    rng = seeds.generator(roles.run.seed, "look", index)
    prompt, _ = abilities.demonstrations(roles.environment).write(task, stage.style, rng, 0.0)
    return [prompt] if len(prompt) else []


def _before_turns(talk: LearnedConversation, rewritten: bool) -> list[str | Sequence[Message]]:
    """The messages before the first learned turn, or with `rewritten` before each learned turn."""
    if isinstance(talk.messages, str):
        return []
    prompts = [talk.messages[:i] for i in (talk.learned if rewritten else talk.learned[:1])]
    return [prompt for prompt in prompts if not any("tool_calls" in m for m in prompt)]
