"""A conversation to imitate, with a weight for each message; and the protocol that writes demonstrations as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from posttrain.system.errors import InvariantError

if TYPE_CHECKING:  # the settings read this file, and they need no numpy
    import numpy as np

    from posttrain.core.types import Message

Turns = Literal["all", "last"]
"""Which turns of a row are learned: all with a weight above 0, or only the last of these."""


@dataclass(frozen=True)
class LearnedConversation:
    """All messages of a row in order, or one text, with a weight for each. A message of weight 0 is read, not learned.

    >>> c = LearnedConversation(({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}), (0.0, 1.0))
    >>> c.learned
    (1,)
    """

    messages: str | tuple[Message, ...]
    weights: tuple[float, ...]
    """One weight per message; for a text, one weight."""

    def __post_init__(self) -> None:
        if len(self.weights) != (1 if isinstance(self.messages, str) else len(self.messages)):
            raise InvariantError(f"a conversation of {len(self.messages)} messages has {len(self.weights)} weights")

    @property
    def learned(self) -> tuple[int, ...]:
        """The places of the messages that are learned."""
        return tuple(i for i, w in enumerate(self.weights) if w > 0)

    @property
    def last(self) -> LearnedConversation:
        """The same conversation, in which only the last learned message is learned."""
        at = self.learned[-1:]
        return replace(self, weights=tuple(w if i in at else 0.0 for i, w in enumerate(self.weights)))

    def after(self, prompt: str | Sequence[Message]) -> bool:
        """Returns whether it is `prompt` and one more message, which has weight 1 and is all that is learned.

        Such a conversation can also be written in the simpler form, as a pair of prompt and completion.
        """
        if isinstance(self.messages, str) or isinstance(prompt, str) or not self.messages:
            return False
        begins_with_prompt = self.messages[:-1] == tuple(prompt)
        return begins_with_prompt and self.weights[-1] == 1 and not any(self.weights[:-1])


class PairRenderer(Protocol):
    """Writes demonstrations as tokens.

    Args of its methods:
        task: the name of the row, for messages about it.
        tools: the tools that the chat template describes in the prompt.
        arguments: whether the arguments of tool calls are learned. If not, they alone of a turn have weight 0.
        behind: ids of the prompt. Where the chat template opened a thought at its end, the text goes on behind it.
    """

    def pair(
        self, prompt: str | Sequence[Message], completion: str, task: str = "", tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(prompt ids, completion ids that end in exactly one stop token), int32. Errors name the task."""
        ...

    def conversation(
        self, c: LearnedConversation, task: str = "", tools: Sequence[Mapping[str, Any]] = (), arguments: bool = True
    ) -> Sequence[tuple[np.ndarray, np.ndarray]]:
        """(ids int32, weights float64) of each sequence of a conversation. Weight 0 is seen and not learned.

        It is one sequence, or several: where the chat template writes what stands before a turn in another way once
        messages follow, this turn has a sequence of its own, in the form that the policy would see and say.
        """
        ...

    def completion_ids(self, text: str, *, chat: bool = False, task: str = "", behind: Any = ()) -> np.ndarray:
        """int32 ids of a demonstrated turn. It ends in one stop token: that of chats (`chat`), or of text."""
        ...
