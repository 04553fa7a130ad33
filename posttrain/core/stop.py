"""Why an episode, or a turn of one, ended, and the limits that end one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import ConfigError


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
    """The policy used up its turns: those of the task, or of `EpisodeLimits.turns`."""
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


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """What an episode may take at most, beside `sampling.max_tokens` of a turn. None: no limit but the task's own and
    the context."""

    turns: int | None = None
    """Turns of the policy, and of the other seats where there are some (stop reason `turns`)."""
    tokens: int | None = None
    """Tokens that they say, over all turns (`tokens`)."""
    seconds: float | None = None
    """Wall time from the prompt to the end, tools and waiting for the engine included (`time`). What a turn had said by
    then is lost."""
    tool_seconds: float = 10.0
    """Of one call. A call that takes longer is stopped, and the policy is told so."""
    tool_timeouts: int = 3
    """Calls that may run out of time; at this many the episode ends (`tools`)."""
    observation: int = 2000
    """Characters of one tool's result that are shown; the middle of a longer one is left out."""

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"env.limits.{name}={value}: must be > 0, or none for no limit")
        for name, least in (("tool_seconds", 0.001), ("tool_timeouts", 1), ("observation", 20)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"env.limits.{name}={getattr(self, name)}: must be >= {least}")
