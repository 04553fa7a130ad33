"""What a step needs of a rollout, in one object that the algorithm makes (`Algorithm.request`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.pieces.token import Shown

if TYPE_CHECKING:
    from posttrain.core.types import Group


@dataclass(frozen=True, kw_only=True)
class Request:
    """Groups of siblings for one step. How they are said is the sampling contract's, which prompts come next the curriculum's."""

    prompts: int
    """Groups the step learns from."""
    siblings: int
    """Episodes of each group, those that are shown included."""
    extra: int = 0
    """So many more siblings are begun in each group; what has not ended once the wanted number has is aborted."""
    most: int = 8
    """At most `most * prompts` groups are asked for, whatever the filter turns away."""
    mixed: bool = False
    """Only groups whose raw outcomes differ are learned from."""
    greedy: bool = False
    """Each prompt's argmax answer is sampled beside the siblings and never learned from."""
    shown: Shown | None = None
    """So many of the siblings are written by a demonstration, in this style. None: all are the policy's."""

    def keeps(self, group: Group) -> bool:
        """Whether the step learns from a group that was played."""
        return not self.mixed or group.mixed
