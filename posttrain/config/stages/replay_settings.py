"""The settings of a buffer from which later steps learn again."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.system.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Groups of earlier steps that a step learns from beside its own. Each keeps the log-probs and versions it was
    sampled with, so an algorithm that compares with the sampler sees how old it is."""

    size: int = 64
    """Groups that the buffer holds. The oldest leaves for a new one."""
    groups: int = 8
    """Groups of the buffer that a step learns from, fewer while it holds fewer. None comes twice in a step."""
    age: int = 8
    """Steps after which a group leaves the buffer."""
    ratio: float | None = None
    """A group leaves where its tokens have become so much likelier or less likely that the mean of |log(policy /
    sampler)| is above this; measured when it is drawn. None: never."""
    discount: float = 1.0
    """Factor of a group's credit for each step since it was played."""
    balanced: bool = True
    """Draw prompts first, each as often as any other, then one of their groups. False: draw groups."""

    def __post_init__(self) -> None:
        for name in ("size", "groups", "age"):
            if getattr(self, name) < 1:
                raise ConfigError(f"replay.{name}={getattr(self, name)}: must be >= 1; replay=none has no buffer")
        if self.groups > self.size:
            raise ConfigError(f"replay.groups={self.groups} of a buffer of size={self.size}: raise size")
        if self.ratio is not None and not self.ratio > 0:
            raise ConfigError(f"replay.ratio={self.ratio:g}: must be > 0, or none")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"replay.discount={self.discount:g}: a factor in (0, 1]")
