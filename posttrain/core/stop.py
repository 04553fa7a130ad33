"""Stop reasons of episodes and turns, the limits of an episode, and the number of the step that is played."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from posttrain.system.errors import ConfigError, at_least


class Stop(StrEnum):
    """The reason why an episode or a turn ended. If several reasons hold, it is the one that came first."""

    SAID = "stop"
    """The policy sampled a stop token."""
    STRING = "string"
    """The text of the turn contains a stop string, which the last token completed."""
    LENGTH = "length"
    """The turn reached its limit of tokens (`sampling.max_tokens`)."""
    TOKENS = "tokens"
    """The episode reached its limit of tokens, over all turns."""
    CONTEXT = "context"
    """The model's context is full."""
    TURNS = "turns"
    """The policy used up its turns: those of the task, or of `EpisodeLimits.turns`."""
    TOOLS = "tools"
    """Too many tool calls ran out of time."""
    TIME = "time"
    """The episode took longer than it may."""
    ERROR = "error"
    """The environment failed."""

    @property
    def finished(self) -> bool:
        """True where the policy ended its turn itself, by a stop token or a stop string."""
        return self in (Stop.SAID, Stop.STRING)

    @property
    def cut(self) -> bool:
        """True where a limit on tokens or time ended a turn of the policy, or came before one."""
        return self in (Stop.LENGTH, Stop.TOKENS, Stop.CONTEXT, Stop.TIME)


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode, beside `sampling.max_tokens` of a turn. None: no limit but those of the
    task and the context."""

    turns: int | None = None
    """Turns of the policy, and of the other seats where there are some (stop reason `turns`)."""
    tokens: int | None = None
    """Tokens of all these turns together (`tokens`)."""
    seconds: float | None = None
    """Wall time from the prompt to the end, with tools and waiting for the engine (`time`). The tokens of an unfinished
    turn are then lost."""
    tool_seconds: float = 10.0
    """Seconds of one tool call. A call that takes longer is stopped, and the policy gets a message about it."""
    tool_timeouts: int = 3
    """Calls that run out of time until the episode ends (`tools`)."""
    observation: int = 2000
    """Most characters of one tool result; the middle of a longer one is left out."""

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"env.limits.{name}={value}: must be > 0, or none for no limit")
        at_least(self, "env.limits.", tool_seconds=0.001, tool_timeouts=1, observation=20)


@dataclass(frozen=True)
class StepNumber:
    """The step of a stage that is played, for rewards that change with it. Outside training it is the last one."""

    step: int = 1
    """Counted from 1."""
    steps: int = 1
    """Number of steps of the whole stage."""
