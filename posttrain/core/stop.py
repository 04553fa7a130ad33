"""Why an episode, or a turn of one, ended."""

from __future__ import annotations

from enum import StrEnum


class Stop(StrEnum):
    """The reason; the first that came true."""

    SAID = "stop"
    """The policy said a stop token."""
    STRING = "string"
    """What the policy said contains a stop string, which its last token completed."""
    LENGTH = "length"
    """A turn reached its most tokens (`sampling.max_tokens`)."""
    TOKENS = "tokens"
    """The episode reached its most tokens, over all turns."""
    CONTEXT = "context"
    """The model's context is full."""
    TURNS = "turns"
    """The policy used up its turns."""
    TOOLS = "tools"
    """Too many tool calls ran out of time."""
    TIME = "time"
    """The episode took longer than it may."""
    ERROR = "error"
    """The environment broke."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended its turn itself, by a stop token or a stop string."""
        return self in (Stop.SAID, Stop.STRING)

    @property
    def cut(self) -> bool:
        """Whether a limit on tokens or time cut the policy off in what it was saying or about to say."""
        return self in (Stop.LENGTH, Stop.TOKENS, Stop.CONTEXT, Stop.TIME)
